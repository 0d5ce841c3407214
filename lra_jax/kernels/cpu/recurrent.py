"""Gated linear attention and the delta rule by the C++ kernels.

A state passes from position to position in registers or the first cache, without
chunks. The gradients are walks of the same kind, in one or the other direction. A task
has some columns of one head's state, which do not depend on the others. See gated.h and
delta.h.
"""

from typing import Any

import jax
import numpy as np

from lra_jax.kernels.cpu import programs
from lra_jax.kernels.spec import Gradients, Inputs, RecurrentSpec, plus


def forward(spec: RecurrentSpec, operands: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    query, key = operands.query, operands.key
    if spec.feature_map is not None:
        query, key = (_unit(spec, x) for x in (query, key))
    read = operands._replace(query=query, key=key)
    shape = (*query.shape[:3], operands.value.shape[3])
    name, shapes = "lra_gated_forward", [shape]
    if operands.beta is not None:
        # This kernel also returns what was missing of each value.
        name, shapes = "lra_delta_forward", [shape, shape]
    results = [
        programs.call(name, shapes, _arrays(read), from_end=from_end)
        for from_end in _ends(spec)
    ]
    saved = ((query, key), [missing for _, *missing in results])
    return plus(out for out, *_ in results), (saved if save else ())


def backward(
    spec: RecurrentSpec, operands: Inputs, saved: Any, of_out: jax.Array
) -> Gradients:
    """The gradients of query, key, value, decays and shares."""
    (query, key), missing = saved
    read = operands._replace(query=query, key=key)
    shapes = [x.shape for x in (query, key, operands.value)]
    shapes.append((0,) if operands.log_decay is None else operands.log_decay.shape)
    name = "lra_gated_backward"
    if operands.beta is not None:
        name = "lra_delta_backward"
        shapes.append(operands.beta.shape)
    results = [
        programs.call(name, shapes, [*_arrays(read), *kept, of_out], from_end=from_end)
        for from_end, kept in zip(_ends(spec), missing, strict=True)
    ]
    of_query, of_key, of_value, of_decay, *of_share = map(
        plus, zip(*results, strict=True)
    )
    if spec.feature_map is not None:
        of_query, of_key = (
            _unit_slope(spec, x, of_x)
            for x, of_x in ((operands.query, of_query), (operands.key, of_key))
        )
    slopes = Inputs(of_query, of_key, of_value)
    if operands.log_decay is not None:
        slopes = slopes._replace(log_decay=of_decay)
    return slopes._replace(beta=of_share[0]) if of_share else slopes


def _ends(spec: RecurrentSpec) -> tuple[bool, ...]:
    """For each walk, whether it starts from the end."""
    return (False,) if spec.is_causal else (False, True)


def _arrays(operands: Inputs) -> list[jax.Array]:
    shares = [] if operands.beta is None else [operands.beta]
    others = (
        programs.absent() if x is None else x
        for x in (operands.log_decay, *shares, operands.documents)
    )
    return [*operands[:3], *others]


def _unit(spec: RecurrentSpec, x: jax.Array) -> jax.Array:
    return programs.call("lra_unit_forward", [x.shape], [x], **_features(spec))[0]


def _unit_slope(spec: RecurrentSpec, x: jax.Array, of_out: jax.Array) -> jax.Array:
    arrays = [x, of_out]
    return programs.call("lra_unit_backward", [x.shape], arrays, **_features(spec))[0]


def _features(spec: RecurrentSpec) -> dict[str, Any]:
    name = str(spec.feature_map)
    return {"map": programs.number(name), "eps": np.float32(spec.eps)}
