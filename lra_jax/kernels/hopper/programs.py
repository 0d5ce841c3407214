"""Linear attention on Hopper GPUs: segments in parallel, chunks in order inside.

A program handles one segment of one head and walks over its chunks of 64 positions with
the state in registers. If samples and heads alone do not fill the device, a sequence
has several segments; their sums are computed first, by a pass over keys and values (in
the backward pass, over queries and the output's gradient), and added up here.

Without causality the sums over all keys come from the same pass, and the other kernels
apply them.

Heads are padded to 64 columns and sequences to whole segments here; the padding has
zero features.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.kernels.hopper import backward as slopes
from lra_jax.kernels.hopper import forward as products
from lra_jax.kernels.hopper.parts import Program, cut, pad, row_products
from lra_jax.kernels.spec import Gradients, Inputs, Spec


def forward(spec: Spec, operands: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and what `backward` needs."""
    length, width = operands.query.shape[1], operands.value.shape[3]
    q, pairs = _pad(spec, operands)
    scale, over_queries = operands.scale, _program(spec, q)
    over_keys = _program(spec, pairs["key"])
    if one_segment(over_keys):
        starts = no_sums(over_keys)
    else:
        starts = before(spec, products.sums(over_keys, pairs, scale))
    out, den = products.outputs(
        over_queries, q, pairs if spec.is_causal else {}, scale, starts
    )
    out = out[:, :length, :, :width]
    return out, ((out, den, starts) if save else ())


def backward(spec: Spec, operands: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    out, den, starts = saved
    q, pairs = _pad(spec, operands)
    inverse, of_den = gradient_lines(spec, out, den, of_out)
    up = pad(spec, of_out)
    later = {"query": q, "of_out": up, "inverse": inverse, "of_den": of_den}
    scale, over_queries = operands.scale, _program(spec, q)
    of_query = slopes.queries(
        over_queries, later, pairs if spec.is_causal else {}, scale, starts
    )
    if one_segment(over_queries):
        laters = no_sums(over_queries)
    else:
        sums = products.sums(over_queries, later, scale, slopes.stage_upstream)
        laters = after(spec, sums)
    over_keys = _program(spec, pairs["key"], backward=True)
    of_key, of_value = slopes.pairs(
        over_keys, pairs, later if spec.is_causal else {}, scale, laters
    )
    return cut((of_query, of_key, of_value), operands)


def _program(spec: Spec, x: jax.Array, backward: bool = False) -> Program:
    batch, length, heads, _ = x.shape
    return Program(spec, (batch, heads, length), x.dtype, backward)


def one_segment(program: Program) -> bool:
    """Whether the program's own walk covers the whole sequence."""
    return program.spec.is_causal and program.segments == 1


def no_sums(program: Program) -> list[jax.Array]:
    """The sums beyond a program that walks over the whole sequence."""
    return [jnp.zeros(x.shape, x.dtype) for x in program.states()]


def _pad(spec: Spec, operands: Inputs) -> tuple[jax.Array, products.Arrays]:
    """The query, and key, value and mask, with whole segments and 64 columns."""
    query, key = (pad(spec, x, alive=False) for x in (operands.query, operands.key))
    pairs = {"key": key, "value": pad(spec, operands.value)}
    if operands.mask is not None:
        mask = operands.mask[:, 0]
        missing = key.shape[1] - mask.shape[1]
        pairs["mask"] = jnp.pad(mask, [(0, 0), (0, missing)])
    return query, pairs


def before(spec: Spec, sums: list[jax.Array]) -> list[jax.Array]:
    """The sum before each segment, `[B, N, G, ...]`; the whole sum if not causal."""
    if not spec.is_causal:
        return [x.sum(2, keepdims=True) for x in sums]
    return [_exclusive(x) for x in sums]


def after(spec: Spec, sums: list[jax.Array]) -> list[jax.Array]:
    """The sum after each segment, or the whole sum."""
    if not spec.is_causal:
        return before(spec, sums)
    return [jnp.flip(_exclusive(jnp.flip(x, 2)), 2) for x in sums]


def _exclusive(x: jax.Array) -> jax.Array:
    """The sum before each segment.

    Not the inclusive sum less the segment's own: a query that sees no key has a slope
    1 / eps times larger than others, next to which their sums would be lost.
    """
    later = [(0, 0), (0, 0), (1, 0), *[(0, 0)] * (x.ndim - 3)]
    return jnp.cumsum(jnp.pad(x[:, :, :-1], later), 2)


def gradient_lines(
    spec: Spec, out: jax.Array, den: jax.Array, of_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """1 / den and the denominators' gradients, `[B, N, T]`."""
    inverse = 1.0 / spec.bound(den)
    both = row_products(out, of_out, den.shape[2])
    return inverse, -both * inverse * spec.passes(den)
