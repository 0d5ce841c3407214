"""A recurrence of single numbers by the C++ kernel; see columns.h."""

from typing import Any

import jax
import numpy as np

from lra_jax.kernels.cpu import programs
from lra_jax.kernels.spec import Scanned, ScanSpec


def forward(spec: ScanSpec, operands: Scanned, save: bool) -> tuple[jax.Array, Any]:
    """The states `[B, T, C]` and, if asked for, what `backward` needs."""
    shapes = [operands.values.shape]
    (states,) = programs.call("lra_scan_forward", shapes, [*operands], **_forth(spec))
    return states, (states if save else ())


def backward(
    spec: ScanSpec, operands: Scanned, states: jax.Array, of_states: jax.Array
) -> tuple[jax.Array, ...]:
    """The gradients of factors and values."""
    shapes = [states.shape, states.shape]
    arrays = [operands.factors, states, of_states]
    return tuple(programs.call("lra_scan_backward", shapes, arrays, **_forth(spec)))


def _forth(spec: ScanSpec) -> dict[str, Any]:
    return {"forth": np.int64(spec.forth)}
