"""Short convolutions, gates, gated MLPs and poolings, alone and in a model."""

import functools
import re
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, assert_rejects, fast_jit
from flax import nnx

from lra_jax.models import MultiHeadAttention, SequenceClassifier, TransformerEncoder
from lra_jax.models.layers import HeadNorm
from lra_jax.models.mlp import Mlp
from lra_jax.models.short_conv import ShortConv, convolve

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("size", "is_causal", "first"), [(3, False, -1), (4, False, -2), (4, True, -3)]
)
def test_the_window(size: int, is_causal: bool, first: int):
    layer = ShortConv(2, size, is_causal=is_causal, rngs=nnx.Rngs(0))
    x = RNG.normal(size=(1, 6, 2)).astype("float32")
    kernel, expected = np.asarray(layer.kernel[...]), np.zeros((1, 6, 2))
    for t in range(6):
        for tap in range(size):
            if 0 <= t + first + tap < 6:
                expected[0, t] += kernel[tap] * x[0, t + first + tap]
    layer.bias[...] = jnp.ones(2)
    assert_close(layer(x), expected + 1)


def test_the_gradient_written_out_is_that_of_the_sum():
    x, grad = (RNG.normal(size=(3, 7, 2)).astype("float32") for _ in "xg")
    kernel = RNG.normal(size=(4, 2)).astype("float32")

    def plain(x, kernel):
        padded = jnp.pad(x, ((0, 0), (1, 2), (0, 0)))
        rows = kernel[:, None, None]
        return sum(padded[:, tap : tap + 7] * rows[tap] for tap in range(4))

    def ours(x, kernel):
        return convolve(x, kernel, 1)

    got, expected = (jax.vjp(f, x, kernel)[1](grad) for f in (ours, plain))
    assert_close(got, expected)


@pytest.mark.parametrize(("size", "first"), [(3, -1), (2, -1), (5, -2)])
def test_a_square_window(size: int, first: int):
    rows, columns = 3, 4
    layer = ShortConv(2, size, grid=(rows, columns), rngs=nnx.Rngs(0))
    x = RNG.normal(size=(2, rows, columns, 2)).astype("float32")
    kernel, expected = np.asarray(layer.kernel[...]), np.ones(x.shape)
    for row, column, i, j in np.ndindex(rows, columns, size, size):
        near = row + first + i, column + first + j
        if 0 <= near[0] < rows and 0 <= near[1] < columns:
            expected[:, row, column] += kernel[i, j] * x[:, *near]
    layer.bias[...] = jnp.ones(2)
    assert_close(layer(x.reshape(2, -1, 2)), expected.reshape(2, -1, 2))


def test_gated_mlp():
    mlp: Any = Mlp(3, 5, gated=True, rngs=nnx.Rngs(0))
    x = RNG.normal(size=(2, 3)).astype("float32")
    hidden = jax.nn.silu(mlp.inner(x)) * mlp.gate(x)
    assert_close(mlp(x), mlp.outer(hidden))


def test_norm_of_a_head_by_itself():
    norm = HeadNorm(2, 3)
    norm.gain[...] = jnp.asarray(RNG.normal(size=(2, 3)))
    x = RNG.normal(size=(1, 4, 2, 3))
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True)) * np.asarray(norm.gain[...])
    assert_close(norm(jnp.asarray(x)), expected, 1e-4)


LAYERS = ("softmax", "linear", "cosformer", "flow", "linformer", "gla", "hgrn")


def _layer(mechanism: str, **more) -> Any:
    settings = {"short_conv": 3, "gate": True, "max_length": 8, **more}
    return MultiHeadAttention(2, 8, mechanism=mechanism, rngs=nnx.Rngs(0), **settings)


@pytest.mark.parametrize("mechanism", LAYERS)
def test_padding_is_exact_with_every_part(mechanism: str):
    layer = _layer(mechanism, local_values=True)
    x = RNG.normal(size=(2, 8, 8)).astype("float32")
    call = fast_jit(lambda x, mask: layer(x, mask=mask))
    mask = jnp.broadcast_to(jnp.arange(8)[None] < 5, (2, 8))
    padded = call(jnp.asarray(x).at[:, 5:].set(jnp.nan), mask)
    assert_close(padded[:, :5], fast_jit(layer)(x[:, :5]))


@pytest.mark.parametrize("mechanism", ["softmax", "cosformer", "flow", "gla", "hgrn"])
def test_a_causal_layer_sees_no_future(mechanism: str):
    layer = _layer(mechanism, is_causal=True, local_values=True)
    x = RNG.normal(size=(1, 8, 8)).astype("float32")
    call = fast_jit(layer)
    other = jnp.asarray(x).at[:, 5:].add(1)
    assert_close(call(other)[:, :5], call(x)[:, :5])
    assert np.abs(np.asarray(call(other) - call(x))[:, 5:]).max() > 1e-3


def test_a_layer_is_its_parts():
    layer = _layer("linear", local_values=True)
    x = jnp.asarray(RNG.normal(size=(1, 8, 8)).astype("float32"))
    query, key, value = (
        jax.nn.silu(layer.convs[name](getattr(layer, name)(x))).reshape(1, 8, 2, 4)
        for name in ("query", "key", "value")
    )
    mixed = layer.mechanism.attention(query, key, value) + value
    mixed = layer.out_norm(mixed).reshape(1, 8, 8)
    assert_close(layer(x), layer.out(mixed * jax.nn.silu(layer.out_gate(x))))


def test_a_mechanism_with_a_gate_keeps_its_own():
    assert _layer("gla").out_gate is None
    assert _layer("linear").out_gate is not None
    assert _layer("linear", gate=False).out_gate is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"conv_grid": 3, "short_conv": 3}, "conv_grid: expected (rows, columns)"),
        (
            {"conv_grid": (2, 4), "short_conv": 3, "is_causal": True},
            "conv_grid: expected None with is_causal=True",
        ),
    ],
)
def test_squares_that_cannot_be(settings: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=re.escape(words)):
        MultiHeadAttention(2, 8, mechanism="linear", rngs=nnx.Rngs(0), **settings)


def test_squares_are_for_images():
    layer = _layer("linear", conv_grid=(2, 4))
    assert layer(jnp.ones((1, 8, 8))).shape == (1, 8, 8)
    with pytest.raises(ValueError, match="inputs: expected"):
        layer(jnp.ones((1, 6, 8)))
    with pytest.raises(ValueError, match="segment_ids: expected None where"):
        layer(jnp.ones((1, 8, 8)), segment_ids=jnp.ones((1, 8), jnp.int32))


def test_bad_parts():
    assert_rejects(lambda: _layer("linear", short_conv=-1), "short_conv", "-1")
    assert_rejects(lambda: _layer("linear", short_conv=2.5), "short_conv", "2.5")
    assert_rejects(lambda: _layer("linear", gate="yes"), "gate", "'yes'")
    layer = _layer("linear", local_values=True)
    x = jnp.zeros((1, 4, 8))
    assert_rejects(lambda: layer(x, x), "context", "local_values")


def _classifier(pooling: str) -> SequenceClassifier:
    return SequenceClassifier(
        9,
        3,
        pooling=pooling,
        num_layers=1,
        embed_dim=8,
        num_heads=2,
        mlp_dim=8,
        max_length=8,
        mechanism="linear",
        rngs=nnx.Rngs(0),
    )


@pytest.mark.parametrize("pooling", ["attention", "ends", "attention+ends"])
def test_pooling_is_its_formula_and_exact_under_padding(pooling: str):
    model: Any = _classifier(pooling)
    tokens = jnp.asarray(RNG.integers(1, 9, (2, 8)))
    lengths = jnp.asarray([5, 1])
    pool = functools.partial(helpers.call_model, type(model).pool, model)
    encode = functools.partial(helpers.call_model, TransformerEncoder.__call__)
    pooled = pool(tokens, lengths)
    assert pooled.shape == (2, model.pooled_features)
    for row, length in enumerate((5, 1)):
        alone = tokens[row : row + 1, :length]
        encoded = np.asarray(encode(model.encoder, alone))[0]
        parts = []
        if "attention" in pooling:
            scores = np.asarray(model.queries[...]) @ encoded.T / 8**0.5
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            parts += list(weights / weights.sum(-1, keepdims=True) @ encoded)
        if "ends" in pooling:
            parts += [encoded[0], encoded[-1]]
        assert_close(pooled[row], np.concatenate(parts))
        assert_close(pool(alone)[0], np.concatenate(parts))
