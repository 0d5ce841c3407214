"""Which implementation runs, what is refused, and lowering without the device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, inputs
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from lra_jax import attention, kernels
from lra_jax.attention.causal.engine import Chunking
from lra_jax.attention.feature_maps import FEATURE_MAPS
from lra_jax.kernels import selection
from lra_jax.kernels.spec import DEAD, MAPS

TPU = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
DEVICES = {
    "tpu": ("tpu", TPU),
    "gpu": (
        "cuda",
        AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    ),
}


def pallas_calls(function: Any, *arrays: Any) -> int:
    return str(jax.make_jaxpr(function)(*arrays)).count("pallas_call[")


@pytest.mark.parametrize("name", ["linear", "cosformer"])
def test_a_cpu_takes_the_xla_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arrays = getattr(attention, f"{name}_attention"), inputs(0)
    for implementation in ("auto", "xla"):
        monkeypatch.setenv(kernels.INTERPRET, "tpu")
        more = {"implementation": implementation}
        assert not pallas_calls(lambda *a, m=more: function(*a, **m), *arrays)
        monkeypatch.delenv(kernels.INTERPRET)
        assert not pallas_calls(lambda *a, m=more: function(*a, **m), *arrays)
    with pytest.raises(ValueError, match=r"'auto' or 'xla' on this machine.*'cpu'"):
        function(*arrays, implementation="pallas")


@pytest.mark.parametrize("name", ["linear", "cosformer"])
def test_what_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arrays = getattr(attention, f"{name}_attention"), inputs(0)

    def refused(match: str, arrays: Any, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            function(*arrays, **{"implementation": "pallas"} | more)

    refused("'pallas' or 'native', got 'triton'", arrays, implementation="triton")
    refused("'pallas' or 'native', got None", arrays, implementation=None)
    monkeypatch.setenv(kernels.INTERPRET, "rocm")
    refused("LRA_JAX_PALLAS_INTERPRET: .*one of tpu, gpu, got 'rocm'", arrays)
    monkeypatch.setenv(kernels.INTERPRET, "tpu")
    half = [x.astype("float16") for x in arrays]
    refused("float32 or bfloat16, got .'float16'.", half)
    mixed = [arrays[0], *(jnp.asarray(x, "bfloat16") for x in arrays[1:])]
    refused("all in float32 or bfloat16, got .'bfloat16', 'float32'.", mixed)
    refused("at most 256, got .257, 257.", inputs(0, head_dim=257))
    refused("multiple of 16 positions, got 24", arrays, chunking=Chunking(24))
    refused("the same length", inputs(0, length=9), is_causal=True)
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    refused("all in bfloat16, got .'float32'.", arrays)
    half = [jnp.asarray(x, "bfloat16") for x in inputs(0, head_dim=65)]
    refused("at most 64, got .65, 65.", half)
    half = [x[..., :64] for x in half]
    refused("chunks of 64 positions, got 128", half, chunking=Chunking(128))


def choose(
    implementation: Any, arrays: Any, mechanism: str = "cosformer", **more: Any
) -> Any:
    arrays = kernels.Inputs(*arrays)
    return kernels.choose(implementation, arrays, mechanism=mechanism, **more)


def on_one(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """As on a machine with one device of this kind."""
    monkeypatch.setattr(selection, "_own_target", lambda: target)
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def of_dtype(dtype: str, **sizes: Any) -> list[jax.Array]:
    return [jnp.asarray(x, dtype) for x in inputs(0, **sizes)]


@pytest.mark.parametrize(
    ("mechanism", "length", "takes"),
    [
        ("flow", 4_096, False),
        ("flow", 16_384, True),
        ("linear", 1_024, False),
        ("linear", 4_096, True),
        ("cosformer", 1_024, True),
    ],
)
def test_hopper_kernels_are_taken_where_they_are_faster(
    mechanism: str, length: int, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_one(monkeypatch, "gpu")
    arrays = [jax.ShapeDtypeStruct((4, length, 8, 64), "bfloat16")] * 3
    assert choose("auto", arrays, mechanism) == (("gpu", False) if takes else None)
    assert choose("pallas", arrays, mechanism) == ("gpu", False)


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_causal_flow_has_kernels_for_cpus_only(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_one(monkeypatch, target)
    arrays = [jax.ShapeDtypeStruct((64, 1_024, 8, 64), "bfloat16")] * 3
    assert choose("auto", arrays, "flow", is_causal=True) is None
    with pytest.raises(ValueError, match="its kernels are for CPUs"):
        choose("pallas", arrays, "flow", is_causal=True)


def test_auto_takes_kernels_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    half = of_dtype("bfloat16", head_dim=64)
    on_one(monkeypatch, "tpu")  # Nobody has timed a TPU's.
    assert choose("auto", of_dtype("float32")) is None
    on_one(monkeypatch, "gpu")
    assert choose("auto", half) == ("gpu", False)
    # An argument that they do not take is no error then.
    assert choose("auto", of_dtype("float32", head_dim=64)) is None
    # The compiler cannot cut a kernel into parts, but shard_map does.
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert choose("auto", half) is None
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    choices = []

    def local(*arrays):
        choices.append(choose("auto", arrays))
        return arrays[0]

    spec = jax.P("x")
    split = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    jax.eval_shape(split, *half)
    assert choices == [("gpu", False)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("mechanism", ["linear", "cosformer"])
def test_gpu_kernels_up_to_their_widths(
    mechanism: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_one(monkeypatch, "gpu")
    monkeypatch.setattr(selection, "_GPU_POSITIONS", {})

    def of_widths(implementation: str, width: int, value_width: int) -> Any:
        arrays = of_dtype("bfloat16", head_dim=width, value_dim=value_width)
        return choose(implementation, arrays, mechanism, is_causal=is_causal)

    for implementation in ("auto", "pallas"):
        assert of_widths(implementation, 64, 64) == ("gpu", False)
    for widths in ((65, 64), (64, 65)):
        assert of_widths("auto", *widths) is None
        with pytest.raises(ValueError, match="at most 64, got"):
            of_widths("pallas", *widths)


@pytest.mark.parametrize("target", ["tpu", "gpu"])
def test_gradients_inside_shard_map(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device runs its own kernel, and the compiler knows that results differ."""
    monkeypatch.setenv(kernels.INTERPRET, target)
    function = attention.cosformer_attention
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    arrays = [jnp.asarray(x, "bfloat16") for x in inputs(0, 2, 64, 64, 1, 64)]

    def local(*arrays: Any) -> Any:
        return function(*arrays, is_causal=True, implementation="pallas")

    def loss(*arrays: Any) -> Any:
        spec = jax.P("x")
        out = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(*arrays)
        return out.astype("float32").sum()

    slopes = jax.eval_shape(jax.grad(loss, (0, 1, 2)), *arrays)
    assert [x.shape for x in slopes] == [x.shape for x in arrays]


def lowered(target: str, function: Any, *arrays: Any) -> str:
    platform, device = DEVICES[target]
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("name", "target", "length", "sizes"),
    [
        ("cosformer", "tpu", 300, (4, 64, 64, "bfloat16")),
        ("cosformer", "tpu", 300, (2, 16, 40, "float32")),
        ("linear", "tpu", 300, (3, 128, 256, "bfloat16")),
        ("linear", "gpu", 600, (2, 64, 48, "bfloat16")),
        ("cosformer", "gpu", 600, (2, 64, 48, "bfloat16")),
    ],
)
def test_lowers_without_the_device(
    name: str,
    target: str,
    length: int,
    sizes: tuple,
    is_causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selection, "_own_target", lambda: target)
    function = getattr(attention, f"{name}_attention")
    mask = np.arange(length)[None] < length - 50

    def loss(q, k, v):
        more = {"is_causal": is_causal, "implementation": "pallas"}
        return function(q, k, v, mask, **more).astype("float32").sum()

    heads, width, value_width, dtype = sizes
    x = jax.ShapeDtypeStruct((1, length, heads, width), dtype)
    v = jax.ShapeDtypeStruct((1, length, heads, value_width), dtype)
    text = lowered(target, jax.value_and_grad(loss, (0, 1, 2)), x, x, v)
    if target == "tpu":
        assert text.count("tpu_custom_call") == (2 if is_causal else 4)
    else:
        assert text.count("@mosaic_gpu") == 5


def test_lowers_inside_shard_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_own_target", lambda: "tpu")
    kind = (AxisType.Auto,)
    mesh = AbstractMesh((2,), ("x",), axis_types=kind, abstract_device=TPU)
    x = jax.ShapeDtypeStruct((2, 40, 2, 64), "bfloat16")

    def slope(*arrays):
        def loss(*arrays):
            out = attention.cosformer_attention(
                *arrays, is_causal=True, implementation="pallas"
            )
            return out.astype("float32").sum()

        return jax.grad(loss, (0, 1, 2))(*arrays)

    specs = {"in_specs": (jax.P("x"),) * 3, "out_specs": (jax.P("x"),) * 3}
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(jax.shard_map(slope, mesh=mesh, **specs)).trace(x, x, x)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 2


def test_kernels_know_the_formulas_feature_maps() -> None:
    x = jnp.linspace(-3.0, 3.0, 12)
    assert set(MAPS) <= set(FEATURE_MAPS)
    for name, formula in MAPS.items():
        phi, (value, slope) = FEATURE_MAPS[name], formula(x)
        assert_close(value, phi(x), 1e-6)
        assert_close(slope, jax.vmap(jax.grad(phi))(x), 1e-6)
        dead = jnp.asarray(DEAD.get(name, 0.0))
        assert not formula(dead)[0]
