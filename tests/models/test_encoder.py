"""Where the norms and the dropout of an encoder are, and what its MLP computes."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close
from flax import nnx

from lra_jax.models import SequenceClassifier, TransformerEncoder
from lra_jax.models.encoder import EncoderBlock
from lra_jax.models.mlp import Mlp

TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 9, (2, 6)))


def encoder(**settings: Any) -> TransformerEncoder:
    sizes: dict[str, Any] = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 12}
    sizes |= {"max_length": 8, "mechanism": "softmax", "rngs": nnx.Rngs(0)}
    return TransformerEncoder(9, **sizes | settings)


def normal(x: jax.Array) -> jax.Array:
    """Layer normalisation at its first parameters."""
    return jax.nn.standardize(x, -1, epsilon=1e-6)


@pytest.mark.parametrize("post_norm", [False, True])
def test_the_norms_are_before_the_branches_or_after_the_sums(post_norm: bool) -> None:
    model = encoder(post_norm=post_norm)
    block: EncoderBlock = model.blocks[0]
    mlp: Any = block.mlp
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    if post_norm:
        middle = normal(x + block.attention(x))
        expected = normal(middle + mlp(middle))
    else:
        middle = x + block.attention(normal(x))
        expected = middle + mlp(normal(middle))
    assert_close(block(x, None), expected)
    rows = model(TOKENS)
    assert_close(rows, normal(rows), 1e-4)
    assert (model.norm is None) == post_norm


def test_the_activation_of_the_mlp() -> None:
    mlp = Mlp(4, 6, activation="relu", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 3, 4))
    inner = x @ mlp.inner.kernel[...]
    assert_close(mlp(x), jnp.maximum(inner, 0) @ mlp.outer.kernel[...])
    block: Any = encoder(activation="relu").blocks[0]
    assert block.mlp.activation == "relu"


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, (0.1, 0.1, 0.1)),
        ({"input_dropout": 0.3}, (0.3, 0.1, 0.1)),
        ({"mlp_dropout": 0.0}, (0.1, 0.1, 0.0)),
        ({"mlp_dropout": 0.2, "mlp": "product_key"}, (0.1, 0.1, 0.2)),
    ],
)
def test_rates_of_dropout(settings: dict[str, Any], rates: tuple[float, ...]) -> None:
    """On embeddings, on the branches, and in the MLP."""
    if "mlp" in settings:
        settings = settings | {"mlp_options": {"keys": 4, "heads": 1, "top": 2}}
    model = encoder(**settings)
    block: Any = model.blocks[0]
    actual = model.dropout.rate, block.dropout.rate, block.mlp.dropout.rate
    assert actual == rates


@pytest.mark.parametrize("cls_token", [False, True])
@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("softmax", {"positions": "learned"}),
        ("softmax", {"positions": "sinusoidal", "norm": "instance"}),
        ("linear", {"positions": "rotary"}),
        ("cosformer", {"positions": "none", "short_conv": 3}),
        ("local", {"positions": "learned", "attention_options": {"window": 2}}),
        ("linformer", {"attention_options": {"features": 3}}),
    ],
)
def test_a_padded_row_is_the_row_alone(
    mechanism: str, settings: dict[str, Any], cls_token: bool
) -> None:
    """Wherever its padding is, and whatever the mechanism makes of positions."""
    pooling = "cls" if cls_token else "mean"
    model = encoder(mechanism=mechanism, pooling=pooling, **settings)
    model.positions = jax.tree.map(lambda x: 50 * x, model.positions)
    mask = np.array([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1]], bool)
    call = type(model).__call__
    rows = helpers.call_model(call, model, TOKENS, jnp.asarray(mask))
    for i, real in enumerate(mask):
        alone = helpers.call_model(call, model, TOKENS[i, real][None])[0]
        if cls_token:
            assert_close(rows[i, 0], alone[0])
        assert_close(rows[i, cls_token:][real], alone[cls_token:])


def test_a_memory_passes_from_block_to_block() -> None:
    model = encoder(mechanism="luna", num_layers=2)
    before = model(TOKENS)
    kernel = model.blocks[0].attention.memory_out.kernel
    kernel[...] = kernel[...][::-1]
    assert jnp.abs(model(TOKENS) - before).max() > 1e-3


def test_the_last_row() -> None:
    model = SequenceClassifier(
        9, 3, pooling="last", mechanism="softmax", max_length=8, rngs=nnx.Rngs(0)
    )
    lengths = jnp.array([4, 6])
    rows = model.encoder(TOKENS, jnp.arange(6)[None] < lengths[:, None])
    pooled = model.pool(TOKENS, lengths)
    assert_close(pooled, jnp.stack([rows[0, 3], rows[1, 5]]))
    model.padding = "zeros"
    shown = TOKENS.at[0, 4:].set(0)
    assert_close(model.pool(shown)[0], pooled[0])
