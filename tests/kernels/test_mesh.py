"""Kernel calls on several devices, each with its own samples."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, fast_jit, inputs
from jax.sharding import AbstractMesh, AxisType

from lra_jax import attention
from lra_jax.kernels import api, mesh, selection
from lra_jax.kernels.cpu import library

from .test_selection import DEVICES

NAMES = ("linear", "cosformer", "flow")


def make_mesh(kind: AxisType = AxisType.Auto, **axes: int) -> Any:
    """A mesh of abstract devices."""
    return AbstractMesh(
        tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
    )


@pytest.mark.parametrize(
    ("axes", "batch", "parts"),
    [
        ({"data": 4}, 8, 4),
        ({"data": 4, "seq": 1}, 4, 4),
        ({"data": 1, "seq": 1}, 3, 1),
        ({"rows": 1}, 3, 1),
        ({"data": 4}, 6, None),
        ({"data": 2, "seq": 2}, 8, None),
        ({"rows": 4}, 8, None),
    ],
)
def test_parts_of_a_mesh(axes: dict, batch: int, parts: int | None) -> None:
    with jax.sharding.use_abstract_mesh(make_mesh(**axes)):
        assert mesh.parts(batch) == parts


def test_parts_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax.device_count() == 2
    assert mesh.parts(4) is None
    with jax.sharding.use_abstract_mesh(make_mesh(AxisType.Explicit, data=2)):
        assert mesh.parts(4) is None
    counts = []

    def local(x: jax.Array) -> jax.Array:
        counts.append(mesh.parts(3))
        return x

    for names in ({"data", "seq"}, {"data"}):
        both = jax.make_mesh((1, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
        spec = jax.P("data")
        inside = jax.shard_map(
            local, mesh=both, in_specs=spec, out_specs=spec, axis_names=names
        )
        jax.eval_shape(jax.jit(inside), jnp.zeros(3))
    assert counts == [1, None]
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert mesh.parts(3) == 1


@pytest.mark.skipif(library.problem() is not None, reason=f"{library.problem()}")
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_each_device_has_its_own_samples(name: str, is_causal: bool) -> None:
    """Results of whole arrays, samples of half the devices, and no messages."""
    two = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    samples = jax.NamedSharding(two, jax.P("data"))
    mask = jnp.asarray(np.arange(40)[None] < [[40], [33], [1], [0]])
    arrays = [jnp.asarray(x) for x in inputs(0, 4, 40, 40, 2, 8)]
    function = getattr(attention, f"{name}_attention")

    def loss(implementation: Any, mask: jax.Array, *arrays: jax.Array) -> jax.Array:
        more = {"is_causal": is_causal, "implementation": implementation}
        return jnp.sin(function(*arrays, mask, **more)).sum()

    native, xla = (
        jax.grad(functools.partial(loss, x), (1, 2, 3)) for x in ("native", "xla")
    )
    expected = fast_jit(xla)(mask, *arrays)
    placed = [jax.device_put(x, samples) for x in (mask, *arrays)]
    with jax.set_mesh(two):
        compiled = jax.jit(native).lower(*placed).compile()
        text = compiled.as_text() or ""
        assert_close(compiled(*placed), expected)
        assert_close(native(*placed), expected)
        stacked = [jnp.stack([x, x]) for x in placed]
        second = tuple(x[1] for x in fast_jit(jax.vmap(native))(*stacked))
        assert_close(second, expected)
    calls = [x for x in text.splitlines() if 'custom_call_target="lra_' in x]
    assert calls
    assert all("f32[2,40,2,8]" in x and "f32[4," not in x for x in calls)
    assert not re.search(r"all-(gather|to-all)|collective", text)


@pytest.mark.parametrize("name", ["linear", "cosformer"])
def test_auto_takes_kernels_on_a_mesh(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four accelerators, a training step has kernels of a quarter of the batch."""
    monkeypatch.setattr(selection, "_own_target", lambda: "gpu")
    platform, device = DEVICES["gpu"]
    four = AbstractMesh(
        (4, 1), ("data", "seq"), axis_types=(AxisType.Auto,) * 2, abstract_device=device
    )
    x = jax.ShapeDtypeStruct((64, 128, 8, 64), "bfloat16")

    def slope(*arrays: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            function = getattr(attention, f"{name}_attention")
            return function(*arrays, is_causal=True).astype("float32").sum()

        return jax.grad(loss, (0, 1, 2))(*arrays)

    by_sample = jax.NamedSharding(four, jax.P("data"))
    where: Any = {"in_shardings": by_sample, "out_shardings": by_sample}
    with jax.sharding.use_abstract_mesh(four):
        traced = jax.jit(slope, **where).trace(x, x, x)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    assert calls
    assert all("tensor<16x" in line and "tensor<64x" not in line for line in calls)


def test_segments_fill_the_processors_of_a_device() -> None:
    """On a GPU they are as many as its processors need for its own samples."""
    x: Any = jax.ShapeDtypeStruct((16, 1 << 16, 8, 64), "bfloat16")

    def block() -> int:
        return api._sizes(("gpu", False), None, x, x)[1]

    assert block() == 1 << 16
    with jax.sharding.use_abstract_mesh(make_mesh(data=16)):
        assert block() == 1 << 12
