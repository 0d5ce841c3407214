"""Linear attention on Hopper GPUs with heads of more than 64 columns.

The segments are those of `hopper.programs`. Each of the three gradients has a kernel of
its own, whose programs share no sums.
"""

from typing import Any

import jax

from lra_jax.kernels.hopper.ops import TILE
from lra_jax.kernels.hopper.parts import cut, whole
from lra_jax.kernels.hopper.programs import (
    after,
    before,
    gradient_lines,
    no_sums,
    one_segment,
    padded,
)
from lra_jax.kernels.hopper.wide_parts import Named, WideProgram
from lra_jax.kernels.hopper.wide_products import products, sums
from lra_jax.kernels.hopper.wide_slopes import slopes
from lra_jax.kernels.spec import Gradients, Inputs, Spec


def forward(spec: Spec, given: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and what `backward` needs."""
    length, width = given.query.shape[1], given.value.shape[3]
    arrays = _arrays(spec, given)
    over_queries, over_keys = (_program(spec, arrays, x) for x in ("query", "key"))
    if one_segment(over_keys):
        starts = no_sums(over_keys)
    else:
        starts = before(spec, sums(over_keys, arrays))
    out, den = products(over_queries, arrays, starts)
    out = out[:, :length, :, :width]
    return out, ((out, den, starts) if save else ())


def backward(spec: Spec, given: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    out, den, starts = saved
    arrays = _arrays(spec, given) | {"of_out": whole(spec, of_out)}
    lines = gradient_lines(spec, out, den, of_out)
    arrays |= dict(zip(("inverse", "of_den"), lines, strict=True))
    of_query = slopes(_program(spec, arrays, "query"), arrays, starts)
    over_queries = _program(spec, arrays, "query", backward=True)
    if one_segment(over_queries):
        laters = no_sums(over_queries)
    else:
        laters = after(spec, sums(over_queries, arrays))
    over_keys = _program(spec, arrays, "key", backward=True)
    of_key = slopes(over_keys, arrays, laters)
    (of_value,) = products(over_keys, arrays, laters)
    return cut((of_query, of_key, of_value), given)


def _arrays(spec: Spec, given: Inputs) -> Named:
    query, key, value, mask, _, scale, *_ = padded(spec, given)
    arrays = {"query": query, "key": key, "value": value, "scale": scale}
    return arrays if mask is None else arrays | {"mask": mask}


def _program(
    spec: Spec, arrays: Named, name: str, backward: bool = False
) -> WideProgram:
    batch, length, heads, _ = arrays[name].shape
    return WideProgram(
        spec,
        (batch, heads, length),
        arrays[name].dtype,
        backward,
        feature_panels=arrays["key"].shape[3] // TILE,
        value_panels=arrays["value"].shape[3] // TILE,
    )
