"""The backward kernel of causal Flow-Attention on Hopper GPUs.

With ``s_i = a_i / I_i``, ``p_j = n_j / O_j`` and ``r_i = n_i / I_i``, all that a
chunk's pairs contribute to the loss goes through ``x_i . y_j``, whose gradient is

- ``s_i c_j (do_i . v_j) + dI'_i p_j + dI_i`` where j <= i, and
- ``dO'_j r_i + dO_j`` where i <= j,

with dI', dO', dI and dO the gradients of the four flows. They come one after the other:
dI' from the output, dO' from the competition, hence from the values' gradient, then dO
from the later dI' and dI from the later dO'.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.attention.pallas.gpu_flow_parts import (
    LINES,
    FlowProgram,
    Lines,
    Sums,
    divisor,
)
from lra_jax.attention.pallas.gpu_ops import TILE
from lra_jax.attention.pallas.gpu_parts import send

# Lines over a chunk's positions, in their order; the sums before it follow. What is
# needed by row and by column comes twice: two loads of one line become one for the
# compiler, which then finds no layout for it.
_TWICE = ("competition", "of_sink", "by_outgoing")
_LINES = (
    *("scale", *_TWICE, "by_incoming", "incoming", "outgoing", "share", "total"),
    *("gate", "through", *(f"{name} by column" for name in _TWICE)),
)


def slopes(
    program: FlowProgram,
    arrays: list[jax.Array],
    kept: jax.Array,
    states: jax.Array,
    through: jax.Array,
    counts: list[jax.Array],
) -> list[jax.Array]:
    """The gradients of query, key and value.

    Args:
      program: walks backward.
      arrays: query, key, value and the output's gradient.
      kept: the forward kernel's vectors.
      states: W before each chunk.
      through: ``do_i . out_i``, `[B, N, T / 64, 64]`.
      counts: real sinks and sources so far, negative where hidden, `[B, T]`.
    """
    vectors = _vectors(program, kept, through, counts)
    scratch = [program.tile_memory() for _ in range(8)]
    scratch += [plgpu.SMEM((TILE,), jnp.float32) for _ in range(4)]
    kernel = functools.partial(_backward, program)
    outputs = [program.rows() for _ in range(3)]
    return program.run(kernel, [*arrays, vectors, states], outputs, scratch)


def _vectors(
    program: FlowProgram, kept: jax.Array, through: jax.Array, counts: list[jax.Array]
) -> jax.Array:
    """`_LINES` and the sums, `[B, N, T / 64, L, 64]`: what does not need a walk."""
    shape = (program.shape[0], 1, program.chunks, TILE)
    sinks, sources = (jnp.abs(x).reshape(shape) for x in counts)
    real = counts[1].reshape(shape) > 0
    found = Lines(*(kept[..., at, :] for at in range(LINES)))
    flows = found.incoming, found.outgoing, found.total
    incoming, outgoing, total = (1.0 / divisor(x) for x in flows)
    clipped = program.clipped(found.logit)
    share = jnp.where(real, jnp.exp(clipped - program.clip), 0.0)
    lines = {
        "scale": found.allocation * incoming,
        "competition": sources * share * total,
        "of_sink": through * (1.0 - found.allocation) / sources,
        "by_outgoing": sinks * outgoing,
        "by_incoming": sources * incoming,
        "incoming": incoming,
        "outgoing": outgoing,
        "share": share,
        "total": total,
        "gate": jnp.where(clipped == found.logit, 1.0, 0.0) / sinks,
        "through": through,
    }
    lines |= {f"{name} by column": lines[name] for name in _TWICE}
    stacked = jnp.stack([lines[name] for name in _LINES], 3)
    return jnp.concatenate([stacked, kept[..., LINES:, :]], 3)


def _backward(program: FlowProgram, *refs: Any) -> None:
    names = ("query", "key", "value", "of_out", "vectors", "states")
    inputs = list(zip(names, refs[:6], strict=True))
    outputs, scratch = refs[6:9], refs[9:]
    stages, vector_stages = scratch[:8], scratch[8:]
    out_stages, (batch, head, _) = stages[5:], program.here()

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        found, after = _chunk(program, tiles, carry, stages[:5], vector_stages)
        plgpu.wait_smem_to_gmem(0)
        for stage, slope in zip(out_stages, found, strict=True):
            stage[...] = slope.astype(program.dtype)
        plgpu.commit_smem()
        pairs = list(zip(out_stages, outputs, strict=True))
        send(first, pairs, (batch, head))
        return after

    ops = program.ops
    nothing = Sums(*(ops.zero_columns() for _ in Sums._fields))
    program.walk(body, inputs, (ops.zero_tile(), nothing, ops.zero_rows()))
    plgpu.wait_smem_to_gmem(0)


def _chunk(
    program: FlowProgram, tiles: Any, later: tuple, stages: Any, vectors: Any
) -> tuple[tuple, tuple]:
    """The gradients of a chunk's query, key and value, and the later sums with it."""
    ops, eps, (of_state, sums, of_total) = program.ops, program.spec.eps, later
    x_stage, y_stage, up_stage, later_stage, _ = stages
    row = {name: ops.by_row(_line(tiles, name)) for name in _LINES[: -len(_TWICE)]}
    x_rounded, x, _ = program.side(tiles["query"], x_stage)
    y_rounded, y, _ = program.side(tiles["key"], y_stage)
    up = ops.tile(tiles["of_out"]).astype(jnp.float32) * ops.down(row["scale"])
    up = up.astype(program.dtype)
    up_stage[...], later_stage[...] = up, of_state.astype(program.dtype)
    plgpu.commit_smem()
    seen = program.seen(False)
    # A row is a key.
    scores = ops.product((y_rounded, ops.transposed(x_stage)))
    weights = jnp.where(seen, scores, 0.0).astype(program.dtype)
    of_value = ops.product((weights, up_stage), (y_rounded, later_stage))
    of_value = of_value * ops.down(row["competition"])
    shared = (ops.tile(tiles["value"]).astype(jnp.float32) * of_value).sum(1)
    vectors[0][...] = shared * row["total"]
    plgpu.commit_smem()
    passed = ops.across(ops.by_column(vectors[0]))
    within = of_total - jnp.where(seen, passed, 0.0).sum(1)
    of_source = row["gate"] * (shared + row["share"] * within)
    inner = scores + eps * ops.down(y.sum(1))
    of_outgoing = program.summed(inner, seen, _line(tiles, "of_sink", True))
    of_outgoing = of_outgoing + (y * ops.across(sums.key_flow)).sum(1)
    of_outgoing = -of_outgoing * row["by_outgoing"] * row["outgoing"]
    vectors[1][...], vectors[2][...] = of_source, of_outgoing
    plgpu.commit_smem()
    # A row is a query.
    inner = ops.product((x_rounded, ops.transposed(y_stage)))
    inner = inner + eps * ops.down(x.sum(1))
    of_incoming = program.summed(inner, seen, vectors[1])
    of_incoming = of_incoming + (x * ops.across(sums.query_flow)).sum(1)
    of_incoming = -of_incoming * row["by_incoming"] - row["through"]
    of_incoming = of_incoming * row["incoming"]
    vectors[3][...] = of_incoming
    flows = row["of_sink"], of_source, of_incoming, of_outgoing
    found = _features(program, tiles, later, flows, up, stages, vectors)
    slopes = (
        (x + eps) * ops.down(of_incoming),
        (y + eps) * ops.down(of_outgoing),
        (x + eps) * ops.down(row["of_sink"]),
        (y + eps) * ops.down(of_source),
    )
    after = Sums(*(one + more.sum(0) for one, more in zip(sums, slopes, strict=True)))
    of_state = of_state + ops.product((ops.transposed(x_stage), up_stage))
    return (*found, of_value), (of_state, after, of_total - passed.sum(1))


def _features(
    program: FlowProgram,
    tiles: Any,
    later: tuple,
    flows: tuple,
    up: jax.Array,
    stages: Any,
    vectors: Any,
) -> tuple[jax.Array, jax.Array]:
    """The gradients of query and key."""
    ops, eps, (_, sums, _) = program.ops, program.spec.eps, later
    sums = Sums(*(ops.across(x) for x in sums))
    of_sink, of_source, of_incoming, of_outgoing = (ops.down(x) for x in flows)
    x_stage, y_stage, _, later_stage, pair_stage = stages
    names = ("competition", "by_outgoing", "by_incoming")
    competition, by_outgoing, by_incoming = (
        ops.down(ops.by_row(_line(tiles, name))) for name in names
    )
    pairs, ahead = _pairs(program, tiles, flows, up, vectors)
    pair_stage[...] = pairs
    plgpu.commit_smem()
    before = (tiles["vectors"].at[len(_LINES) + at] for at in range(len(sums)))
    before = Sums(*(ops.across(ops.by_column(x)) for x in before))
    of_x = ops.product((pairs, y_stage), (up, ops.transposed(tiles["states"])))
    of_x = of_x + eps * ops.down(ahead)
    of_x = of_x + by_incoming * sums.query_flow + sums.queries
    of_x = of_x + of_sink * (before.key_flow + eps)
    of_x = of_x + of_incoming * (before.keys + eps)
    value = ops.tile(tiles["value"]).astype(jnp.float32) * competition
    value = value.astype(program.dtype)
    of_y = ops.product(
        (ops.transposed(pair_stage), x_stage), (value, ops.transposed(later_stage))
    )
    columns = [
        ops.across(ops.by_column(x))
        for x in (_line(tiles, "of_sink", True), vectors[3])
    ]
    ahead = jnp.where(program.seen(False), by_outgoing * columns[0] + columns[1], 0.0)
    of_y = of_y + eps * ops.down(ahead.sum(1))
    of_y = of_y + by_outgoing * sums.key_flow + sums.keys
    of_y = of_y + of_source * (before.query_flow + eps)
    of_y = of_y + of_outgoing * (before.queries + eps)
    slopes = (program.features(tiles[name], None)[1] for name in ("query", "key"))
    of_query, of_key = (a * b for a, b in zip((of_x, of_y), slopes, strict=True))
    return of_query, of_key


def _pairs(
    program: FlowProgram, tiles: Any, flows: tuple, up: jax.Array, vectors: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of ``x_i . y_j``, and the sum of those where i <= j of each i."""
    ops = program.ops
    of_sink, _, of_incoming, _ = (ops.down(x) for x in flows)
    by_incoming = ops.down(ops.by_row(_line(tiles, "by_incoming")))
    of_source, of_outgoing, competition, by_outgoing = (
        ops.across(ops.by_column(x))
        for x in (
            *vectors[1:3],
            *(_line(tiles, name, True) for name in ("competition", "by_outgoing")),
        )
    )
    near = ops.product((up, ops.transposed(tiles["value"]))) * competition
    near = near + of_sink * by_outgoing + of_incoming
    ahead = by_incoming * of_source + of_outgoing
    ahead = jnp.where(program.seen(False), ahead, 0.0)
    pairs = jnp.where(program.seen(True), near, 0.0) + ahead
    return pairs.astype(program.dtype), ahead.sum(1)


def _line(tiles: Any, name: str, by_column: bool = False) -> Any:
    name = f"{name} by column" if by_column else name
    return tiles["vectors"].at[_LINES.index(name)]
