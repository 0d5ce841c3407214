"""A chunk of causal Flow-Attention on TPUs, forward and backward.

With x and y the features of queries and keys, the output of a chunk is that of linear
attention with ``x_i a_i / I_i`` as queries and ``y_j c_j`` as keys. If dx and dy are
their gradients,

- ``u_i = x_i . dx_i`` is that of ``a_i / I_i``, ``w_j = y_j . dy_j`` that of c_j;
- ``u_i a_i (1 - a_i) / I_i`` is that of I'_i;
- ``w_j c_j - e_j sum_{r >= j} w_r c_r / Z_r`` is that of the logit O'_j, with e the
  exponentials of the competition and Z their running sum;

and every sum up to a position becomes, in the gradients, a sum from that position on.
"""

from typing import NamedTuple

import jax

from lra_jax.kernels.spec import divisor
from lra_jax.kernels.tpu.flow_parts import FlowChunk, Rows, sigmoid
from lra_jax.kernels.tpu.parts import lower


class Lines(NamedTuple):
    """Sums over positions, up to each one, `[C, G H]`, or to the last, `[1, G H]`."""

    keys: jax.Array  # of phi(k)
    queries: jax.Array  # of phi(q)
    key_flow: jax.Array  # of phi(k) n / O
    query_flow: jax.Array  # of phi(q) n / I
    total: jax.Array  # of the competition's exponentials

    def row(self, index: int) -> "Lines":
        """The first row, 0, or the last, -1."""
        first = range(self.keys.shape[0])[index]
        return Lines(*(x[first : first + 1] for x in self))


class Chunked(NamedTuple):
    """The values of a chunk of positions, `[C, G H]` unless noted otherwise."""

    query: Rows
    key: Rows
    value: jax.Array  # [C, G Hv]
    sinks: jax.Array  # real ones so far, [C, 1]
    sources: jax.Array
    sums: Lines
    incoming: jax.Array
    outgoing: jax.Array
    logits: jax.Array
    scale: jax.Array  # a / I
    allocation: jax.Array
    shares: jax.Array  # exponentials
    competition: jax.Array

    @property
    def scaled(self) -> tuple[jax.Array, jax.Array]:
        """Queries and keys of the linear attention."""
        return (
            self.query.features * self.scale,
            self.key.features * self.competition,
        )


def chunked(
    chunk: FlowChunk,
    rows: tuple[Rows, Rows],
    value: jax.Array,
    counts: tuple[jax.Array, jax.Array],
    before: Lines,
) -> Chunked:
    """The values of a chunk, from its queries and keys, and the sums before it.

    ``counts`` are the numbers of real sinks and sources up to each position, `[C, 1]`.
    """
    (query, key), (sinks, sources) = rows, counts
    x, y = query.features, key.features
    keys = before.keys + chunk.so_far(y)
    queries = before.queries + chunk.so_far(x)
    incoming, outgoing = chunk.flow(x, keys), chunk.flow(y, queries)
    key_flow = before.key_flow + chunk.so_far(y * (sinks / outgoing))
    query_flow = before.query_flow + chunk.so_far(x * (sources / incoming))
    logits = chunk.inner(y, query_flow) / sinks
    shares = chunk.shares(logits, 0.0, key.valid)
    total = before.total + chunk.so_far(shares)
    allocation = sigmoid(chunk.inner(x, key_flow) / sources)
    return Chunked(
        query=query,
        key=key,
        value=value,
        sinks=sinks,
        sources=sources,
        sums=Lines(keys, queries, key_flow, query_flow, total),
        incoming=incoming,
        outgoing=outgoing,
        logits=logits,
        scale=allocation / incoming,
        allocation=allocation,
        shares=shares,
        competition=sources * shares / divisor(total),
    )


def linear_backward(
    chunk: FlowChunk,
    found: Chunked,
    before: jax.Array,
    of_out: jax.Array,
    of_summary: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of the scaled features and of the values."""
    group = chunk.group
    query, key = (x.astype(chunk.dtype) for x in found.scaled)
    of_query = chunk.dot(of_out, before, "nt")
    of_key = chunk.dot(found.value, of_summary, "nt")
    of_value = chunk.dot(key, of_summary)
    for head in range(group.heads):
        own = group.values_of(of_out, head)
        of_scores = lower(chunk.dot(own, found.value, "nt"))
        of_query += chunk.dot(of_scores, group.keys_of(key, head))
        of_key += chunk.dot(of_scores, group.keys_of(query, head), "tn")
        of_value += chunk.dot(chunk.scores([query], [key], head), own, "tn")
    return of_query, of_key, of_value


def flows_backward(
    chunk: FlowChunk,
    found: Chunked,
    of_query: jax.Array,
    of_key: jax.Array,
    later: Lines,
) -> tuple[jax.Array, jax.Array, Lines]:
    """The gradients of query, key and the sums before the chunk, `[1, G H]`.

    ``of_query`` and ``of_key`` are gradients of the scaled features, ``later`` those of
    the sums after the chunk.
    """
    eps, sums = chunk.spec.eps, found.sums
    x, y = found.query.features, found.key.features
    scaled = chunk.head_sums(x * of_query) * found.scale
    shared = chunk.head_sums(y * of_key) * found.competition
    total = chunk.from_here(-shared / divisor(sums.total)) + later.total
    of_sink = scaled * (1.0 - found.allocation) / found.sources
    of_source = chunk.passes(found.logits, shared + found.shares * total) / found.sinks
    key_flow = chunk.from_here(of_sink * (x + eps)) + later.key_flow
    query_flow = chunk.from_here(of_source * (y + eps)) + later.query_flow
    by_outgoing, by_incoming = (
        found.sinks / found.outgoing,
        found.sources / found.incoming,
    )
    of_outgoing = -chunk.head_sums(y * key_flow) * by_outgoing / found.outgoing
    of_incoming = -chunk.head_sums(x * query_flow) * by_incoming
    of_incoming = (of_incoming - scaled) / found.incoming
    keys = chunk.from_here(of_incoming * (x + eps)) + later.keys
    queries = chunk.from_here(of_outgoing * (y + eps)) + later.queries
    of_x = of_query * found.scale + by_incoming * query_flow + queries
    of_x += of_sink * (sums.key_flow + eps) + of_incoming * (sums.keys + eps)
    of_y = of_key * found.competition + by_outgoing * key_flow + keys
    of_y += of_source * (sums.query_flow + eps) + of_outgoing * (sums.queries + eps)
    before = Lines(keys, queries, key_flow, query_flow, total).row(0)
    return of_x * found.query.slope, of_y * found.key.slope, before
