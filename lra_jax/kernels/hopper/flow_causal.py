"""Causal Flow-Attention on Hopper GPUs: one pass forward, one pass backward.

The definition is that of `lra_jax.attention.flow.causal`. All sums run over earlier
positions, so a program takes a whole head: the sum of the competition's exponentials
and the matrix ``W = sum_j c_j phi(k_j) v_j^T`` stay in registers, the four sums of
features in shared memory. There are no segments: the sums depend on each other,
and each would need a separate pass to be known in advance.

For training, each chunk keeps five lines, the four vectors of sums and W in the arrays'
dtype. Otherwise the backward pass, which walks from the last chunk to the first, would
first have to walk forward.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.flow_backward import slopes
from lra_jax.kernels.hopper.flow_parts import (
    KEPT,
    LINES,
    FlowProgram,
    Lines,
)
from lra_jax.kernels.hopper.ops import TILE
from lra_jax.kernels.hopper.parts import cut, dead, row_products, send, whole
from lra_jax.kernels.spec import FlowSpec, Gradients, Inputs, divisor, running_counts


def forward(spec: FlowSpec, given: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    length, width = given.query.shape[1], given.value.shape[3]
    program, arrays, counts = _prepared(spec, given)
    outputs = [program.rows()]
    outputs += [program.vectors(KEPT), program.tiles()] if save else []
    scratch = [program.tile_memory() for _ in range(5)]
    scratch += [program.vector_memory() for _ in range(9)]
    scratch += [plgpu.SMEM((KEPT, TILE), jnp.float32)] if save else []
    kernel = functools.partial(_forward, program, save)
    out, *saved = program.run(kernel, [*arrays, *counts], outputs, scratch)
    out = out[:, :length, :, :width]
    return out, ((out, *saved) if save else ())


def backward(spec: FlowSpec, given: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    out, kept, states = saved
    program, arrays, counts = _prepared(spec, given)
    program = dataclasses.replace(program, backward=True)
    if given.query_mask is not None:
        of_out = jnp.where(given.query_mask[:, 0, :, None, None] > 0, of_out, 0)
    through = row_products(out, of_out, program.shape[2])
    through = through.reshape(*kept.shape[:3], TILE)
    arrays = [*arrays, whole(program.spec, of_out)]
    found = slopes(program, arrays, kept, states, through, counts)
    return cut(found, given)


def _prepared(
    spec: FlowSpec, given: Inputs
) -> tuple[FlowProgram, list[jax.Array], list[jax.Array]]:
    """The program; query, key and value; and the counts of sinks and sources `[B, T]`.

    Arrays have whole chunks and 64 columns; hidden positions have zero features and
    values.
    """
    query, key, value, sources, sinks, *_ = given
    batch, length, heads, width = query.shape
    spec = dataclasses.replace(spec, block=-(-length // TILE) * TILE)
    query, key = (
        x if m is None else jnp.where(m[:, 0, :, None, None] > 0, x, dead(spec))
        for x, m in ((query, sinks), (key, sources))
    )
    if sources is not None:
        value = jnp.where(sources[:, 0, :, None, None] > 0, value, 0)
    arrays = [whole(spec, x, alive=False) for x in (query, key)]
    arrays.append(whole(spec, value))
    counts = []
    for mask in (sinks, sources):
        real = jnp.ones((batch, length)) if mask is None else mask[:, 0]
        real = jnp.pad(real.astype(jnp.float32), [(0, 0), (0, spec.block - length)])
        counts.append(running_counts(real, batch, spec.block))
    shape = batch, heads, spec.block
    program = FlowProgram(spec=spec, shape=shape, dtype=query.dtype, width=width)
    return program, arrays, counts


class _Chunk(NamedTuple):
    """The results of a chunk except its output."""

    weights: jax.Array  # x_i . y_j where j <= i, in the arrays' dtype
    lines: Lines
    competition: jax.Array  # c


def _forward(program: FlowProgram, save: bool, *refs: Any) -> None:
    names = ("query", "key", "value", "sinks", "sources")
    inputs = list(zip(names, refs[:5], strict=True))
    outputs, scratch = refs[5 : 6 + 2 * save], refs[6 + 2 * save :]
    x_stage, y_stage, value_stage, state_stage, out_stage = scratch[:5]
    ops, (batch, head, _) = program.ops, program.here()
    sums = program.no_sums(scratch[5:9])
    plgpu.commit_smem()

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        state, total = carry
        before, stages = (sums, total), (x_stage, y_stage)
        plgpu.wait_smem_to_gmem(0)
        for at, ref in enumerate(sums if save else ()):
            scratch[14].at[LINES + at][...] = ops.by_column(ref)
        found, total = _flows(program, tiles, before, stages, scratch[9:14])
        for at, line in enumerate(found.lines if save else ()):
            scratch[14].at[at][...] = line
        value = ops.tile(tiles["value"]).astype(jnp.float32)
        value_stage[...] = (value * ops.down(found.competition)).astype(program.dtype)
        state_stage[...] = state.astype(program.dtype)
        plgpu.commit_smem()
        pairs = (found.weights, value_stage), (x_stage, state_stage)
        scale = ops.down(found.lines.allocation / divisor(found.lines.incoming))
        out_stage[...] = (ops.product(*pairs) * scale).astype(program.dtype)
        state = state + ops.product((ops.transposed(y_stage), value_stage))
        plgpu.commit_smem()
        send(first, [(out_stage, outputs[0])], (batch, head))
        at = (batch, head, lax.div(first, TILE))
        for stage, ref in zip((*scratch[14:], state_stage), outputs[1:], strict=False):
            plgpu.copy_smem_to_gmem(stage, ref.at[*at])
        return state, total

    program.walk(body, inputs, (ops.zero_tile(), ops.zero_rows()))
    plgpu.wait_smem_to_gmem(0)


def _flows(
    program: FlowProgram, tiles: Any, before: Any, stages: Any, vectors: Any
) -> tuple[_Chunk, jax.Array]:
    """A chunk and the exponentials' sum after it; adds to the sums of features."""
    ops, (sums, total) = program.ops, before
    sinks, sources = (ops.by_row(tiles[name]) for name in ("sinks", "sources"))
    real = sources > 0.0
    sinks, sources = (jnp.where(n > 0.0, n, -n) for n in (sinks, sources))
    of_query = _side(program, tiles["query"], stages[0], vectors[0], sums[0::2])
    of_key = _side(program, tiles["key"], stages[1], vectors[1], sums[1::2])
    plgpu.commit_smem()
    _grow(program, sums.keys, stages[1])
    _grow(program, sums.queries, stages[0])
    seen = program.seen(True)
    scores = ops.product((stages[0], ops.transposed(stages[1])))
    weights = jnp.where(seen, scores, 0.0).astype(program.dtype)
    of_x = _pairs(program, scores, vectors[1])
    of_y = ops.product((stages[1], ops.transposed(stages[0])))
    of_y = _pairs(program, of_y, vectors[0])
    incoming, outgoing = of_x.sum(1) + of_query[0], of_y.sum(1) + of_key[0]
    by_outgoing, by_incoming = sinks / divisor(outgoing), sources / divisor(incoming)
    vectors[2][...], vectors[3][...] = by_outgoing, by_incoming
    _grow(program, sums.key_flow, stages[1], by_outgoing)
    _grow(program, sums.query_flow, stages[0], by_incoming)
    plgpu.commit_smem()
    sink = (program.summed(of_x, seen, vectors[2]) + of_query[1]) / sources
    logit = (program.summed(of_y, seen, vectors[3]) + of_key[1]) / sinks
    share = jnp.where(real, jnp.exp(program.clipped(logit)), 0.0)
    vectors[4][...] = share
    plgpu.commit_smem()
    shares = program.across(vectors[4])
    within = total + jnp.where(seen, shares, 0.0).sum(1)
    allocation = 1.0 / (1.0 + jnp.exp(-sink))
    lines = Lines(incoming, outgoing, allocation, logit, within)
    chunk = _Chunk(weights, lines, sources * share / divisor(within))
    return chunk, total + shares.sum(1)


def _side(
    program: FlowProgram, tile: Any, stage: Any, side_stage: Any, past: Any
) -> list[jax.Array]:
    """The products of queries or keys with two sums before the chunk.

    Their features go to shared memory, so that they take no registers later on.
    """
    _, x, _ = program.side(tile, stage)
    side_stage[...] = side = x.sum(1)
    return [program.before(x, side, total) for total in past]


def _pairs(program: FlowProgram, scores: jax.Array, side_stage: Any) -> jax.Array:
    """``(x_i + eps) . y_j`` where j <= i, else 0."""
    pairs = scores + program.spec.eps * program.across(side_stage)
    return jnp.where(program.seen(True), pairs, 0.0)


def _grow(
    program: FlowProgram, ref: Any, stage: Any, weights: jax.Array | None = None
) -> None:
    """Adds a chunk's features, each times its weight, to a sum."""
    features = program.ops.tile(stage).astype(jnp.float32)
    if weights is not None:
        features = features * program.ops.down(weights)
    program.grow(ref, features)
