"""Each function as Flax's ``attention_fn``."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from lra_jax import attention

from ..mechanisms import (
    CROSS,
    NAMES,
    assert_close,
    fast_jit,
    inputs,
    keywords,
    run,
    takes,
)

# Mechanisms that need projections which Flax's layers do not have.
GATED = ("gla", "delta", "gated_delta", "hgrn")
UNGATED = [name for name in NAMES if name not in GATED]
# One of each kind, where Flax makes the difference and not the mechanism.
CORE = ("softmax", "linear", "cosformer", "flow", "local")
PADDING = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)


def _function(name: str, heads: int = 2):
    function = getattr(attention, f"{name}_attention")
    return functools.partial(function, **keywords(name, heads, 8 // heads))


def _layer(function: Any, **options: Any) -> nnx.MultiHeadAttention:
    usual: dict[str, Any] = {"num_heads": 2, "in_features": 8, "decode": False}
    return nnx.MultiHeadAttention(
        **usual | options, attention_fn=function, rngs=nnx.Rngs(0)
    )


def _x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")


@pytest.mark.parametrize("name", UNGATED)
def test_nnx_attention(name: str) -> None:
    """Numbers of some; what all take is seen when they are traced."""
    layer = _layer(_function(name), dropout_rate=0.1, keep_rngs=False)
    graph, state = nnx.split(layer)

    def call(state, x):
        return nnx.merge(graph, state)(
            x,
            mask=PADDING[:, None, None],
            deterministic=False,
            rngs=nnx.Rngs(dropout=0),
        )

    @fast_jit
    def both(state, x):
        out, pullback = jax.vjp(functools.partial(call, state), x)
        return out, pullback(jnp.ones_like(out))[0]

    if name not in CORE:
        assert jax.eval_shape(call, state, _x()).shape == (2, 5, 8)
        return
    out, gradient = (np.asarray(x) for x in both(state, _x()))
    assert out.shape == (2, 5, 8)
    assert np.isfinite(out).all()
    assert gradient[PADDING].any()
    if not takes(name, "query_mask"):  # Flax does not pass one.
        other, _ = both(state, np.where(PADDING[..., None], _x(), 3))
        assert_close(np.asarray(other)[PADDING], out[PADDING])


@pytest.mark.parametrize("name", CORE)
def test_nnx_attention_with_shared_key_heads(name: str) -> None:
    layer = _layer(_function(name, 4), num_heads=4, num_kv_heads=2)
    assert jax.eval_shape(layer, jnp.asarray(_x())).shape == (2, 5, 8)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", GATED)
def test_a_flax_layer_without_gates_is_refused(name: str, is_causal: bool) -> None:
    function = _function(name)
    function = attention.as_causal(function) if is_causal else function
    layer = _layer(function)
    other = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=function)
    with pytest.raises(ValueError, match=f"MultiHeadAttention.mechanism='{name}'"):
        layer(_x())
    with pytest.raises(ValueError, match=f"MultiHeadAttention.mechanism='{name}'"):
        other.init(jax.random.key(0), _x())


def test_nnx_with_softmax_is_flax_itself() -> None:
    layers = [
        nnx.MultiHeadAttention(
            num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0), **more
        )
        for more in ({}, {"attention_fn": attention.softmax_attention})
    ]
    pairs = nnx.make_attention_mask(np.ones((2, 5), bool), PADDING)
    call = fast_jit(lambda x: [f(x, mask=pairs, is_causal=True) for f in layers])
    assert_close(*call(_x()))


@pytest.mark.parametrize("name", UNGATED)
def test_linen_attention(name: str) -> None:
    layer = linen.MultiHeadDotProductAttention(
        num_heads=2, attention_fn=_function(name), dropout_rate=0.1
    )

    def call(key, x):
        out, variables = layer.init_with_output(
            {"params": key, "dropout": key},
            x,
            mask=PADDING[:, None, None],
            deterministic=False,
        )
        again = layer.apply(variables, x, deterministic=True, sow_weights=True)
        return out, again

    out, again = jax.eval_shape(call, jax.random.key(0), _x())
    assert out.shape == again.shape == (2, 5, 8)


@pytest.mark.parametrize("name", ["softmax", "cosformer", "flow", "retention"])
def test_a_causal_function_is_causal_in_flax(name: str) -> None:
    """Flax passes ``is_causal=False`` itself, which overrules a partial's."""
    layer = _layer(attention.as_causal(_function(name)))
    x = _x()
    changed = x.copy()
    changed[:, 3:] += 1
    np.testing.assert_array_equal(layer(x)[:, :3], layer(changed)[:, :3])


def test_a_causal_function_refuses_to_decode_in_flax() -> None:
    """The layer gives one query and all keys, but not the position."""
    layer = _layer(attention.as_causal(_function("cosformer")), decode=True)
    layer.init_cache((2, 5, 8))
    with pytest.raises(ValueError, match="the same length"):
        layer(_x()[:, :1])


# Luna's memory is an argument that Flax has not; these need every position at once.
DECODED = [name for name in CROSS if name != "luna"]
AT_ONCE = "query: expected all positions at once"


def _decode(name: str, step: Any, cache: Any, x: jax.Array) -> jax.Array | None:
    """The outputs of ``step(cache, x)`` of each position, or None if it is refused."""
    outputs = []
    try:
        for position in range(x.shape[1]):
            out, cache = step(cache, x[:, position : position + 1])
            outputs.append(out)
    except ValueError as error:
        assert str(error).startswith(AT_ONCE)
        assert name not in ("softmax", "linear", "norm", "performer")
        return None
    return jnp.concatenate(outputs, 1)


@pytest.mark.parametrize("name", DECODED)
def test_decoding_in_flax_is_right_or_refused(name: str) -> None:
    """The layer's cached keys with one query at a time, beside the causal layer."""
    layer, x = _layer(_function(name), decode=True), _x()
    layer.init_cache(x.shape)
    graph, state = nnx.split(layer)

    @fast_jit
    def step(state, x):
        layer = nnx.merge(graph, state)
        return layer(x), nnx.state(layer)

    out = _decode(name, step, state, jnp.asarray(x))
    if out is not None:
        layer.attention_fn = attention.as_causal(_function(name))
        assert_close(out, fast_jit(lambda x: layer(x, decode=False))(x))


@pytest.mark.parametrize("name", [name for name in CORE if name in DECODED])
def test_decoding_in_linen_is_right_or_refused(name: str) -> None:
    """Its layer passes only keywords that a function names."""
    make = functools.partial(linen.MultiHeadDotProductAttention, num_heads=2)
    layer, x = make(attention_fn=_function(name), decode=True), jnp.asarray(_x())
    variables = layer.init(jax.random.key(0), x)
    params = variables["params"]

    @fast_jit
    def step(cache, x):
        variables = {"params": params, "cache": cache}
        out, changed = layer.apply(variables, x, mutable=["cache"])
        return out, changed["cache"]

    out = _decode(name, step, variables["cache"], x)
    if out is not None:
        causal = make(attention_fn=attention.as_causal(_function(name)))
        assert_close(out, causal.apply({"params": params}, x))


def test_causal_decoding_in_flax_says_what_to_pass() -> None:
    layer = nnx.MultiHeadAttention(
        2, 16, decode=True, attention_fn=attention.linear_attention, rngs=nnx.Rngs(0)
    )
    layer.init_cache((2, 4, 16))
    with pytest.raises(ValueError, match="or False for one query that sees all keys"):
        layer(jnp.ones((2, 1, 16)), is_causal=True)


def test_dropout_of_a_function_alone_is_refused() -> None:
    arrays = inputs(3)
    with pytest.raises(ValueError, match=r"dropout_rate: expected 0, .* got 0.1"):
        attention.linear_attention(*arrays, dropout_rate=0.1)


def test_what_cannot_be_causal() -> None:
    for function in (_function("linformer"), lambda query, key, value: value):
        with pytest.raises(ValueError, match="attention: expected one with a causal"):
            attention.as_causal(function)


@pytest.mark.parametrize("name", ["linear", "flow"])
def test_a_mask_of_pairs_is_refused_with_what_to_give(name: str) -> None:
    q, k, v = inputs(3, length=5, query_length=5)
    pairs = nnx.make_attention_mask(PADDING, PADDING)
    with pytest.raises(ValueError, match=r"padding of the keys, \[B, S\]"):
        run(name)(q, k, v, pairs)
