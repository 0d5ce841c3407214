"""Under jit, grad, vmap and checkpoint, on two devices, and at the precision asked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    FAMILY,
    FAMILY_STREAMS,
    FORMS,
    ROWS,
    assert_close,
    case,
    fast_jit,
    gradients,
    having,
    inputs,
    masks,
    row_inputs,
    run,
    weights,
)


def _mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


@pytest.mark.parametrize(("name", "form"), [x for x in FORMS if x[0] in FAMILY])
def test_vmap_and_checkpoint(name: str, form: str) -> None:
    """Outputs and gradients are those of a plain call."""
    pairs = [(*x, ROWS, y) for x, y in (row_inputs(1), row_inputs(2))]
    expected = [gradients(name, form)(*arrays) for arrays in pairs]
    attend = jax.checkpoint(
        lambda *x: run(name, form)(*x[:3], **masks(name, form, x[3]))
    )

    @fast_jit
    def mapped(*arrays, upstream):
        out, pullback = jax.vjp(jax.vmap(attend), *arrays)
        return out, pullback(upstream)

    *arrays, upstream = map(np.stack, zip(*pairs, strict=True))
    out, slopes = mapped(*arrays, upstream=upstream)
    for number, one in enumerate(expected):
        assert_close((out[number], tuple(x[number] for x in slopes[:3])), one)


# All mechanisms are split by samples in `sharded.test_explicit_axes`.
@pytest.mark.parametrize("form", ["full", "causal"])
@pytest.mark.parametrize("name", ["softmax", "linear", "flow", "gated_delta", "hgrn"])
def test_shard_map(name: str, form: str) -> None:
    def local(query, key, value, mask, upstream):
        attend = functools.partial(run(name, form), **masks(name, form, mask))
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(upstream)

    spec = PartitionSpec("x")
    mesh = _mesh(AxisType.Auto)
    split = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 5, out_specs=spec)
    arrays, upstream = row_inputs(2)
    arguments = *arrays, ROWS, upstream
    assert_close(fast_jit(split)(*arguments), gradients(name, form)(*arguments))


@pytest.mark.parametrize("name", FAMILY_STREAMS)
def test_heads_on_two_devices(name: str) -> None:
    """Split over an explicit axis."""
    arrays = inputs(14)

    @fast_jit
    def slopes(arrays):
        return jax.grad(lambda x: jnp.sin(run(name, "causal")(*x)).sum())(arrays)

    mesh = _mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, PartitionSpec(None, None, "x"))
        placed = jax.device_put(arrays, place)
        if name not in ("softmax", "linear", "flow", "retention", "gla"):
            # What cannot be split is refused when it is traced.
            assert len(jax.eval_shape(slopes, placed)) == 3
            return
        split = slopes(placed)
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
