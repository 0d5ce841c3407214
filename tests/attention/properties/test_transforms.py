"""Under jit, grad, vmap and checkpoint, on two devices, and at the precision asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    FORMS,
    STREAMS,
    assert_close,
    case,
    fast_jit,
    having,
    inputs,
    run,
    weights,
)


def _mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_vmap_checkpoint_and_shard_map(name: str, form: str) -> None:
    """Outputs and gradients are those of a plain call."""
    pairs = [np.stack(pair) for pair in zip(inputs(1), inputs(2), strict=True)]
    mask = np.arange(7)[None] < np.array([[7], [5]])
    spec = PartitionSpec("x")

    def slopes(function, arrays, mask):
        def loss(arrays):
            out = function(*arrays, mask)
            return jnp.sin(out).sum(), out

        return jax.grad(loss, has_aux=True)(arrays)

    @fast_jit
    def each(pairs, mask):
        plain, saved = run(name, form), jax.checkpoint(run(name, form))
        mapped = slopes(jax.vmap(saved, (0, 0, 0, None)), pairs, mask)
        second = [x[1] for x in pairs]
        split = jax.shard_map(
            lambda arrays, mask: slopes(saved, arrays, mask),
            mesh=_mesh(AxisType.Auto),
            in_specs=(spec, spec),
            out_specs=spec,
        )
        return slopes(plain, second, mask), mapped, split(second, mask)

    alone, mapped, split = each(pairs, mask)
    assert_close(jax.tree.map(lambda x: x[1], mapped), alone)
    assert_close(split, alone)


@pytest.mark.parametrize("name", STREAMS)
def test_heads_on_two_devices(name: str) -> None:
    """Split over an explicit axis."""
    arrays = inputs(14)

    @fast_jit
    def slopes(arrays):
        return jax.grad(lambda x: jnp.sin(run(name, "causal")(*x)).sum())(arrays)

    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec(None, None, "x"))
        split = slopes(jax.device_put(arrays, place))
    assert_close(tuple(split), tuple(slopes(arrays)))


def _products(function, *arrays) -> tuple[int, int]:
    """How many matrix products there are, and how many at the highest precision."""
    text = str(jax.make_jaxpr(function)(*arrays))
    highest = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    return text.count("dot_general["), text.count(highest)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_precision_reaches_the_products(name: str, form: str) -> None:
    chunking = {"chunking": Chunking(3)} if form == "causal" else {}
    call = run(name, form, precision="highest", **chunking)
    products, precise = _products(call, *inputs(4))
    assert products >= 2 or name == "fnet" or not case(name).products
    assert precise == products


@pytest.mark.parametrize("name", having("weighted"))
def test_products_of_weights_are_precise(name: str) -> None:
    products, precise = _products(weights(name), *inputs(4)[:2])
    assert precise == products
