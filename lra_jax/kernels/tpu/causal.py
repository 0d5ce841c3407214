"""Causal linear attention on TPUs: one pass forward, one pass backward.

The grid's last axis runs in order, one block of positions per step; the state of a
group of heads, float32, stays in VMEM between steps. A block is processed chunk by
chunk: the pairs within a chunk as a masked product, all earlier positions through the
state.

Training keeps the state before each block. The backward pass walks from the last block
to the first, recomputes the states of the block's chunks from the kept one, and carries
the mirrored state, the sum of ``phi(q_i) g_i^T`` over later positions. It reads query,
key, value and the output's gradient, and writes three gradients; the output and its
denominators are recomputed, which is cheaper than reading them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lra_jax.kernels.spec import Gradients, Inputs, Spec, plus
from lra_jax.kernels.tpu.layout import Call, layout, like
from lra_jax.kernels.tpu.parts import (
    Terms,
    lower,
    read,
    start,
    valid_rows,
    write,
    zero_invalid,
)


def forward(spec: Spec, operands: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    call = _call(spec, operands)
    group = call.layout.group
    arrays = _inputs(call, operands)
    out = like(arrays[2][0])
    outputs = [(out, call.values)]
    if save:
        packed = (call.spec.terms, group.packed_rows, group.value_columns)
        shapes = packed, call.state_shapes[1]
        outputs += call.sums(out.shape[0], shapes, by_block=True)
    kernel = functools.partial(_forward_kernel, call, operands.mask is not None, save)
    arrays.insert(0, call.angles(operands.scale))
    out, *saved = call.run(kernel, arrays, outputs, call.state_shapes)
    return call.layout.unlay(out), saved


def backward(spec: Spec, operands: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    call = _call(spec, operands, backward=True)
    arrays = _inputs(call, operands)
    outputs = [(like(x), place) for x, place in arrays[:3]]
    arrays += [(call.layout.lay(of_out), call.values)]
    arrays += call.lay_out(saved, by_block=True)
    kernel = functools.partial(_backward_kernel, call, operands.mask is not None)
    arrays.insert(0, call.angles(operands.scale))
    return call.layout.gradients(call.run(kernel, arrays, outputs, call.state_shapes))


def _call(spec: Spec, operands: Inputs, backward: bool = False) -> Call:
    query = operands.query
    return Call(spec, layout(operands), query.shape[1], query.dtype, backward)


def _inputs(call: Call, operands: Inputs) -> list[tuple[jax.Array, pl.BlockSpec]]:
    places = (call.keys, call.keys, call.values)
    pairs = zip(operands[:3], places, strict=True)
    arrays = [(call.layout.lay(x), place) for x, place in pairs]
    return arrays if operands.mask is None else [*arrays, (operands.mask, call.mask)]


class _Part(NamedTuple):
    """A chunk of a block."""

    rows: slice
    query: tuple[Terms, jax.Array]  # the terms of phi(x), and phi'(x)
    key: tuple[Terms, jax.Array]
    value: jax.Array
    weights: Terms | None
    real: jax.Array  # positions before the end
    seen: jax.Array  # those that are not hidden either


def _parts(call: Call, scale: Any, inputs: list[Any]) -> list[_Part]:
    """The chunks of a block; the inputs are query, key, value and mask, if any."""
    query, key, value, *mask = inputs
    size, chunk, parts = call.spec.chunk, call.chunk, []
    angle = call.scale(scale)
    first = call.place(pl.program_id(2)) * call.spec.block
    for at in range(0, call.spec.block, size):
        rows, place = slice(at, at + size), first + at
        hidden = mask[0][:, rows] if mask else None
        real = valid_rows(place, size, call.length, None)
        seen = valid_rows(place, size, call.length, hidden)
        weights = chunk.weights(place, size, angle)
        q = chunk.features(query[rows], real, weights)
        k = chunk.features(key[rows], seen, weights)
        v = zero_invalid(value[rows], seen)
        parts.append(_Part(rows, q, k, v, weights, real, seen))
    return parts


def _forward_kernel(call: Call, masked: bool, save: bool, *refs: Any) -> None:
    scale, *inputs = refs[: 4 + masked]
    out, *saved = refs[4 + masked : -2]
    state_ref, total_ref = refs[-2:]
    start(state_ref, total_ref)
    state, total = read(call.spec.terms, state_ref, total_ref)
    chunk, group = call.chunk, call.layout.group
    if save:
        for term in range(call.spec.terms):
            saved[0][term] = group.pack(state[term])
        saved[1][...] = total_ref[...]
    for part in _parts(call, scale, inputs):
        num, dens, _ = _outputs(call, part, state, total)
        out[part.rows] = chunk.divide(num, dens)[0].astype(out.dtype)
        state, total = chunk.grow(part.key[0], part.value, state, total)
    write(state_ref, total_ref, state, total)


def _outputs(
    call: Call, part: _Part, state: Terms, total: Terms
) -> tuple[jax.Array, Terms, Terms]:
    """Numerators, denominators and scores of a chunk, given the state before it."""
    chunk, group = call.chunk, call.layout.group
    (query, _), (key, _), value = part.query, part.key, part.value
    num, dens = chunk.past(query, state, total)
    all_scores = []
    for head in range(group.heads):
        # Rounded once, so that numerator and denominator use the same weights.
        scores = chunk.scores(query, key, head).astype(chunk.dtype)
        num += chunk.dot(scores, group.values_of(value, head))
        dens[head] += scores.astype(jnp.float32).sum(1, keepdims=True)
        all_scores.append(scores)
    return num, dens, all_scores


def _backward_kernel(call: Call, masked: bool, *refs: Any) -> None:
    scale, *inputs = refs[: 4 + masked]
    of_out, state_ref, kept_total = refs[4 + masked : 7 + masked]
    slopes = refs[7 + masked : 10 + masked]
    later_ref, later_total_ref = refs[-2:]
    start(later_ref, later_total_ref)
    chunk, group = call.chunk, call.layout.group
    parts = _parts(call, scale, inputs)
    terms = range(call.spec.terms)
    state = [group.unpack(state_ref[term]) for term in terms]
    befores = [(state, [kept_total[term : term + 1] for term in terms])]
    for part in parts[:-1]:
        befores.append(chunk.grow(part.key[0], part.value, *befores[-1]))
    later = read(call.spec.terms, later_ref, later_total_ref)
    for part, before in reversed(list(zip(parts, befores, strict=True))):
        upstream = zero_invalid(of_out[part.rows], part.real)
        new_slopes, later = _chunk_backward(call, part, upstream, before, later)
        for ref, slope in zip(slopes, new_slopes, strict=True):
            ref[part.rows] = slope.astype(ref.dtype)
    write(later_ref, later_total_ref, *later)


def _chunk_backward(
    call: Call,
    part: _Part,
    of_out: jax.Array,
    before: tuple[Terms, Terms],
    later: tuple[Terms, Terms],
) -> tuple[tuple[jax.Array, ...], tuple[Terms, Terms]]:
    """A chunk's gradients, and the mirrored state with the chunk added."""
    chunk, group = call.chunk, call.layout.group
    (query, query_slope), (key, key_slope) = part.query, part.key
    value, weights, (state, total) = part.value, part.weights, before
    num, dens, all_scores = _outputs(call, part, state, total)
    of_num, of_dens = chunk.slopes(num, dens, of_out)
    of_den = group.spread(of_dens, group.width)
    later_state, later_total = later
    of_query = [
        chunk.dot(of_num, s, "nt") + of_den * z
        for s, z in zip(state, total, strict=True)
    ]
    of_key = [
        chunk.dot(value, s, "nt") + z
        for s, z in zip(later_state, later_total, strict=True)
    ]
    of_value = plus(chunk.dot(k, s) for k, s in zip(key, later_state, strict=True))
    for head, scores in enumerate(all_scores):
        slope = group.values_of(of_num, head)
        of_scores = lower(chunk.dot(slope, value, "nt") + of_dens[head])
        for term in range(call.spec.terms):
            of_query[term] += chunk.dot(of_scores, group.keys_of(key[term], head))
            of_head = group.keys_of(query[term], head)
            of_key[term] += chunk.dot(of_scores, of_head, "tn")
        of_value += chunk.dot(scores, slope, "tn")
    later = chunk.grow(query, of_num, later_state, later_total, of_den)
    slopes = (
        chunk.pull_back(of_query, query_slope, weights),
        chunk.pull_back(of_key, key_slope, weights),
        zero_invalid(of_value, part.seen),
    )
    return slopes, later
