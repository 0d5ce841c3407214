"""The backward kernel of causal Flow-Attention on Hopper GPUs.

With ``s_i = a_i / I_i``, ``p_j = n_j / O_j`` and ``r_i = n_i / I_i``, a chunk's pairs
contribute to the loss only through ``x_i . y_j``, whose gradient is

- ``s_i c_j (do_i . v_j) + dI'_i p_j + dI_i`` where j <= i, and
- ``dO'_j r_i + dO_j`` where i <= j,

with dI', dO', dI and dO the gradients of the four flows. They are computed in order:
dI' from the output, dO' from the competition and so from the values' gradient, then dO
from the later dI' and dI from the later dO'.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.flow_parts import (
    LINES,
    FlowProgram,
    Lines,
    Sums,
)
from lra_jax.kernels.hopper.ops import TILE
from lra_jax.kernels.hopper.parts import send
from lra_jax.kernels.spec import divisor

# Lines over a chunk's positions, in order; the sums before it follow. Values needed by
# row and by column are stored twice: the compiler would merge two loads of one line,
# and then find no layout for it.
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
    scratch += [program.vector_memory() for _ in range(8)]
    kernel = functools.partial(_backward, program)
    outputs = [program.rows() for _ in range(3)]
    return program.run(kernel, [*arrays, vectors, states], outputs, scratch)


def _vectors(
    program: FlowProgram, kept: jax.Array, through: jax.Array, counts: list[jax.Array]
) -> jax.Array:
    """`_LINES` and the sums, `[B, N, T / 64, L, 64]`, none of which need a walk."""
    shape = (program.shape[0], 1, program.chunks, TILE)
    sinks, sources = (jnp.abs(x).reshape(shape) for x in counts)
    real = counts[1].reshape(shape) > 0
    found = Lines(*(kept[..., at, :] for at in range(LINES)))
    flows = found.incoming, found.outgoing, found.total
    incoming, outgoing, total = (1.0 / divisor(x) for x in flows)
    clipped = program.clipped(found.logit)
    share = jnp.where(real, jnp.exp(clipped), 0.0)
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


class _Scratch(NamedTuple):
    """Shared memory of a program."""

    query: Any  # x, a tile, as are the next seven
    key: Any  # y
    up: Any  # s_i do_i
    later: Any  # the sum of x_i s_i do_i^T over later positions
    pairs: Any  # the gradients of x_i . y_j
    of_query: Any
    of_key: Any
    of_value: Any
    passed: Any  # a vector, as are the next three
    of_source: Any
    of_outgoing: Any
    of_incoming: Any


def _backward(program: FlowProgram, *refs: Any) -> None:
    names = ("query", "key", "value", "of_out", "vectors", "states")
    inputs = list(zip(names, refs[:6], strict=True))
    own, (batch, head, _) = _Scratch(*refs[9:-4]), program.here()
    made = list(zip((own.of_query, own.of_key, own.of_value), refs[6:9], strict=True))
    sums = program.no_sums(refs[-4:])
    plgpu.commit_smem()

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        of_state, of_total = carry
        plgpu.wait_smem_to_gmem(0)
        past = _sides(program, tiles, sums, own)
        own.later[...] = of_state.astype(program.dtype)
        plgpu.commit_smem()
        *flows, of_total = _flows(program, tiles, past, of_total, own)
        _pairs(program, tiles, flows, own)
        plgpu.commit_smem()
        _of_query(program, tiles, flows, sums, own)
        _of_key(program, tiles, flows, sums, own)
        _grow(program, tiles, flows, sums, own)
        plgpu.commit_smem()
        send(first, made, (batch, head))
        of_state = of_state + program.ops.product(
            (program.ops.transposed(own.query), own.up)
        )
        return of_state, of_total

    program.walk(body, inputs, (program.ops.zero_tile(), program.ops.zero_rows()))
    plgpu.wait_smem_to_gmem(0)


def _sides(program: FlowProgram, tiles: Any, sums: Sums, own: _Scratch) -> tuple:
    """Sums over columns of x and y, alone and times the sums from later positions."""
    found = []
    for name, total in (("query", sums.query_flow), ("key", sums.key_flow)):
        _, x, _ = program.side(tiles[name], getattr(own, name))
        found += [x.sum(1), (x * program.across(total)).sum(1)]
    up = program.ops.tile(tiles["of_out"]).astype(jnp.float32)
    up = up * program.down(_line(tiles, "scale"))
    own.up[...] = up.astype(program.dtype)
    return tuple(found)


def _flows(
    program: FlowProgram, tiles: Any, past: tuple, of_total: jax.Array, own: _Scratch
) -> tuple[jax.Array, ...]:
    """The gradients of O', O and I, and of the exponentials' sum before the chunk."""
    x_side, x_past, y_side, y_past = past
    ops, eps, seen = program.ops, program.spec.eps, program.seen(False)

    def row(name: str) -> jax.Array:
        return ops.by_row(_line(tiles, name))

    # A row is a key.
    scores = ops.product((own.key, ops.transposed(own.query)))
    inner = scores + eps * ops.down(y_side)
    of_outgoing = program.summed(inner, seen, _line(tiles, "of_sink", True)) + y_past
    of_outgoing = -of_outgoing * row("by_outgoing") * row("outgoing")
    weights = jnp.where(seen, scores, 0.0).astype(program.dtype)
    of_value = ops.product((weights, own.up), (own.key, own.later))
    of_value = of_value * program.down(_line(tiles, "competition"))
    own.of_value[...] = of_value.astype(program.dtype)
    shared = (ops.tile(tiles["value"]).astype(jnp.float32) * of_value).sum(1)
    own.passed[...] = shared * row("total")
    own.of_outgoing[...] = of_outgoing
    plgpu.commit_smem()
    passed = program.across(own.passed)
    within = of_total - jnp.where(seen, passed, 0.0).sum(1)
    of_source = row("gate") * (shared + row("share") * within)
    own.of_source[...] = of_source
    plgpu.commit_smem()
    # A row is a query.
    inner = ops.product((own.query, ops.transposed(own.key)))
    inner = inner + eps * ops.down(x_side)
    of_incoming = program.summed(inner, seen, own.of_source) + x_past
    of_incoming = -of_incoming * row("by_incoming") - row("through")
    of_incoming = of_incoming * row("incoming")
    own.of_incoming[...] = of_incoming
    return of_source, of_outgoing, of_incoming, of_total - passed.sum(1)


def _pairs(program: FlowProgram, tiles: Any, flows: Any, own: _Scratch) -> None:
    """The gradients of ``x_i . y_j``; a row is a query."""
    ops, (_, _, of_incoming) = program.ops, flows
    near = ops.product((own.up, ops.transposed(tiles["value"])))
    near = near * program.across(_line(tiles, "competition", True))
    by_outgoing = program.across(_line(tiles, "by_outgoing", True))
    near = near + program.down(_line(tiles, "of_sink")) * by_outgoing
    near = near + ops.down(of_incoming)
    pairs = jnp.where(program.seen(True), near, 0.0) + _ahead(program, tiles, own)
    own.pairs[...] = pairs.astype(program.dtype)


def _ahead(program: FlowProgram, tiles: Any, own: _Scratch) -> jax.Array:
    """The part of these gradients where i <= j."""
    of_source = program.across(own.of_source)
    ahead = program.down(_line(tiles, "by_incoming")) * of_source
    ahead = ahead + program.across(own.of_outgoing)
    return jnp.where(program.seen(False), ahead, 0.0)


def _of_query(
    program: FlowProgram, tiles: Any, flows: Any, sums: Sums, own: _Scratch
) -> None:
    ops, eps, (_, _, of_incoming) = program.ops, program.spec.eps, flows
    before = _before(program, tiles)
    states = ops.transposed(tiles["states"])
    of_x = ops.product((own.pairs, own.key), (own.up, states))
    of_x = of_x + eps * ops.down(_ahead(program, tiles, own).sum(1))
    by_incoming = program.down(_line(tiles, "by_incoming"))
    of_x = of_x + by_incoming * program.across(sums.query_flow)
    of_x = of_x + program.across(sums.queries)
    of_sink = program.down(_line(tiles, "of_sink"))
    of_x = of_x + of_sink * (program.across(before.key_flow) + eps)
    of_x = of_x + ops.down(of_incoming) * (program.across(before.keys) + eps)
    slope = program.features(tiles["query"], None)[1]
    own.of_query[...] = (of_x * slope).astype(program.dtype)


def _of_key(
    program: FlowProgram, tiles: Any, flows: Any, sums: Sums, own: _Scratch
) -> None:
    ops, eps, (of_source, of_outgoing, _) = program.ops, program.spec.eps, flows
    before = _before(program, tiles)
    value = ops.tile(tiles["value"]).astype(jnp.float32)
    value = value * program.down(_line(tiles, "competition"))
    of_y = ops.product(
        (ops.transposed(own.pairs), own.query),
        (value.astype(program.dtype), ops.transposed(own.later)),
    )
    by_outgoing = program.down(_line(tiles, "by_outgoing"))
    later = by_outgoing * program.across(_line(tiles, "of_sink", True))
    later = later + program.across(own.of_incoming)
    later = jnp.where(program.seen(False), later, 0.0).sum(1)
    of_y = of_y + eps * ops.down(later)
    of_y = of_y + by_outgoing * program.across(sums.key_flow)
    of_y = of_y + program.across(sums.keys)
    of_y = of_y + ops.down(of_source) * (program.across(before.query_flow) + eps)
    of_y = of_y + ops.down(of_outgoing) * (program.across(before.queries) + eps)
    slope = program.features(tiles["key"], None)[1]
    own.of_key[...] = (of_y * slope).astype(program.dtype)


def _grow(
    program: FlowProgram, tiles: Any, flows: Any, sums: Sums, own: _Scratch
) -> None:
    """Adds the chunk to the sums that later positions pass to earlier ones."""
    ops, eps, (of_source, of_outgoing, of_incoming) = (
        program.ops,
        program.spec.eps,
        flows,
    )
    x = ops.tile(own.query).astype(jnp.float32) + eps
    program.grow(sums.keys, x * ops.down(of_incoming))
    program.grow(sums.key_flow, x * program.down(_line(tiles, "of_sink")))
    y = ops.tile(own.key).astype(jnp.float32) + eps
    program.grow(sums.queries, y * ops.down(of_outgoing))
    program.grow(sums.query_flow, y * ops.down(of_source))


def _before(program: FlowProgram, tiles: Any) -> Sums:
    """The forward pass's sums before the chunk."""
    first, count = len(_LINES), len(Sums._fields)
    return Sums(*(tiles["vectors"].at[first + at] for at in range(count)))


def _line(tiles: Any, name: str, by_column: bool = False) -> Any:
    name = f"{name} by column" if by_column else name
    return tiles["vectors"].at[_LINES.index(name)]
