"""Chooses the implementation of a call: the kernels, or the form that XLA compiles."""

import os
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lra_jax.errors import expected, known
from lra_jax.kernels import mesh
from lra_jax.kernels.spec import FeatureMap, Inputs

Implementation = Literal["auto", "xla", "pallas", "native"]
# The kind of device, and whether its kernels run in the interpreter.
Target = tuple[str, bool]
# Why there are no kernels: the argument, what was expected, and what it is.
Refusal = tuple[str, str, str]

INTERPRET = "LRA_JAX_PALLAS_INTERPRET"
"""Environment variable: "tpu" or "gpu" makes `implementation="pallas"` run the kernels
in Pallas' interpreter, on any machine, very slowly. Read when a call is traced."""

TARGETS = ("tpu", "gpu")
# The mechanisms whose kernels are not only for CPUs.
_ON_ACCELERATORS = ("linear", "cosformer", "flow")
_DTYPES = {"tpu": ("float32", "bfloat16"), "gpu": ("bfloat16",), "cpu": ("float32",)}
_WIDEST = {"tpu": 256, "gpu": 64, "cpu": 512}
_CHUNKS = {"tpu": 16, "gpu": 64}
# B T N from which "auto" has kernels compiled for the CPU.
_CPU_POSITIONS = 1 << 12
# H from which the CPU's kernels of non-causal Flow are faster: a position costs them
# the same, however narrow its head.
_CPU_FLOW_WIDTH = 16
# B T N from which non-causal forms are faster by kernels on a Hopper GPU; cosFormer's
# always is.
_GPU_POSITIONS = {"linear": 1 << 17, "flow": 1 << 18}


def choose(
    implementation: Implementation,
    arrays: Inputs,
    *,
    mechanism: str,
    is_causal: bool = False,
    feature_map: FeatureMap = "identity",
    chunking: Any = None,
    refusal: Refusal | None = None,
) -> Target | None:
    """The kernels to run, as (target, interpret); None = the XLA form.

    Args:
      implementation: "xla"; "pallas", for TPUs and Hopper GPUs; "native", for CPUs; or
        "auto", the kernels if the default device has some, they support the inputs,
        they were measured to be faster for these sizes, which nobody has done on a TPU,
        and each device sees whole samples (`mesh.parts`).
      arrays: query, key and value, already checked, and the documents of packed rows,
        which only a CPU's kernels support.
      mechanism: its name in the registry; cosFormer without its angles is "linear".
      is_causal: of which form.
      feature_map: phi, which decides the features' width M.
      chunking: `causal.Chunking` or None.
      refusal: the option of the mechanism that kernels do not support; None = they
        support all.

    Raises:
      ValueError: an unknown implementation; or "pallas" or "native" where no such
        kernel runs.
    """
    if implementation not in ("auto", "xla", "pallas", "native"):
        choices = "'auto', 'xla', 'pallas' or 'native'"
        raise expected("implementation", choices, f"{implementation!r}")
    forced = implementation in ("pallas", "native")
    query, key, value = arrays[:3]
    batch, *sizes = query.shape
    parts = mesh.parts(batch)
    measured = parts and isinstance(batch, int)  # A symbolic batch may be small.
    if implementation == "xla" or not (forced or measured):
        return None
    only_on_cpus = mechanism not in _ON_ACCELERATORS
    only_on_cpus |= mechanism == "flow" and is_causal
    if implementation == "pallas" and only_on_cpus:
        raise _nowhere(implementation, "its kernels are for CPUs ('native')")
    interpret = _interpreter() if implementation == "pallas" else None
    target = interpret or _own_target()
    if target != "cpu" and only_on_cpus:
        target = None
    if not forced and (
        target is None
        or _slower(target, mechanism, (batch // (parts or 1), *sizes), is_causal)
    ):
        return None
    if forced and (target == "cpu") != (implementation == "native"):
        target = None
    if target is None:
        raise _nowhere(implementation)
    width = query.shape[-1]
    if callable(feature_map):
        one = jax.ShapeDtypeStruct((1, 1, 1, width), jnp.float32)
        width = jax.eval_shape(feature_map, one).shape[-1]
    widths = (width, value.shape[-1])
    if arrays.documents is not None and target != "cpu" and refusal is None:
        refusal = "segment_ids", "None", "packed documents"
    problem = refusal or _problem(target, (query, key, value), widths, chunking)
    if problem is not None:
        if not forced:
            return None
        name, supported, got = problem
        kernels = f"with implementation={implementation!r} on {target!r}"
        raise expected(name, supported, f"{got} {kernels}")
    missing = _compile_problem() if target == "cpu" else None
    if missing is None:
        return target, interpret is not None
    if forced:
        raise _nowhere(implementation, missing)
    return None


def _nowhere(implementation: str, reason: str | None = None) -> ValueError:
    """The error for kernels that the default device does not have."""
    if reason is None:
        reason = "native kernels run on CPUs"
        if implementation == "pallas":
            reason = (
                "Pallas kernels run on TPUs and Hopper GPUs (or slowly in the "
                f"interpreter, with {INTERPRET}=tpu in the environment)"
            )
    return expected(
        "implementation",
        f"'auto' or 'xla' on this machine, because {reason}",
        f"{implementation!r} on {jax.default_backend()!r}",
    )


def _compile_problem() -> str | None:
    """Why there are no kernels for the CPU; None = there are."""
    # Imported when needed: other devices have no use for it.
    from lra_jax.kernels.cpu import library

    return library.problem()


def _slower(
    target: str, mechanism: str, shape: tuple[int, ...], is_causal: bool
) -> bool:
    """Whether kernels are slower than the XLA form, or were never timed.

    ``shape`` is B, T, N and H of the query on one device.

    Measured on an H100 (results/accelerator/, docs/kernels.md), where XLA computes the
    flows of Flow-Attention and kernels its product. On a CPU, small calls are not worth
    compiling the kernels.
    """
    batch, length, heads, width = shape
    if target == "cpu":
        of_flow = mechanism == "flow" and not is_causal
        too_narrow = of_flow and width < _CPU_FLOW_WIDTH
        return batch * length * heads < _CPU_POSITIONS or too_narrow
    if target == "tpu":
        return True
    least = 0 if is_causal else _GPU_POSITIONS.get(mechanism, 0)
    return batch * heads * length < least


def _problem(
    target: str,
    arrays: tuple[Any, ...],
    widths: tuple[int, int],
    chunking: Any,
) -> Refusal | None:
    """Why a target's kernels do not support the arrays; None = they do."""
    dtypes = {jnp.dtype(x.dtype).name for x in arrays}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES[target]):
        supported = " or ".join(_DTYPES[target])
        return "dtype", f"query, key and value all in {supported}", f"{sorted(dtypes)}"
    if max(widths) > _WIDEST[target]:
        supported = f"widths M and Hv of at most {_WIDEST[target]}"
        return "query and value", supported, f"{widths}"
    if chunking is None:
        return None
    if target == "cpu":
        return "chunking", "None", f"{chunking}"
    unit = _CHUNKS[target]
    if chunking.chunk % unit or (target == "gpu" and chunking.chunk != unit):
        size = f"a multiple of {unit}" if target == "tpu" else str(unit)
        return "chunking", f"chunks of {size} positions", f"{chunking.chunk}"
    return None


def _own_target() -> str | None:
    """The target of the default device."""
    device = jax.config.jax_default_device  # pyright: ignore
    if not isinstance(device, jax.Device):
        if jax.default_backend() == "cpu":
            return "cpu"
        device = jax.local_devices()[0]
    if device.platform in ("tpu", "cpu"):
        return device.platform
    # The kernels use instructions that only this generation has.
    hopper = str(getattr(device, "compute_capability", "")) == "9.0"
    return "gpu" if hopper else None


def _interpreter() -> str | None:
    target = os.environ.get(INTERPRET)
    return known(INTERPRET, target, TARGETS) if target else None


def highest(precision: jax.lax.PrecisionLike) -> jax.lax.Precision | None:
    """The precision of a kernel's products: the compiler's default, or float32's."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore
    if precision is None or precision in ("default", jax.lax.Precision.DEFAULT):
        return None
    return jax.lax.Precision.HIGHEST
