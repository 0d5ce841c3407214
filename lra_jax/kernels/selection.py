"""Which implementation computes a call: the kernels, or the form that XLA compiles."""

import os
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps

Implementation = Literal["auto", "xla", "pallas"]

INTERPRET = "LRA_JAX_PALLAS_INTERPRET"
"""Environment variable: "tpu" or "gpu" lets `implementation="pallas"` run those kernels
in Pallas' interpreter, on any machine and very slowly. Read when a call is traced."""

TARGETS = ("tpu", "gpu")
# Those of the GPU have been through the last compiler, ptxas, but have run nowhere:
# they are there for those who ask.
_AUTOMATIC = ("tpu",)
_DTYPES = {"tpu": ("float32", "bfloat16"), "gpu": ("bfloat16",)}
_WIDEST = {"tpu": 256, "gpu": 64}
_CHUNKS = {"tpu": 16, "gpu": 64}


def choose(
    implementation: Implementation,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    feature_map: feature_maps.FeatureMap = "relu",
    chunking: Any = None,
    refusal: str | None = None,
) -> tuple[str, bool] | None:
    """The kernels to run, as (target, interpret); None = the XLA form.

    Args:
      implementation: "xla"; "pallas"; or "auto", the kernels where the backend is a
        TPU, the inputs suit them and the arrays are not spread over several
        devices by the compiler (inside ``jax.shard_map`` they are not).
      query: `[B, T, N, H]`, checked as key and value are.
      key: `[B, S, N, H]`.
      value: `[B, S, N, Hv]`.
      feature_map: phi, which decides the features' width M.
      chunking: `causal.Chunking` or None.
      refusal: why there are no kernels for the mechanism's other options; None = there
        are.

    Raises:
      ValueError: another implementation; or "pallas" where no kernel runs.
    """
    if implementation not in ("auto", "xla", "pallas"):
        raise ValueError(
            "implementation: expected 'auto', 'xla' or 'pallas', "
            f"got {implementation!r}"
        )
    forced = implementation == "pallas"
    if implementation == "xla" or not (forced or _whole()):
        return None
    interpret = _interpreted() if forced else None
    target = interpret or _native()
    if not forced and target not in _AUTOMATIC:
        return None
    if target is None:
        raise ValueError(
            "implementation: expected 'auto' or 'xla' on this machine, because Pallas "
            "kernels run on TPUs and Hopper GPUs (or slowly in the interpreter, with "
            f"{INTERPRET}=tpu in the environment), got 'pallas' on "
            f"{jax.default_backend()!r}"
        )
    width = feature_maps.feature_width(feature_map, query.shape[-1])
    widths = (width, value.shape[-1])
    problem = refusal or unsuited(target, (query, key, value), widths, chunking)
    if problem is None:
        return target, interpret is not None
    if forced:
        raise ValueError(f"implementation: 'pallas' on {target!r} {problem}")
    return None


def unsuited(
    target: str, arrays: tuple[Any, ...], widths: tuple[int, int], chunking: Any
) -> str | None:
    """Why a target's kernels do not take the arrays; None = they do."""
    found = {jnp.dtype(x.dtype).name for x in arrays}
    if len(found) != 1 or not found <= set(_DTYPES[target]):
        wanted = " or ".join(_DTYPES[target])
        return f"expected query, key and value all in {wanted}, got {sorted(found)}"
    if max(widths) > _WIDEST[target]:
        return f"expected widths M and Hv of at most {_WIDEST[target]}, got {widths}"
    unit = _CHUNKS[target]
    if chunking is None:
        return None
    if chunking.chunk % unit or (target == "gpu" and chunking.chunk != unit):
        wanted = f"a multiple of {unit}" if target == "tpu" else str(unit)
        return f"expected chunks of {wanted} positions, got {chunking.chunk}"
    return None


def _native() -> str | None:
    """The target of the default device."""
    device = jax.config.jax_default_device  # pyright: ignore
    if not isinstance(device, jax.Device):
        if jax.default_backend() == "cpu":
            return None
        device = jax.local_devices()[0]
    if device.platform == "tpu":
        return "tpu"
    # Instructions of this generation alone; the next has others in their place.
    hopper = str(getattr(device, "compute_capability", "")) == "9.0"
    return "gpu" if hopper else None


def _interpreted() -> str | None:
    target = os.environ.get(INTERPRET, "")
    if target and target not in TARGETS:
        raise ValueError(f"{INTERPRET}: expected one of {TARGETS}, got {target!r}")
    return target or None


def _whole() -> bool:
    """Whether a kernel would see whole arrays: the compiler cannot cut its call."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names and set(mesh.manual_axes) == set(mesh.axis_names):
        return True
    return jax.device_count() == 1


def highest(precision: jax.lax.PrecisionLike) -> jax.lax.Precision | None:
    """The precision of a kernel's products: the compiler's default, or float32's."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    if precision is None or precision in ("default", jax.lax.Precision.DEFAULT):
        return None
    return jax.lax.Precision.HIGHEST
