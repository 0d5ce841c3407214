"""Non-causal linear attention on TPUs: every array is read once in each direction.

Forward, one kernel sums ``phi(k_j) v_j^T`` and ``phi(k_j)`` over the keys, and another
applies the sums to the queries. Backward mirrors this: the queries' kernel computes
their gradient and sums ``phi(q_i) g_i^T``, where g is the gradient of the numerator;
the keys' kernel applies those sums. The two lengths may differ. Features, doubled or
not, exist only in VMEM; the kernels exchange one state per head.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import pallas as pl

from lra_jax.kernels.spec import Gradients, Inputs, Spec, plus
from lra_jax.kernels.tpu.layout import Call, layout, like
from lra_jax.kernels.tpu.parts import (
    Terms,
    read,
    start,
    valid_rows,
    write,
    zero_invalid,
)


def forward(spec: Spec, operands: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    over_keys, over_queries = _calls(spec, operands)
    query, lay = operands.query, over_keys.layout.lay
    angles, arrays = over_keys.angles(operands.scale), _pairs(over_keys, operands)
    rows, columns = arrays[0][0].shape[0], arrays[1][0].shape[2]
    kernel = functools.partial(_sum_kernel, over_keys, operands.mask is not None)
    sums = over_keys.run(
        kernel, [angles, *arrays], over_keys.sums(rows, over_keys.state_shapes)
    )
    out_shape = jax.ShapeDtypeStruct((rows, query.shape[1], columns), query.dtype)
    arrays = [angles, (lay(query), over_queries.keys), *over_queries.lay_out(sums)]
    kernel = functools.partial(_apply_kernel, over_queries)
    outputs = [(out_shape, over_queries.values)]
    (out,) = over_queries.run(kernel, arrays, outputs)
    return over_keys.layout.unlay(out), sums if save else []


def backward(spec: Spec, operands: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    over_keys, over_queries = _calls(spec, operands)
    query, lay = operands.query, over_keys.layout.lay
    angles = over_keys.angles(operands.scale)
    arrays = [(lay(query), over_queries.keys), (lay(of_out), over_queries.values)]
    of_query = (like(arrays[0][0]), over_queries.keys)
    outputs = [
        of_query,
        *over_queries.sums(arrays[0][0].shape[0], over_queries.state_shapes),
    ]
    kernel = functools.partial(_queries_kernel, over_queries)
    arrays += over_queries.lay_out(saved)
    of_query, *later = over_queries.run(kernel, [angles, *arrays], outputs)
    arrays = _pairs(over_keys, operands)
    outputs = [(like(x), spec) for x, spec in arrays[:2]]
    arrays += over_keys.lay_out(later)
    kernel = functools.partial(_keys_kernel, over_keys, operands.mask is not None)
    of_key, of_value = over_keys.run(kernel, [angles, *arrays], outputs)
    return over_keys.layout.gradients((of_query, of_key, of_value))


def _calls(spec: Spec, operands: Inputs) -> tuple[Call, Call]:
    over_keys, over_queries = (
        Call(spec, layout(operands), x.shape[1], x.dtype)
        for x in (operands.key, operands.query)
    )
    return over_keys, over_queries


def _pairs(call: Call, operands: Inputs) -> list[tuple[jax.Array, pl.BlockSpec]]:
    lay = call.layout.lay
    hidden = [] if operands.mask is None else [(operands.mask, call.mask)]
    return [(lay(operands.key), call.keys), (lay(operands.value), call.values), *hidden]


def _chunks(call: Call, scale: Any, ref: Any, mask: Any = None) -> Iterator[tuple]:
    """Slice, valid rows, terms and the function that maps gradients to x, by chunk."""
    size, chunk, angle = call.spec.chunk, call.chunk, call.scale(scale)
    for at in range(0, call.spec.block, size):
        rows = slice(at, at + size)
        first = pl.program_id(2) * call.spec.block + at
        hidden = None if mask is None else mask[:, rows]
        valid = valid_rows(first, size, call.length, hidden)
        weights = chunk.weights(first, size, angle)
        terms, slope = chunk.features(ref[rows], valid, weights)
        pull = functools.partial(chunk.pull_back, slope=slope, weights=weights)
        yield rows, valid, terms, pull


def _sum_kernel(call: Call, masked: bool, *refs: Any) -> None:
    scale, key, value = refs[:3]
    mask, (state_ref, total_ref) = refs[3] if masked else None, refs[-2:]
    start(state_ref, total_ref)
    state, total = read(call.spec.terms, state_ref, total_ref)
    for part, valid, terms, _ in _chunks(call, scale, key, mask):
        seen = zero_invalid(value[part], valid)
        state, total = call.chunk.grow(terms, seen, state, total)
    write(state_ref, total_ref, state, total)


def _apply_kernel(call: Call, *refs: Any) -> None:
    scale, query, state_ref, total_ref, out = refs
    sums = read(call.spec.terms, state_ref, total_ref)
    for part, _, terms, _ in _chunks(call, scale, query):
        quotient = call.chunk.divide(*call.chunk.past(terms, *sums))[0]
        out[part] = quotient.astype(out.dtype)


def _queries_kernel(call: Call, *refs: Any) -> None:
    scale, query, of_out, state_ref, total_ref, of_query, *later_refs = refs
    chunk, group = call.chunk, call.layout.group
    later_state, later_total = later_refs
    start(later_state, later_total)
    state, total = read(call.spec.terms, state_ref, total_ref)
    later: tuple[Terms, Terms] = read(call.spec.terms, later_state, later_total)
    for part, valid, terms, pull in _chunks(call, scale, query):
        num, dens = chunk.past(terms, state, total)
        of_num, of_dens = chunk.slopes(num, dens, zero_invalid(of_out[part], valid))
        of_den = group.spread(of_dens, group.width)
        slopes = [
            chunk.dot(of_num, s, "nt") + of_den * z
            for s, z in zip(state, total, strict=True)
        ]
        of_query[part] = pull(slopes).astype(of_query.dtype)
        later = chunk.grow(terms, of_num, *later, of_den)
    write(later_state, later_total, *later)


def _keys_kernel(call: Call, masked: bool, *refs: Any) -> None:
    scale, key, value = refs[:3]
    mask = refs[3] if masked else None
    state_ref, total_ref, of_key, of_value = refs[-4:]
    chunk = call.chunk
    state, total = read(call.spec.terms, state_ref, total_ref)
    for part, valid, terms, pull in _chunks(call, scale, key, mask):
        seen = zero_invalid(value[part], valid)
        slopes = [
            chunk.dot(seen, s, "nt") + z for s, z in zip(state, total, strict=True)
        ]
        of_key[part] = pull(slopes).astype(of_key.dtype)
        slope = plus(chunk.dot(k, s) for k, s in zip(terms, state, strict=True))
        of_value[part] = zero_invalid(slope, valid).astype(of_value.dtype)
