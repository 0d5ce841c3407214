"""Real vectors in place of token ids: padding, packing, and the head of time series."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import SequenceClassifier, TokenClassifier, TransformerEncoder

CHANNELS = 3
LENGTHS = (5, 7, 2)
SIZES = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 12, "max_length": 8}


def classifier(**settings: Any) -> SequenceClassifier:
    values = {"inputs": "vectors", **SIZES, **settings}
    return SequenceClassifier(CHANNELS, 2, **values, rngs=nnx.Rngs(0))


def rows(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, CHANNELS)).astype(np.float32) for n in LENGTHS]


def padded(width: int, fill: float) -> np.ndarray:
    batch = np.full((len(LENGTHS), width, CHANNELS), fill, np.float32)
    for row, series in zip(batch, rows(), strict=True):
        row[: len(series)] = series
    return batch


@pytest.mark.parametrize(
    ("mechanism", "pooling"),
    [("flow", "mean"), ("cosformer", "flatten"), ("flow", "attention+ends")],
)
def test_a_padded_batch_is_each_series_alone(mechanism: str, pooling: str) -> None:
    model = classifier(mechanism=mechanism, pooling=pooling)
    alone = np.concatenate([model(jnp.asarray(x[None])) for x in rows()])
    lengths = jnp.array(LENGTHS)
    for width in (7, 8):
        batch = jnp.asarray(padded(width, fill=9.0))
        np.testing.assert_allclose(model(batch, lengths), alone, atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "flatten"])
def test_packed_series_are_each_alone(pooling: str) -> None:
    model = classifier(mechanism="linear", pooling=pooling)
    alone = np.concatenate([model(jnp.asarray(x[None])) for x in rows()])
    first, second, third = rows()
    batch, ids = np.zeros((2, 8, CHANNELS), np.float32), np.zeros((2, 8), np.int32)
    batch[0, :7], ids[0, :7] = np.concatenate([first, third]), [1] * 5 + [2] * 2
    batch[1, :7], ids[1, :7] = second, 1
    logits = model(jnp.asarray(batch), segment_ids=jnp.asarray(ids), documents=2)
    np.testing.assert_allclose(logits[0], alone[[0, 2]], atol=1e-5)
    np.testing.assert_allclose(logits[1, 0], alone[1], atol=1e-5)


def test_padding_has_no_gradient() -> None:
    model = classifier(mechanism="softmax", pooling="flatten")
    lengths = jnp.array(LENGTHS)
    batch = jnp.asarray(padded(8, fill=1.0))
    gradient = jax.grad(lambda x: model(x, lengths).sum())(batch)
    real = np.arange(8) < np.array(LENGTHS)[:, None]
    assert np.abs(gradient)[real].min() > 0
    assert not np.asarray(gradient)[~real].any()


def test_vectors_are_projected_and_scaled() -> None:
    plain, scaled = (
        TransformerEncoder(
            CHANNELS,
            inputs="vectors",
            positions="none",
            scale_embeddings=scale,
            **SIZES,
            rngs=nnx.Rngs(0),
        )
        for scale in (False, True)
    )
    embed: Any = plain.embed
    assert embed.kernel.shape == (CHANNELS, SIZES["embed_dim"])
    batch = jnp.asarray(padded(8, fill=0.0))
    factor = SIZES["embed_dim"] ** 0.5
    assert not embed.bias[...].any()  # So that the factor can be on the input.
    np.testing.assert_allclose(scaled(batch), plain(batch * factor), atol=1e-5)


def test_single_positions_of_vectors() -> None:
    model = TokenClassifier(
        CHANNELS, 4, inputs="vectors", is_causal=True, **SIZES, rngs=nnx.Rngs(0)
    )
    assert model(jnp.asarray(padded(8, fill=0.0))).shape == (3, 8, 4)


def test_flowformers_model_has_its_parameters() -> None:
    """Its encoder has 6.31 M; the whole model 6.46 M with all 29 steps of the longest
    series of JapaneseVowels, and 10.79 M on EthanolConcentration."""

    def parameters(channels: int, classes: int, length: int) -> int:
        model = nnx.eval_shape(
            lambda: SequenceClassifier(
                channels,
                classes,
                inputs="vectors",
                mechanism="flow",
                pooling="flatten",
                post_norm=True,
                final_norm=True,
                embed_dim=512,
                num_heads=8,
                mlp_dim=2048,
                max_length=length,
                rngs=nnx.Rngs(0),
            )
        )
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        return sum(leaf.size for leaf in leaves)

    encoder = 2 * (4 * (512**2 + 512) + 2 * 512 * 2048 + 2560 + 4 * 512) + 2 * 512
    assert encoder == 6_305_792
    for sizes in ((12, 9, 26), (12, 9, 29), (3, 4, 1751)):
        channels, classes, length = sizes
        inputs = 512 * (channels + 1) + 512 * length
        head = classes * (512 * length + 1)
        assert parameters(*sizes) == encoder + inputs + head
    assert parameters(12, 9, 29) == 6_460_937
    assert parameters(3, 4, 1751) == 10_790_404


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"padding": "zeros"}, "padding: expected 'lengths' with inputs='vectors'"),
        ({"reconstructs": True}, "reconstructs: expected False"),
        ({"patch": 2}, "patch: expected images"),
    ],
)
def test_what_vectors_cannot_be(settings: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        classifier(**settings)


def test_wrong_shapes() -> None:
    model = classifier()
    with pytest.raises(ValueError, match=r"\[B, T, C\]=\(B, T, 3\)"):
        model(jnp.zeros((2, 8, 4)))
    with pytest.raises(ValueError, match="tokens: expected"):
        model(jnp.zeros((2, 8), int))
    with pytest.raises(ValueError, match="tokens: expected"):
        classifier(inputs="embedding")(jnp.zeros((2, 8, CHANNELS)))
