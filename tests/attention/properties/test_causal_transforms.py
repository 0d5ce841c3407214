"""The causal forms in half precision, under transformations, and on two devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    LENGTH,
    STREAMS,
    assert_close,
    case,
    causal,
    causal_formula,
    fast_jit,
    having,
    inputs,
    jitted_causal,
)


@pytest.mark.parametrize("name", STREAMS)
def test_half_precision(name: str) -> None:
    arrays = inputs(11, query_length=LENGTH, length=LENGTH)
    arrays = [jnp.asarray(x, "bfloat16") for x in arrays]
    out = jitted_causal(name)(*arrays)
    assert out.dtype == jnp.bfloat16
    exact = [np.asarray(x, "float32") for x in arrays]
    assert_close(out, causal_formula(name)(*exact), 2e-2)


@pytest.mark.parametrize("name", STREAMS)
def test_float16_sums_do_not_overflow(name: str) -> None:
    ones = jnp.full((1, 2048, 1, 64), 4, "float16")
    level = case(name).level
    out = fast_jit(causal(name, chunking=None, **level or {}))(ones, ones, ones)
    assert np.isfinite(np.asarray(out, "float32")).all()
    if level is not None:
        wanted = 1 if "norm" in level else 4
        assert_close(out, wanted * np.ones(out.shape), 1e-2)


@pytest.mark.parametrize("name", STREAMS)
def test_vmap_and_checkpoint(name: str) -> None:
    pairs = [np.stack(pair) for pair in zip(inputs(12), inputs(13), strict=True)]

    @fast_jit
    def slope(pairs):
        def loss(arrays):
            each = jax.vmap(jax.checkpoint(causal(name)))(*arrays)
            return jnp.sin(each).sum(), each

        return jax.value_and_grad(loss, has_aux=True)(pairs)

    (_, out), gradients = slope(pairs)
    assert_close(out[1], jitted_causal(name)(*inputs(13)), 1e-6)

    @fast_jit
    def alone(arrays):
        return jax.grad(lambda a: jnp.sin(causal(name)(*a)).sum())(arrays)

    wanted = alone(inputs(13))
    assert_close(tuple(x[1] for x in gradients), tuple(wanted))


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    ("kind", "spec"),
    [("explicit", (None, None, "x")), ("shard_map", ("x",))],
    ids=["heads-explicit", "batch-shard_map"],
)
def test_on_two_devices(name: str, kind: str, spec: tuple) -> None:
    arrays, specs = inputs(14), PartitionSpec(*spec)

    def loss(arrays):
        return jnp.sin(causal(name)(*arrays)).sum()

    explicit = kind == "explicit"
    axis = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,), devices=jax.devices()[:2])
    if explicit:
        with jax.set_mesh(mesh):
            placed = jax.device_put(arrays, NamedSharding(mesh, specs))
            found = fast_jit(jax.grad(loss))(placed)
    else:
        keywords = {"in_specs": (specs,), "out_specs": specs, "mesh": mesh}
        found = fast_jit(jax.shard_map(jax.grad(loss), **keywords))(arrays)
    assert_close(tuple(found), _slopes(name))


@functools.cache
def _slopes(name: str):
    def loss(arrays):
        return jnp.sin(causal(name)(*arrays)).sum()

    return fast_jit(jax.grad(loss))(inputs(14))


@pytest.mark.parametrize("name", having("products", STREAMS))
def test_precision_reaches_the_products(name: str) -> None:
    call = causal(name, precision="highest", chunking=Chunking(3))
    text = str(jax.make_jaxpr(call)(*inputs(15)))
    products = text.count("dot_general[")
    assert products >= 2
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products
