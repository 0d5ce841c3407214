"""The classifier: padding, pooling, positions, dtypes, dropout, its variables."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import Buffer, SequenceClassifier
from lra_jax.models.mlp import Mlp

pytestmark = pytest.mark.slow

LENGTHS = np.array([5, 12, 9], np.int32)
VOCABULARY = 11


def classifier(mechanism="cosformer", **changes) -> SequenceClassifier:
    settings = {
        "num_layers": 1,
        "embed_dim": 8,
        "mlp_dim": 12,
        "max_length": 16,
        "rngs": nnx.Rngs(0),
    }
    model = SequenceClassifier(VOCABULARY, 4, mechanism=mechanism, **settings | changes)
    if model.encoder.cls is not None:  # Zero at first: let it say something.
        model.encoder.cls[...] = jnp.linspace(-1, 1, 8)
    return model


def tokens(width: int = 12) -> np.ndarray:
    drawn = np.random.default_rng(0).integers(1, VOCABULARY, (3, width))
    return np.where(np.arange(width) < LENGTHS[:, None], drawn, 0).astype(np.uint8)


def apply(model, tokens, lengths, key):
    return model(tokens, lengths, None if key is None else nnx.Rngs(dropout=key))


def logits(model, tokens, lengths=None, key=None) -> np.ndarray:
    return np.asarray(helpers.call_model(apply, model, tokens, lengths, key))


def apply_encoder(model, tokens, mask):
    return model.encoder(tokens, mask)


def encode(model, tokens, lengths) -> np.ndarray:
    mask = np.arange(tokens.shape[1]) < lengths[:, None]
    return helpers.call_model(apply_encoder, model, tokens, mask)


def head(model, pooled):
    return model.logits(jax.nn.relu(model.hidden(pooled)))


# A mechanism of each kind: all of them are shown to be exact with padding on their own.
KINDS = ("softmax", "cosformer", "flow", "linformer", "performer", "local", "fnet")
KINDS += ("luna", "flash", "gla", "hgrn")
VARIANTS = [*((name, "mean") for name in KINDS), ("flow", "cls")]
VARIANTS += [("cosformer", "cls"), ("linformer", "cls")]


@pytest.mark.parametrize(("mechanism", "pooling"), VARIANTS)
def test_a_padded_batch_equals_each_sample_alone(mechanism, pooling):
    """And whatever lies beyond a length is never read."""
    model = classifier(mechanism, pooling=pooling)
    padded = logits(model, tokens(), LENGTHS)  # The second sample has no padding.
    alone = logits(model, tokens()[:1, : LENGTHS[0]])
    np.testing.assert_allclose(alone[0], padded[0], atol=2e-5)
    assert np.abs(padded - padded[:1]).max() > 1e-3
    garbage = np.where(tokens() == 0, VOCABULARY - 1, tokens()).astype(np.uint8)
    np.testing.assert_array_equal(padded, logits(model, garbage, LENGTHS))
    read = logits(model, garbage, LENGTHS + 1) - logits(model, tokens(), LENGTHS + 1)
    assert np.abs(read).max() > 1e-4


def test_pooling():
    mean, cls = classifier(pooling="mean"), classifier(pooling="cls")
    encoded = np.asarray(encode(mean, tokens(), LENGTHS))
    pooled = np.stack([encoded[i, :n].mean(0) for i, n in enumerate(LENGTHS)])
    expected = helpers.call_model(head, mean, pooled)
    np.testing.assert_allclose(logits(mean, tokens(), LENGTHS), expected, atol=1e-5)
    encoded = np.asarray(encode(cls, tokens(), LENGTHS))
    assert encoded.shape == (3, 13, 8)
    expected = helpers.call_model(head, cls, encoded[:, 0])
    np.testing.assert_allclose(logits(cls, tokens(), LENGTHS), expected, atol=1e-5)
    # The class vector fits in front of the longest sequence.
    assert logits(cls, np.ones((1, 16), np.uint8)).shape == (1, 4)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_positions_tell_the_order(positions):
    model = classifier("linear", positions=positions)
    learned = "positions" in nnx.state(model.encoder, nnx.Param)
    assert learned == (positions == "learned")
    encoder: Any = model.encoder
    if learned:
        encoder.positions[...] *= 50
    x = tokens()[1:2]
    assert np.abs(logits(model, x) - logits(model, x[:, ::-1])).max() > 1e-3
    if learned:
        encoder.positions[...] *= 0
        reversed_ = logits(model, np.ascontiguousarray(x[:, ::-1]))
        np.testing.assert_allclose(logits(model, x), reversed_, atol=1e-5)


def test_dropout_needs_keys_and_follows_them():
    model, x = classifier(dropout=0.5), tokens()
    plain, again = logits(model, x, LENGTHS), logits(model, x, LENGTHS)
    np.testing.assert_array_equal(plain, again)
    one, two, three = (
        logits(model, x, LENGTHS, jax.random.key(seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - three).max() > 1e-3 and np.abs(one - plain).max() > 1e-3
    without = classifier(dropout=0.0)
    np.testing.assert_allclose(
        logits(without, x, LENGTHS, jax.random.key(0)), plain, atol=1e-6
    )


@pytest.mark.parametrize("mechanism", ["softmax", "performer", "gla"])
def test_all_state_is_parameters_and_buffers(mechanism):
    model = classifier(mechanism, pooling="cls")
    kinds = {type(v) for _, v in nnx.to_flat_state(nnx.state(model))}
    assert (Buffer in kinds) == (mechanism == "performer")
    assert all(issubclass(kind, nnx.Param) for kind in kinds - {Buffer})
    nnx.split(model, (nnx.Param, Buffer))  # Raises if anything is left over.


def test_layers_differ_and_seeds_repeat():
    models = [classifier(num_layers=2) for _ in range(2)]
    one, two = map(nnx.state, models)
    helpers.assert_equal_trees(one, two)
    blocks: list[Any] = list(models[0].encoder.blocks)
    kernels = [block.attention.query.kernel[...] for block in blocks]
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3
    other = nnx.state(classifier(num_layers=2, rngs=nnx.Rngs(1)))
    first, second = (s["encoder"]["embed"]["embedding"][...] for s in (one, other))
    assert np.abs(first - second).min() > 0


def projections(model) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of the mechanism's own arrays, block by block."""
    blocks = (block.attention.parameters for block in model.encoder.blocks)
    return [{name: p.shape for name, p in arrays.items()} for arrays in blocks]


def test_layerwise_sharing_is_one_matrix_for_all_blocks():
    options = {"features": 5, "sharing": "layerwise"}
    model = classifier("linformer", num_layers=3, attention_options=options)
    assert projections(model) == [{"key_projection": (5, 16)}, {}, {}]
    apart = classifier(
        "linformer", num_layers=3, attention_options=options | {"sharing": "key_value"}
    )
    assert [len(group) for group in projections(apart)] == [1, 1, 1]
    state = nnx.to_pure_dict(nnx.state(model))
    blocks = state["encoder"]["blocks"]
    group = blocks[0]["attention"]["parameters"]
    for index in (1, 2):
        blocks[index]["attention"]["parameters"] = group
    graph, abstract = nnx.split(apart)
    nnx.replace_by_pure_dict(abstract, state)
    expected = logits(nnx.merge(graph, abstract), tokens(), LENGTHS)
    np.testing.assert_allclose(logits(model, tokens(), LENGTHS), expected, atol=1e-6)


def test_a_size_for_each_block():
    model = classifier(
        "linformer", num_layers=2, attention_options={"features": (6, 3)}
    )
    assert [group["key_projection"] for group in projections(model)] == [
        (6, 16),
        (3, 16),
    ]
    assert np.isfinite(logits(model, tokens(), LENGTHS)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": (6, 3, 2)}, "each of the 2 blocks, got 3: 6/3/2"),
        ({"features": (6, 3), "sharing": "layerwise"}, r"layerwise, got \(6, 3\)"),
        ({"sharing": ("layerwise", "none")}, "sharing: expected one value"),
        ({"sharing": "headwide"}, "sharing: expected one of"),
    ],
)
def test_options_by_block_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        classifier("linformer", num_layers=2, attention_options=options)


@pytest.mark.parametrize("mechanism", ["gau", "flash"])
def test_a_gated_unit_stands_in_the_mlps_place_too(mechanism):
    options = {"query_dim": 6, "expansion": 1.5}
    model = classifier(mechanism, attention_options=options)
    block: Any = model.encoder.blocks[0]
    for unit in (block.attention, block.mlp):
        assert (unit.num_heads, unit.head_dim, unit.value_dim) == (1, 6, 12)
        assert unit.gates["gate"].outer.kernel.shape == (8, 12)
    kernels = (block.attention.query.kernel[...], block.mlp.query.kernel[...])
    assert np.abs(kernels[0] - kernels[1]).max() > 1e-3
    assert isinstance(classifier().encoder.blocks[0].mlp, Mlp)


def test_recomputed_blocks_give_the_same_numbers() -> None:
    """Loss and gradients, with dropout."""
    sizes = {"num_layers": 3, "embed_dim": 8, "mlp_dim": 64, "max_length": 64}
    tokens = jnp.ones((2, 64), jnp.uint8)
    results = []
    for remat in (False, True):
        settings = sizes | {"dropout": 0.3, "remat": remat}
        model = SequenceClassifier(7, 3, **settings, rngs=nnx.Rngs(params=0))
        graph, params = nnx.split(model)

        def loss(params, graph=graph):
            rngs = nnx.Rngs(dropout=1)
            return jnp.square(nnx.merge(graph, params)(tokens, None, rngs)).sum()

        results.append(helpers.quick_jit(jax.value_and_grad(loss))(params))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
