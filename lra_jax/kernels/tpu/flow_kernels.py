"""The sweeps of non-causal Flow-Attention on TPUs.

With ``w_j = exp(O'_j - top)``, ``Z = sum_j w_j`` and ``W = sum_j phi(k_j) w_j v_j^T``
an output is ``rho_i phi(q_i)^T W`` with ``rho_i = S a_i / (Z I_i)``. With its gradient
g_i, ``u_i = phi(q_i)^T W g_i``, ``A = sum_i rho_i u_i`` and ``V = sum_i rho_i phi(q_i)
g_i^T``, the gradients of the per-position values are

- ``s_i = T / S u_i rho_i (1 - a_i)`` of I'_i,
- ``t_j = w_j (phi(k_j)^T V v_j - A / Z)`` of O'_j, 0 where it was clipped,
- ``- (phi(k_j) . sum_i s_i phi(q_i)) / O_j^2`` of O_j,
- ``- u_i rho_i / I_i - (phi(q_i) . sum_j t_j phi(k_j)) / I_i^2`` of I_i,

and those of the features follow from these and the sums.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lra_jax.kernels.spec import divisor
from lra_jax.kernels.tpu.flow_parts import (
    FlowChunk,
    Rows,
    down,
    sigmoid,
)
from lra_jax.kernels.tpu.parts import column, start, zeroed
from lra_jax.kernels.tpu.sweeps import Side

# Lines `[1, G H]` of the sums: the height of one register.
LINES = 8
# The lines: sums over keys and queries, weighted sums, the competition's, counts.
_KEYS, _QUERIES, _KEY_FLOW, _QUERY_FLOW, _TOTAL, _LARGEST, _SOURCES, _SINKS = range(8)
_LOWEST = float(jnp.finfo(jnp.float32).min)


class _Sources(NamedTuple):
    """The values of a chunk of keys, `[C, G H]`."""

    outgoing: jax.Array
    conserved: jax.Array
    shares: jax.Array


class _Sinks(NamedTuple):
    """The values of a chunk of queries, `[C, G H]`."""

    incoming: jax.Array
    allocation: jax.Array
    scale: jax.Array


class _Program:
    """The references of a kernel, and the computations that both directions share."""

    def __init__(self, queries: Side, keys: Side, masked: tuple[bool, bool], refs: Any):
        self.chunk: FlowChunk = keys.chunk
        self.queries, self.keys = queries, keys
        self.query, self.key, self.value, *rest = refs
        self.mask = rest.pop(0) if masked[0] else None
        self.query_mask = rest.pop(0) if masked[1] else None
        self.rest = rest

    def rows_of_queries(self, part: Any, first: Any) -> Rows:
        """The features of a part of the block of queries."""
        mask = None if self.query_mask is None else self.query_mask[:, part]
        return self.chunk.rows(self.query[part], first, self.queries.length, mask)

    def rows_of_keys(self, part: Any, first: Any) -> Rows:
        """The features of a part of the block of keys."""
        mask = None if self.mask is None else self.mask[:, part]
        return self.chunk.rows(self.key[part], first, self.keys.length, mask)

    def values(self, part: Any, rows: Rows) -> jax.Array:
        """The values of a part, hidden ones zeroed."""
        return zeroed(self.value[part], rows.valid)

    def sources(self, rows: Rows, sums: Any) -> _Sources:
        """Flows and shares of the keys of a part."""
        chunk, y = self.chunk, rows.features
        conserved = chunk.inner(y, _line(sums, _QUERY_FLOW))
        shares = chunk.shares(conserved, _line(sums, _LARGEST), rows.valid)
        return _Sources(chunk.flow(y, _line(sums, _QUERIES)), conserved, shares)

    def sinks(self, rows: Rows, sums: Any) -> _Sinks:
        """Flows and allocation of the queries of a part."""
        chunk, x = self.chunk, rows.features
        sources = jnp.maximum(_line(sums, _SOURCES), 1.0)
        incoming = chunk.flow(x, _line(sums, _KEYS))
        conserved = chunk.inner(x, _line(sums, _KEY_FLOW))
        allocation = sigmoid(conserved * self.ratio(sums))
        scale = allocation / incoming * (sources / divisor(_line(sums, _TOTAL)))
        return _Sinks(incoming, allocation, scale)

    def ratio(self, sums: Any) -> jax.Array:
        """T / S, counting real positions."""
        sinks, sources = _line(sums, _SINKS), _line(sums, _SOURCES)
        return jnp.maximum(sinks, 1.0) / jnp.maximum(sources, 1.0)


def _line(sums: Any, index: int) -> jax.Array:
    return sums[index : index + 1]


def _add(sums: Any, index: int, more: jax.Array) -> None:
    sums[index : index + 1] = sums[index : index + 1] + more


def forward_kernel(
    queries: Side, keys: Side, masked: tuple[bool, bool], *refs: Any
) -> None:
    """Walks over keys, queries, keys and queries.

    ``refs`` are query, key, value, the masks that exist according to ``masked``, the
    output, the sums' lines `[8, G H]` and W `[G H, G Hv]`.
    """
    program = _Program(queries, keys, masked, refs)
    chunk = program.chunk
    out, sums, summary = program.rest
    start(sums, summary)

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        top = _LOWEST if chunk.spec.largest else 0.0
        sums[_LARGEST : _LARGEST + 1] = jnp.full((1, sums.shape[1]), top, jnp.float32)

    def total(part: Any, first: Any) -> None:
        rows = program.rows_of_keys(part, first)
        _add(sums, _KEYS, down(rows.features))
        _add(sums, _SOURCES, down(rows.valid.astype(jnp.float32)))

    def incoming(part: Any, first: Any) -> None:
        rows = program.rows_of_queries(part, first)
        flow = chunk.flow(rows.features, _line(sums, _KEYS))
        _add(sums, _QUERIES, down(rows.features))
        _add(sums, _QUERY_FLOW, down(rows.features / flow))
        _add(sums, _SINKS, down(rows.valid.astype(jnp.float32)))

    def competition(part: Any, first: Any) -> None:
        rows = program.rows_of_keys(part, first)
        if chunk.spec.largest:
            _raise_top(program, rows, sums, summary)
        found = program.sources(rows, sums)
        _add(sums, _KEY_FLOW, down(rows.features / found.outgoing))
        _add(sums, _TOTAL, down(found.shares))
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
    """Rescales the competition's sums to the largest logit so far."""
    chunk = program.chunk
    logits = chunk.clipped(chunk.inner(rows.features, _line(sums, _QUERY_FLOW)))
    visible = jnp.where(rows.valid, logits, _LOWEST).max(0, keepdims=True)
    before = _line(sums, _LARGEST)
    largest = jnp.maximum(before, visible)
    shrunk = jnp.exp(before - largest)
    sums[_LARGEST : _LARGEST + 1] = largest
    sums[_TOTAL : _TOTAL + 1] = _line(sums, _TOTAL) * shrunk
    summary[...] = summary[...] * column(shrunk)


def backward_kernel(
    queries: Side, keys: Side, masked: tuple[bool, bool], *refs: Any
) -> None:
    """Walks over queries, keys, queries and keys.

    ``refs`` are query, key, value, masks, the output's gradient, the sums' lines and W,
    three gradients, and, in VMEM, the gradients of the lines and of W, called V.
    """
    program = _Program(queries, keys, masked, refs)
    chunk = program.chunk
    of_out, sums, summary, of_query, of_key, of_value, slopes, of_summary = program.rest
    start(slopes, of_summary)
    # The slopes have the same lines as the sums, with A / Z in place of the total.

    def sinks(part: Any, first: Any) -> Any:
        rows = program.rows_of_queries(part, first)
        found = program.sinks(rows, sums)
        upstream = zeroed(of_out[part], rows.valid)
        pulled = chunk.dot(upstream, summary[...], "nt")
        both = chunk.head_sums(rows.features * pulled) * found.scale
        of_conserved = both * (1.0 - found.allocation) * program.ratio(sums)
        return rows, found, upstream, pulled, both, of_conserved

    def first_queries(part: Any, first: Any) -> None:
        rows, found, upstream, _, both, of_conserved = sinks(part, first)
        _add(slopes, _KEY_FLOW, down((rows.features + chunk.spec.eps) * of_conserved))
        _add(slopes, _TOTAL, down(both) / divisor(_line(sums, _TOTAL)))
        of_summary[...] += chunk.outer(rows.features * found.scale, upstream)

    def sources(part: Any, first: Any) -> Any:
        rows = program.rows_of_keys(part, first)
        found = program.sources(rows, sums)
        pulled = chunk.dot(program.values(part, rows), of_summary[...], "nt")
        own = chunk.head_sums(rows.features * pulled) - _line(slopes, _TOTAL)
        of_conserved = chunk.passes(found.conserved, own * found.shares)
        of_flow = chunk.head_sums(rows.features * _line(slopes, _KEY_FLOW))
        of_outgoing = -of_flow / (found.outgoing * found.outgoing)
        return rows, found, pulled, of_conserved, of_outgoing

    def first_keys(part: Any, first: Any) -> None:
        rows, found, _, of_conserved, of_outgoing = sources(part, first)
        y = rows.features + chunk.spec.eps
        _add(slopes, _QUERY_FLOW, down(y * of_conserved))
        _add(slopes, _QUERIES, down(y * of_outgoing))
        slope = chunk.dot(rows.features * found.shares, of_summary[...])
        of_value[part] = zeroed(slope, rows.valid).astype(of_value.dtype)

    def last_queries(part: Any, first: Any) -> None:
        rows, found, _, pulled, both, of_conserved = sinks(part, first)
        inverse = 1.0 / found.incoming
        of_flow = chunk.head_sums(rows.features * _line(slopes, _QUERY_FLOW))
        of_incoming = -(both + of_flow * inverse) * inverse
        slope = pulled * found.scale + _line(slopes, _QUERIES)
        slope += of_conserved * (_line(sums, _KEY_FLOW) + chunk.spec.eps)
        slope += of_incoming * (_line(sums, _KEYS) + chunk.spec.eps)
        slope += _line(slopes, _QUERY_FLOW) * inverse
        _add(slopes, _KEYS, down((rows.features + chunk.spec.eps) * of_incoming))
        of_query[part] = (slope * rows.slope).astype(of_query.dtype)

    def last_keys(part: Any, first: Any) -> None:
        rows, found, pulled, of_conserved, of_outgoing = sources(part, first)
        slope = pulled * found.shares + _line(slopes, _KEYS)
        slope += of_conserved * (_line(sums, _QUERY_FLOW) + chunk.spec.eps)
        slope += of_outgoing * (_line(sums, _QUERIES) + chunk.spec.eps)
        slope += _line(slopes, _KEY_FLOW) / found.outgoing
        of_key[part] = (slope * rows.slope).astype(of_key.dtype)

    queries.sweep(0, first_queries)
    keys.sweep(0, first_keys)
    queries.sweep(1, last_queries)
    keys.sweep(1, last_keys)
