"""Non-causal Flow-Attention on TPUs: one kernel forward, one backward.

The flows are sums over sums: phi(k) has to be summed before a query's incoming flow is
known, that before the keys' conserved flow, that before the competition's sum, that
before an output. So forward walks over keys, queries, keys and queries, and backward
over queries, keys, queries and keys (`lra_jax.attention.pallas.tpu_sweeps`).

With ``w_j = exp(O'_j - top)``, ``Z = sum_j w_j`` and ``W = sum_j phi(k_j) w_j v_j^T``
an output is ``rho_i phi(q_i)^T W`` with ``rho_i = S a_i / (Z I_i)``. With its gradient
g_i, ``u_i = phi(q_i)^T W g_i``, ``A = sum_i rho_i u_i`` and ``V = sum_i rho_i phi(q_i)
g_i^T``, the gradients of the numbers that a position has are

- ``s_i = T / S u_i rho_i (1 - a_i)`` of I'_i,
- ``t_j = w_j (phi(k_j)^T V v_j - A / Z)`` of O'_j, 0 where it was clipped,
- ``- (phi(k_j) . sum_i s_i phi(q_i)) / O_j^2`` of O_j,
- ``- u_i rho_i / I_i - (phi(q_i) . sum_j t_j phi(k_j)) / I_i^2`` of I_i,

and those of the features follow from them and from the sums. What a position has is
computed anew in every sweep; between forward and backward only the sums are kept.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lra_jax.attention.pallas.spec import FlowSpec
from lra_jax.attention.pallas.tpu_flow_parts import (
    LINES,
    FlowChunk,
    Rows,
    divisor,
    down,
    sigmoid,
)
from lra_jax.attention.pallas.tpu_layout import LANES, layout
from lra_jax.attention.pallas.tpu_parts import column, start
from lra_jax.attention.pallas.tpu_sweeps import Side, sides

# The lines of the sums: over keys and queries, weighted, of the competition, counts.
_KEYS, _QUERIES, _KEY_FLOW, _QUERY_FLOW, _TOTAL, _LARGEST, _SOURCES, _SINKS = range(8)
_LOWEST = float(jnp.finfo(jnp.float32).min)

Masks = tuple[jax.Array | None, jax.Array | None]


def forward(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: Masks,
    save: bool,
) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, the sums for `backward`.

    ``masks`` are of the keys `[B, 1, S]` and of the queries `[B, 1, T]`, float32.
    """
    queries, keys = _sides(spec, query, key, value, (1, 1), (1, 1), "kqkq")
    lay, group = keys.layout.lay, keys.layout.group
    values = keys.only(1).values
    pairs = [(lay(query), queries.keys), (lay(key), keys.keys), (lay(value), values)]
    rows, columns = pairs[0][0].shape[0], pairs[2][0].shape[2]
    out = jax.ShapeDtypeStruct((rows, query.shape[1], columns), query.dtype)
    outputs = [(out, queries.only(1).values)]
    sums = (LINES, group.columns), (group.columns, group.value_columns)
    if save:
        for shape in sums:
            kept = jax.ShapeDtypeStruct((rows, keys.layout.groups, *shape), jnp.float32)
            outputs.append((kept, keys.of_group(*shape)))
    kernel = functools.partial(_forward_kernel, queries, keys, _given(masks))
    pairs += _hidden(masks, keys, queries)
    out, *saved = keys.run(kernel, pairs, outputs, () if save else sums)
    return keys.layout.unlay(out, query.shape[2]), saved


def backward(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: Masks,
    saved: Any,
    of_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value."""
    queries, keys = _sides(spec, query, key, value, (2, 1), (2, 2), "qkqk")
    lay, group = keys.layout.lay, keys.layout.group
    pairs = [(lay(query), queries.keys), (lay(key), keys.keys)]
    pairs += [(lay(value), keys.values)]
    places = queries.only(1).keys, keys.only(1).keys, keys.only(0).values
    outputs = [
        (jax.ShapeDtypeStruct(x.shape, x.dtype), place)
        for (x, _), place in zip(pairs, places, strict=True)
    ]
    sums = (LINES, group.columns), (group.columns, group.value_columns)
    pairs += _hidden(masks, keys, queries)
    pairs += [(lay(of_out), queries.values)]
    pairs += [(x, keys.of_group(*shape)) for x, shape in zip(saved, sums, strict=True)]
    kernel = functools.partial(_backward_kernel, queries, keys, _given(masks))
    slopes = keys.run(kernel, pairs, outputs, sums)
    of_query, of_key, of_value = (keys.layout.unlay(x, query.shape[2]) for x in slopes)
    return of_query, of_key, of_value


def _sides(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    of_query: tuple[int, int],
    of_key: tuple[int, int],
    order: str,
) -> tuple[Side, Side]:
    """The sides of a kernel that holds so many arrays of widths H and Hv."""
    found = layout(query.shape[2], query.shape[3], value.shape[3])
    group = found.group
    columns = (-(-x // LANES) * LANES for x in (group.columns, group.value_columns))
    wide, value_wide = columns
    widths = [a * wide + b * value_wide for a, b in (of_query, of_key)]
    lengths = query.shape[1], key.shape[1]
    return sides(spec, found, lengths, (widths[0], widths[1]), query.dtype, order)


def _given(masks: Masks) -> tuple[bool, bool]:
    return masks[0] is not None, masks[1] is not None


def _hidden(masks: Masks, keys: Side, queries: Side) -> list[tuple[jax.Array, Any]]:
    places = keys.mask, queries.mask
    return [(x, y) for x, y in zip(masks, places, strict=True) if x is not None]


class _Sources(NamedTuple):
    """What a chunk of keys has, `[C, G H]`."""

    outgoing: jax.Array
    conserved: jax.Array
    shares: jax.Array


class _Sinks(NamedTuple):
    """What a chunk of queries has, `[C, G H]`."""

    incoming: jax.Array
    allocation: jax.Array
    scale: jax.Array


class _Program:
    """The references of a kernel, and what both directions compute of a chunk."""

    def __init__(self, queries: Side, keys: Side, masked: tuple[bool, bool], refs: Any):
        self.chunk: FlowChunk = keys.chunk
        self.queries, self.keys = queries, keys
        self.query, self.key, self.value, *rest = refs
        self.mask = rest.pop(0) if masked[0] else None
        self.query_mask = rest.pop(0) if masked[1] else None
        self.rest = rest

    def rows_of_queries(self, part: Any, first: Any) -> Rows:
        mask = None if self.query_mask is None else self.query_mask[:, part]
        return self.chunk.rows(self.query[part], first, self.queries.length, mask)

    def rows_of_keys(self, part: Any, first: Any) -> Rows:
        mask = None if self.mask is None else self.mask[:, part]
        return self.chunk.rows(self.key[part], first, self.keys.length, mask)

    def values(self, part: Any, rows: Rows) -> jax.Array:
        return hide(self.value[part], rows.valid)

    def sources(self, rows: Rows, sums: Any) -> _Sources:
        chunk, y = self.chunk, rows.features
        conserved = chunk.inner(y, line(sums, _QUERY_FLOW))
        shares = chunk.shares(conserved, line(sums, _LARGEST), rows.valid)
        return _Sources(chunk.flow(y, line(sums, _QUERIES)), conserved, shares)

    def sinks(self, rows: Rows, sums: Any) -> _Sinks:
        chunk, x = self.chunk, rows.features
        sources = jnp.maximum(line(sums, _SOURCES), 1.0)
        incoming = chunk.flow(x, line(sums, _KEYS))
        conserved = chunk.inner(x, line(sums, _KEY_FLOW))
        allocation = sigmoid(conserved * self.ratio(sums))
        scale = allocation / incoming * (sources / divisor(line(sums, _TOTAL)))
        return _Sinks(incoming, allocation, scale)

    def ratio(self, sums: Any) -> jax.Array:
        """T / S of the real positions."""
        sinks, sources = line(sums, _SINKS), line(sums, _SOURCES)
        return jnp.maximum(sinks, 1.0) / jnp.maximum(sources, 1.0)


def line(sums: Any, index: int) -> jax.Array:
    return sums[index : index + 1]


def add(sums: Any, index: int, more: jax.Array) -> None:
    sums[index : index + 1] = sums[index : index + 1] + more


def hide(x: jax.Array, valid: jax.Array) -> jax.Array:
    return jnp.where(valid, x, jnp.zeros((), x.dtype))


def _forward_kernel(
    queries: Side, keys: Side, masked: tuple[bool, bool], *refs: Any
) -> None:
    program = _Program(queries, keys, masked, refs)
    chunk = program.chunk
    out, sums, summary = program.rest
    start(sums, summary)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        top = _LOWEST if chunk.spec.top is None else chunk.spec.top
        sums[_LARGEST : _LARGEST + 1] = jnp.full((1, sums.shape[1]), top, jnp.float32)

    def total(part: Any, first: Any) -> None:
        rows = program.rows_of_keys(part, first)
        add(sums, _KEYS, down(rows.features))
        add(sums, _SOURCES, down(rows.valid.astype(jnp.float32)))

    def incoming(part: Any, first: Any) -> None:
        rows = program.rows_of_queries(part, first)
        flow = chunk.flow(rows.features, line(sums, _KEYS))
        add(sums, _QUERIES, down(rows.features))
        add(sums, _QUERY_FLOW, down(rows.features / flow))
        add(sums, _SINKS, down(rows.valid.astype(jnp.float32)))

    def competition(part: Any, first: Any) -> None:
        rows = program.rows_of_keys(part, first)
        if chunk.spec.top is None:
            _raise_top(program, rows, sums, summary)
        found = program.sources(rows, sums)
        add(sums, _KEY_FLOW, down(rows.features / found.outgoing))
        add(sums, _TOTAL, down(found.shares))
        shared = rows.features * found.shares
        summary[...] += chunk.outer(shared, program.values(part, rows))

    def outputs(part: Any, first: Any) -> None:
        rows = program.rows_of_queries(part, first)
        scaled = rows.features * program.sinks(rows, sums).scale
        out[part] = chunk.dot(scaled, summary[...]).astype(out.dtype)

    keys.sweep(0, total)
    queries.sweep(0, incoming)
    keys.sweep(1, competition)
    queries.sweep(1, outputs)


def _raise_top(program: _Program, rows: Rows, sums: Any, summary: Any) -> None:
    """Puts the competition's sums in the unit of the largest logit so far."""
    chunk = program.chunk
    logits = chunk.clipped(chunk.inner(rows.features, line(sums, _QUERY_FLOW)))
    visible = jnp.where(rows.valid, logits, _LOWEST).max(0, keepdims=True)
    before = line(sums, _LARGEST)
    largest = jnp.maximum(before, visible)
    shrunk = jnp.exp(before - largest)
    sums[_LARGEST : _LARGEST + 1] = largest
    sums[_TOTAL : _TOTAL + 1] = line(sums, _TOTAL) * shrunk
    summary[...] = summary[...] * column(shrunk)


def _backward_kernel(
    queries: Side, keys: Side, masked: tuple[bool, bool], *refs: Any
) -> None:
    program = _Program(queries, keys, masked, refs)
    chunk = program.chunk
    of_out, sums, summary, of_query, of_key, of_value, slopes, of_summary = program.rest
    start(slopes, of_summary)
    # The lines of the slopes are of the same sums, A / Z standing in that of the total.

    def sinks(part: Any, first: Any) -> Any:
        rows = program.rows_of_queries(part, first)
        found = program.sinks(rows, sums)
        upstream = hide(of_out[part], rows.valid)
        pulled = chunk.dot(upstream, summary[...], "nt")
        both = chunk.head_sums(rows.features * pulled) * found.scale
        of_conserved = both * (1.0 - found.allocation) * program.ratio(sums)
        return rows, found, upstream, pulled, both, of_conserved

    def first_queries(part: Any, first: Any) -> None:
        rows, found, upstream, _, both, of_conserved = sinks(part, first)
        add(slopes, _KEY_FLOW, down((rows.features + chunk.spec.eps) * of_conserved))
        add(slopes, _TOTAL, down(both) / divisor(line(sums, _TOTAL)))
        of_summary[...] += chunk.outer(rows.features * found.scale, upstream)

    def sources(part: Any, first: Any) -> Any:
        rows = program.rows_of_keys(part, first)
        found = program.sources(rows, sums)
        pulled = chunk.dot(program.values(part, rows), of_summary[...], "nt")
        own = chunk.head_sums(rows.features * pulled) - line(slopes, _TOTAL)
        of_conserved = chunk.passes(found.conserved, own * found.shares)
        of_flow = chunk.head_sums(rows.features * line(slopes, _KEY_FLOW))
        of_outgoing = -of_flow / (found.outgoing * found.outgoing)
        return rows, found, pulled, of_conserved, of_outgoing

    def first_keys(part: Any, first: Any) -> None:
        rows, found, _, of_conserved, of_outgoing = sources(part, first)
        y = rows.features + chunk.spec.eps
        add(slopes, _QUERY_FLOW, down(y * of_conserved))
        add(slopes, _QUERIES, down(y * of_outgoing))
        found = chunk.dot(rows.features * found.shares, of_summary[...])
        of_value[part] = hide(found, rows.valid).astype(of_value.dtype)

    def last_queries(part: Any, first: Any) -> None:
        rows, found, _, pulled, both, of_conserved = sinks(part, first)
        inverse = 1.0 / found.incoming
        of_flow = chunk.head_sums(rows.features * line(slopes, _QUERY_FLOW))
        of_incoming = -(both + of_flow * inverse) * inverse
        slope = pulled * found.scale + line(slopes, _QUERIES)
        slope += of_conserved * (line(sums, _KEY_FLOW) + chunk.spec.eps)
        slope += of_incoming * (line(sums, _KEYS) + chunk.spec.eps)
        slope += line(slopes, _QUERY_FLOW) * inverse
        add(slopes, _KEYS, down((rows.features + chunk.spec.eps) * of_incoming))
        of_query[part] = (slope * rows.slope).astype(of_query.dtype)

    def last_keys(part: Any, first: Any) -> None:
        rows, found, pulled, of_conserved, of_outgoing = sources(part, first)
        slope = pulled * found.shares + line(slopes, _KEYS)
        slope += of_conserved * (line(sums, _QUERY_FLOW) + chunk.spec.eps)
        slope += of_outgoing * (line(sums, _QUERIES) + chunk.spec.eps)
        slope += line(slopes, _KEY_FLOW) / found.outgoing
        of_key[part] = (slope * rows.slope).astype(of_key.dtype)

    queries.sweep(0, first_queries)
    keys.sweep(0, first_keys)
    queries.sweep(1, last_queries)
    keys.sweep(1, last_keys)
