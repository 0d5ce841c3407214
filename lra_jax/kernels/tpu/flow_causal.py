"""Causal Flow-Attention on TPUs: one pass forward, one pass backward.

The definition is that of `lra_jax.attention.flow.causal`: every sum runs up to the
current position, so all of them can be carried from block to block in VMEM: five lines
``[1, G H]`` and the matrix ``W = sum_j c_j phi(k_j) v_j^T``. Within a chunk the lines
become running sums, products with a triangle of ones; the mathematics is in
`lra_jax.kernels.tpu.flow_chunk`.

Training keeps lines and matrix before each block. The backward pass walks from the last
block to the first, recomputes the values of the block's chunks, and carries the
gradients of the five lines and of the matrix: sums over later positions.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lra_jax.kernels.spec import FlowSpec, Gradients, Inputs, running_counts
from lra_jax.kernels.tpu.flow_chunk import (
    Chunked,
    Lines,
    chunked,
    flows_backward,
    linear_backward,
)
from lra_jax.kernels.tpu.flow_parts import FlowCall
from lra_jax.kernels.tpu.layout import LANES, layout, like
from lra_jax.kernels.tpu.parts import Group, column, start, valid_rows, zeroed

# The bytes of VMEM that a block may take, out of a program's 16 MiB.
_FITS = 12 << 20
# Float32 arrays [C, G H] that the backward pass keeps for each chunk.
_KEPT = 17

_LINES = len(Lines._fields)


@dataclass(frozen=True)
class CausalCall(FlowCall):
    """A kernel that walks over the positions once."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the lines of sums and of W, for a group in a program."""
        group = self.layout.group
        return (_LINES, group.columns), (group.columns, group.value_columns)


def forward(spec: FlowSpec, given: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    call = _call(spec, given)
    arrays = _inputs(call, given)
    out = like(arrays[2][0])
    outputs = [(out, call.values)]
    if save:
        group = call.layout.group
        shapes = call.state_shapes[0], (group.packed_rows, group.value_columns)
        outputs += call.sums(out.shape[0], shapes, by_block=True)
    kernel = functools.partial(_forward_kernel, call, save)
    out, *saved = call.run(kernel, arrays, outputs, call.state_shapes)
    return call.layout.unlay(out), saved


def backward(spec: FlowSpec, given: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    call = _call(spec, given, backward=True)
    arrays = _inputs(call, given)
    outputs = [(like(x), place) for x, place in arrays[:3]]
    arrays += [(call.layout.lay(of_out), call.values)]
    arrays += call.placed(saved, by_block=True)
    kernel = functools.partial(_backward_kernel, call)
    return call.layout.gradients(call.run(kernel, arrays, outputs, call.state_shapes))


def _call(spec: FlowSpec, given: Inputs, backward: bool = False) -> CausalCall:
    query, found = given.query, layout(given)
    # Backward starts from what forward keeps per block, so both use the same blocks.
    if spec.fitted:
        spec = dataclasses.replace(spec, block=_fitted(spec, found.group, query.dtype))
    return CausalCall(spec, found, query.shape[1], query.dtype, backward)


def _fitted(spec: FlowSpec, group: Group, dtype: jnp.dtype) -> int:
    """Positions of a block."""
    copied = 2 * jnp.dtype(dtype).itemsize
    row = copied * (4 * group.columns + 3 * group.value_columns)
    row += 4 * _KEPT * group.columns
    block = spec.block
    while block * row > _FITS and block % (2 * math.lcm(spec.chunk, LANES)) == 0:
        block //= 2
    return block


def _inputs(call: CausalCall, given: Inputs) -> list[tuple[jax.Array, pl.BlockSpec]]:
    batch, length = given.query.shape[:2]
    masks = given.mask, given.query_mask
    lines = (None if mask is None else mask[:, 0] for mask in masks)
    counts = (running_counts(line, batch, length)[:, None] for line in lines)
    return [*call.laid(given), *((x, call.mask) for x in counts)]


class _Block:
    """A block's references, cut into chunks."""

    def __init__(self, call: CausalCall, refs: tuple[Any, ...]):
        self.call, self.chunk = call, call.chunk
        self.query, self.key, self.value, self.sources, self.sinks = refs
        self.first = call.place(pl.program_id(2)) * call.spec.block
        size = call.spec.chunk
        self.parts = [slice(at, at + size) for at in range(0, call.spec.block, size)]

    def flows(self, part: slice, before: Lines) -> Chunked:
        """All of a chunk except its output, from the sums before it."""
        chunk, first, length = self.chunk, self.first + part.start, self.call.length
        counts = self.sinks[:, part], self.sources[:, part]
        query, key = (
            chunk.rows(x[part], first, length, count)
            for x, count in zip((self.query, self.key), counts, strict=True)
        )
        inside = valid_rows(first, self.call.spec.chunk, length, None)
        sinks, sources = (
            jnp.where(inside, jnp.abs(column(count)), 1.0) for count in counts
        )
        value = zeroed(self.value[part], key.valid)
        return chunked(chunk, (query, key), value, (sinks, sources), before)


def _lines(ref: Any) -> Lines:
    return Lines(*(ref[at : at + 1] for at in range(_LINES)))


def _keep(ref: Any, lines: Lines) -> None:
    for at, line in enumerate(lines):
        ref[at : at + 1] = line


def _forward_kernel(call: CausalCall, save: bool, *refs: Any) -> None:
    out, *saved, lines_ref, summary_ref = refs[5:]
    start(lines_ref, summary_ref)
    if save:
        saved[0][...] = lines_ref[...]
        saved[1][...] = call.layout.group.packed(summary_ref[...])
    chunk, group = call.chunk, call.layout.group
    block = _Block(call, refs[:5])
    lines, summary = _lines(lines_ref), summary_ref[...]
    for part in block.parts:
        found = block.flows(part, lines)
        query, key = (x.astype(chunk.dtype) for x in found.scaled)
        numerator = chunk.dot(query, summary)
        for head in range(group.heads):
            scores = chunk.scores([query], [key], head)
            numerator += chunk.dot(scores, group.values_of(found.value, head))
        out[part] = numerator.astype(out.dtype)
        summary += chunk.outer(key, found.value)
        lines = found.sums.row(-1)
    _keep(lines_ref, lines)
    summary_ref[...] = summary


def _backward_kernel(call: CausalCall, *refs: Any) -> None:
    of_out, saved_lines, saved_summary, *slopes, later_ref, of_summary_ref = refs[5:]
    start(later_ref, of_summary_ref)
    chunk, block = call.chunk, _Block(call, refs[:5])
    lines = _lines(saved_lines)
    summary = call.layout.group.unpacked(saved_summary[...])
    chunks, befores = [], []
    for part in block.parts:
        found = block.flows(part, lines)
        chunks.append(found)
        befores.append(summary)
        lines = found.sums.row(-1)
        summary += chunk.outer(found.scaled[1], found.value)
    later, of_summary = _lines(later_ref), of_summary_ref[...]
    walked = list(zip(block.parts, chunks, befores, strict=True))
    for part, found, before in reversed(walked):
        upstream = zeroed(of_out[part], found.query.valid)
        near = linear_backward(chunk, found, before, upstream, of_summary)
        of_query, of_key, later = flows_backward(chunk, found, *near[:2], later)
        made = of_query, of_key, zeroed(near[2], found.key.valid)
        for ref, slope in zip(slopes, made, strict=True):
            ref[part] = slope.astype(ref.dtype)
        of_summary += chunk.outer(found.scaled[0], upstream)
    _keep(later_ref, later)
    of_summary_ref[...] = of_summary
