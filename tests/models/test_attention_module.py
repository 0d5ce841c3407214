"""MultiHeadAttention: its projections, cross attention, options, linen, errors."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra_jax import attention
from lra_jax.models import Buffer, MultiHeadAttention

MECHANISMS = attention.names()
CROSS = {name for name in MECHANISMS if attention.resolve(name).cross}
CAUSAL = {name for name in MECHANISMS if attention.resolve(name).causal}
# Without arrays of their own, with learned and with fixed ones, and with gates.
KINDS = ("softmax", "cosformer", "linformer", "performer", "gla")
MASK = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], bool)


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def layer(mechanism="cosformer", **changes) -> MultiHeadAttention:
    settings = {"num_heads": 2, "max_length": 16, "rngs": nnx.Rngs(0)} | changes
    return MultiHeadAttention(in_features=8, mechanism=mechanism, **settings)


def call(module: nnx.Module, *args, **keywords) -> jax.Array:
    return helpers.call_model(type(module).__call__, module, *args, **keywords)


def test_is_projections_around_the_function():
    module: Any = layer("softmax")
    x = inputs(2, 6, 8)
    heads = [p(x).reshape(2, 6, 2, 4) for p in (module.query, module.key, module.value)]
    attended = attention.softmax_attention(*heads, mask=MASK)
    expected = module.out(attended.reshape(2, 6, 8))
    np.testing.assert_allclose(call(module, x, mask=MASK), expected, atol=1e-5)


@pytest.mark.parametrize("mechanism", sorted({*KINDS} & CROSS))
def test_cross_attention(mechanism):
    module = layer(mechanism, out_features=5)
    x, context = inputs(2, 4, 8), inputs(2, 6, 8, seed=1)
    out = call(module, x, context, mask=MASK)
    assert out.shape == (2, 4, 5)
    # Padding of the context is not read; the context itself is.
    noise = np.where(MASK[:, :, None], context, 1e3).astype("float32")
    np.testing.assert_array_equal(out, call(module, x, noise, mask=MASK))
    alone = call(module, x[:1], context[:1, :4])
    np.testing.assert_allclose(out[:1], alone, atol=1e-5)
    assert np.abs(out - call(module, x, context[:, ::-1] + 1, mask=MASK)).max() > 1e-3


def test_query_mask_reaches_the_mechanism():
    """Flow-Attention's sums over queries must leave padded queries out."""
    module, x, context = layer("flow"), inputs(1, 6, 8), inputs(1, 6, 8, seed=1)
    out = call(module, x, context, query_mask=MASK[:1])[:, :4]
    np.testing.assert_allclose(out, call(module, x[:, :4], context), atol=1e-5)


@pytest.mark.parametrize("mechanism", sorted({*MECHANISMS} - CAUSAL))
def test_what_cannot_be_causal_is_refused_when_it_is_built(mechanism):
    with pytest.raises(ValueError, match=f"causal form.*got '{mechanism}'"):
        layer(mechanism, is_causal=True)


@pytest.mark.parametrize("mechanism", sorted({*MECHANISMS} - CROSS))
def test_what_has_no_cross_form_says_so(mechanism):
    """Also where a context is as long as the inputs, and shapes would fit."""
    for length in (4, 6):
        with pytest.raises(ValueError, match=r"^context: .* has no cross form"):
            layer(mechanism)(inputs(2, 6, 8), inputs(2, length, 8))


@pytest.mark.parametrize(
    "mechanism",
    [
        helpers.values_only,
        "helpers:values_only",
        functools.partial(helpers.values_only),
    ],
    ids=["function", "name", "partial"],
)
def test_attention_of_ones_own(mechanism):
    module: Any = layer(mechanism)
    x = inputs(2, 6, 8)
    heads = module.value(x).reshape(2, 6, 2, 4)
    mean = helpers.values_only(heads, heads, heads, MASK[:, None, None])
    expected = module.out(mean.reshape(2, 6, 8))
    np.testing.assert_allclose(call(module, x, mask=MASK), expected, atol=1e-5)


def test_an_array_may_be_an_option():
    def scaled(query, key, value, scale=None):
        return value * scale

    module: Any = layer(scaled, options={"scale": jnp.full((), 2.0)})
    x = inputs(2, 6, 8)
    expected = module.out(2 * module.value(x))
    np.testing.assert_allclose(call(module, x), expected, atol=1e-6)


def test_a_mechanism_without_projections():
    """FNet takes the layer's input as it is, and its output is the layer's."""
    module, x = layer("fnet", max_length=None), inputs(2, 6, 8)
    assert not jax.tree.leaves(nnx.state(module))
    heads = x.reshape(2, 6, 2, 4)
    expected = helpers.quick_jit(attention.fnet_attention)(heads, heads, heads, MASK)
    out = call(module, x, mask=MASK)
    np.testing.assert_allclose(out, expected.reshape(2, 6, 8), atol=1e-6)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_has_what_it_needs(mechanism):
    module, x = layer(mechanism), jnp.asarray(inputs(2, 6, 8))
    out = jax.eval_shape(lambda x: module(x, mask=MASK), x)
    assert out.shape == (2, 6, 8)
    for name in ("query", "key", "value", "out"):
        used = name in attention.resolve(mechanism).projections
        assert (getattr(module, name) is not None) == used


def test_arguments_that_are_not_read_have_no_projection():
    module, x = layer("reformer", qkv_features=12), inputs(2, 6, 8)

    def by_hand(module, x):
        query, value = (p(x).reshape(2, 6, 2, 6) for p in (module.query, module.value))
        out = attention.reformer_attention(query, query, value, MASK, max_length=16)
        return module.out(out.reshape(2, 6, 12))

    expected = helpers.call_model(by_hand, module, x)
    np.testing.assert_allclose(call(module, x, mask=MASK), expected, atol=1e-5)


def test_own_functions_get_the_keywords_that_they_name():
    seen = {}

    def everything(query, key, value, **keywords):
        seen.update(keywords)
        return value

    def nothing(query, key, value):
        return value

    x = inputs(2, 6, 8)
    layer(everything, options=None)(x, mask=MASK)
    assert set(seen) == {"mask", "query_mask", "max_length", "is_causal"}
    assert seen["mask"].shape == (2, 1, 1, 6)
    assert seen["max_length"] == 16 and seen["is_causal"] is False
    with pytest.warns(UserWarning, match="takes no mask, and attends to padding"):
        assert layer(nothing)(x, mask=MASK).shape == (2, 6, 8)


def test_options():
    x = 3 * inputs(2, 6, 8)
    clipped = call(layer("flow", options={"clip": 0.01}), x)
    assert np.abs(clipped - call(layer("flow"), x)).max() > 1e-4
    linformer = layer("linformer", options={"features": 3})
    shapes = {tuple(p.shape) for p in jax.tree.leaves(nnx.state(linformer.parameters))}
    assert any(3 in shape and 16 in shape for shape in shapes)


def test_buffers_are_not_parameters():
    module: Any = layer(helpers.MARKED, max_length=None)
    assert isinstance(module.parameters["mark"], Buffer)
    assert isinstance(module.parameters["gain"], nnx.Param)
    _, params, buffers = nnx.split(module, nnx.Param, Buffer)
    assert [x.shape for x in jax.tree.leaves(buffers)] == [(2, 4)]
    assert "mark" not in params["parameters"]
    x = inputs(2, 6, 8)
    mark = module.parameters["mark"][None, None]
    heads = module.value(x).reshape(2, 6, 2, 4) + mark
    expected = module.out(heads.reshape(2, 6, 8))
    np.testing.assert_allclose(call(module, x, mask=MASK), expected, atol=1e-5)


def test_width_of_the_heads():
    module: Any = layer(qkv_features=12, out_features=3)
    unbiased: Any = layer(use_bias=False)
    assert module.head_dim == 6
    assert call(module, inputs(2, 6, 8)).shape == (2, 6, 3)
    assert module.query.kernel.shape == (8, 12)
    assert unbiased.query.bias is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": "2"}, "num_heads: expected a positive int, got '2'"),
        ({"mechanism": "helpers:FRAGILE_LIMIT"}, "function"),
        ({"mechanism": "flow", "options": {"clipp": 1}}, "did you mean 'clip'"),
        ({"mechanism": "linformer", "max_length": None}, "max_length"),
        ({"mechanism": "fnet", "qkv_features": 4}, "expected 8, .*'value', got 4"),
        ({"mechanism": "fnet", "out_features": 6}, "expected 6, .*'out', got 8"),
        ({"options": {"segment_ids": 1}}, "option of attention.*'segment_ids'"),
        ({"out_features": 0}, "out_features: expected a positive int, got 0"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**arguments)


@pytest.mark.parametrize("mechanism", (*KINDS, "luna", "flash", "hgrn", "delta"))
def test_computes_in_half_precision_with_float32_parameters(mechanism):
    module = layer(mechanism, dtype=jnp.bfloat16)
    dtypes = {p.dtype for p in jax.tree.leaves(nnx.state(module))}
    assert dtypes <= {jnp.dtype("float32")}
    x = inputs(2, 6, 8)
    out = call(module, jnp.asarray(x, jnp.bfloat16), mask=MASK)
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(call(layer(mechanism), x, mask=MASK))
    error = np.abs(np.asarray(out, np.float32) - exact)[MASK].max()
    assert error < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("mechanism", ["linformer", "performer"])
def test_in_a_linen_model(mechanism):
    module = nnx.bridge.to_linen(
        MultiHeadAttention, 2, 8, mechanism=mechanism, max_length=16
    )
    x = inputs(2, 6, 8)
    variables = module.init(jax.random.key(0), x)
    optimizer = optax.sgd(0.1)

    @helpers.quick_jit
    def step(params, others):
        def loss(params):
            out = module.apply({"params": params, **others}, x, mask=MASK)
            return jnp.square(jnp.asarray(out)).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params))
        return value, optax.apply_updates(params, updates)

    params = variables["params"]
    others = {name: v for name, v in variables.items() if name != "params"}
    before, params = step(params, others)
    after, params = step(params, others)
    assert after < before


@pytest.mark.parametrize("max_length", [None, 12])
@pytest.mark.parametrize("name", ["flow", "cosformer"])
def test_cross_attention_of_equal_lengths(name: str, max_length: int | None) -> None:
    """The padding of the keys hides no query, as where the lengths differ."""
    rng = np.random.default_rng(0)
    x, context = rng.normal(size=(2, 2, 8, 16)).astype("float32")
    mask = np.arange(8)[None] < np.array([8, 5])[:, None]
    layer = MultiHeadAttention(
        num_heads=2,
        in_features=16,
        mechanism=name,
        max_length=max_length,
        rngs=nnx.Rngs(0),
    )
    out = layer(jnp.asarray(x), jnp.asarray(context), mask=jnp.asarray(mask))
    parts = [layer(jnp.asarray(x[1:]), jnp.asarray(context[1:, :5]))]
    np.testing.assert_allclose(out[1:], parts[0], atol=1e-5)
