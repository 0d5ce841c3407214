"""Causal Flow-Attention: one pass over the chunks, and its stream.

The authors' causal form (thuml/Flowformer, `Flow_Attention_Causal`) is a definition of
its own and not a mask over the other: with every sum running over the positions up to
i, and the mean over n positions in place of the sum,

- ``I_i = phi(q_i) . sum_{j <= i} phi(k_j)``,
  ``O_j = phi(k_j) . sum_{i <= j} phi(q_i)``;
- ``I'_i = phi(q_i) . sum_{j <= i} phi(k_j) (n_j / O_j) / n_i``, ``O'_j`` likewise;
- competition ``c_j = n_j exp(O'_j) / sum_{r <= j} exp(O'_r)``, allocation
  ``a_i = sigmoid(I'_i)``;
- ``out_i = a_i (phi(q_i) / I_i)^T sum_{j <= i} phi(k_j) c_j v_j^T``.

So an output never changes when later positions come, and its last row is not that of
the non-causal form. Within a chunk all four flows are row and column sums of one matrix
``phi(q_i) . phi(k_j)``: its lower triangle serves the sinks, its upper one the sources.

Deviations: the authors need the clip to keep exp within range; here the competition
carries a running maximum, so ``clip=None`` is safe. Hidden positions leave every sum,
and n counts the real ones.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import chunks, shapes
from lra_jax.attention.flow_parts import FlowTerms, Options, clipped


class FlowSums(NamedTuple):
    """The past of a position; float32 or float64."""

    keys: jax.Array  # sum of phi(k), [B, N, M]
    queries: jax.Array  # sum of phi(q), [B, N, M]
    key_flow: jax.Array  # sum of phi(k) n / O, [B, N, M]
    query_flow: jax.Array  # sum of phi(q) n / I, [B, N, M]
    largest: jax.Array  # O' at its largest, [B, N]
    total: jax.Array  # sum of exp(O' - largest), [B, N]
    summary: jax.Array  # sum of phi(k) c v^T, [B, N, M, Hv]


class FlowState(NamedTuple):
    """Everything that the next position needs of the earlier ones."""

    sums: FlowSums
    sources: jax.Array  # real keys so far, [B] int32
    sinks: jax.Array  # real queries so far, [B] int32


class _Arrays(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array


class _Tables(NamedTuple):
    """`[1 or B, 1, T]`; real sinks and sources up to each position."""

    sinks: jax.Array
    sources: jax.Array
    visible: jax.Array  # which sources are real


_Four = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class FlowBlock:
    """One super-block of causal Flow-Attention.

    Attributes:
      plan: how it is cut.
      options: clip, eps and precision.
      as_terms: return the `FlowTerms`, heads first, in place of the output.
    """

    plan: chunks.Plan
    options: Options
    as_terms: bool = False

    def __call__(
        self, start: FlowSums, arrays: _Arrays, tables: _Tables
    ) -> tuple[Any, FlowSums]:
        query, key, value = self.plan.split(arrays)
        sinks, sources, visible = self.plan.split(tables)
        # Appended positions have counts of 0.
        sinks, sources = jnp.maximum(sinks, 1), jnp.maximum(sources, 1)
        scores = self._product("bnpim,bnpjm->bnpij", query, key)
        flows, sums = self._flows(start, query, key, scores, sinks, sources)
        incoming, _outgoing, conserved_sink, conserved_source = flows
        logits = clipped(conserved_source, self.options.clip)
        shares, largest, total = _compete(logits, visible, start)
        competition = shares * sources
        allocation = jax.nn.sigmoid(conserved_sink)
        sums = sums._replace(largest=largest, total=total)
        if self.as_terms:
            return self.plan.join(FlowTerms(*flows, competition, allocation)), sums
        value = value * competition[..., None]
        updates = self._product("bnpjm,bnpjv->bnpmv", key, value)
        before, summary = chunks.prefix(self.plan, start.summary, updates)
        out = self._product("bnpij,bnpjv->bnpiv", _lower(scores), value)
        out += self._product("bnpim,bnpmv->bnpiv", query, before)
        out = out * (allocation / _divisor(incoming))[..., None]
        return self.plan.join(out), sums._replace(summary=summary)

    def _flows(
        self,
        start: FlowSums,
        query: jax.Array,
        key: jax.Array,
        scores: jax.Array,
        sinks: jax.Array,
        sources: jax.Array,
    ) -> tuple[_Four, FlowSums]:
        """I, O, I' and O', in this order, and their sums after the block."""
        eps = self.options.eps
        rows = _lower(scores + eps * key.sum(-1)[..., None, :])
        columns = jnp.swapaxes(scores, -1, -2)
        columns = _lower(columns + eps * query.sum(-1)[..., None, :])
        (keys, queries), after = chunks.prefix(
            self.plan, (start.keys, start.queries), (key.sum(3), query.sum(3))
        )
        incoming = self._inner(rows, query, keys)
        outgoing = self._inner(columns, key, queries)
        of_keys, of_queries = sinks / _divisor(outgoing), sources / _divisor(incoming)
        updates = (
            self._product("bnpjm,bnpj->bnpm", key, of_keys),
            self._product("bnpjm,bnpj->bnpm", query, of_queries),
        )
        flows, after_flows = chunks.prefix(
            self.plan, (start.key_flow, start.query_flow), updates
        )
        conserved = (
            self._inner(rows, query, flows[0], of_keys) / sources,
            self._inner(columns, key, flows[1], of_queries) / sinks,
        )
        sums = dict(zip(("keys", "queries"), after, strict=True))
        sums |= dict(zip(("key_flow", "query_flow"), after_flows, strict=True))
        return (incoming, outgoing, *conserved), start._replace(**sums)

    def _inner(
        self,
        pairs: jax.Array,
        features: jax.Array,
        before: jax.Array,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """``(features_i + eps) . (sum_{j <= i} weights_j others_j + eps)``.

        ``pairs`` are the products of a chunk, ``before`` the sum before it.
        """
        if weights is None:
            near = pairs.sum(-1)
        else:
            near = self._product("bnpij,bnpj->bnpi", pairs, weights)
        far = self._product("bnpim,bnpm->bnpi", features, before)
        eps, width = self.options.eps, features.shape[-1]
        constant = before.sum(-1)[..., None] + features.sum(-1) + width * eps
        return near + far + eps * constant + self.options.extra_eps

    def _product(self, terms: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(terms, *arrays, precision=self.options.precision)


def _lower(pairs: jax.Array) -> jax.Array:
    zero = jnp.zeros((), pairs.dtype)
    return jnp.where(chunks.triangle(pairs.shape[-1]), pairs, zero)


def _divisor(x: jax.Array) -> jax.Array:
    """1 in place of 0, which stands only where the features are zero as well."""
    return jnp.where(x == 0, jnp.ones((), x.dtype), x)


def _compete(
    logits: jax.Array, visible: jax.Array, start: FlowSums
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each source's share among those up to it: `[B, N, P, C]`, and the state after.

    The maximum is a running one: one over the block would let a large later logit round
    the earlier shares to 0 / 0.
    """
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
    seen = chunks.triangle(logits.shape[-1]) & visible[..., None, :]
    # No gradient needs to pass through the maximum: the shares do not depend on it.
    columns = jax.lax.stop_gradient(logits)[..., None, :]
    largest = jnp.where(seen, columns, lowest).max(-1)
    excess = logits[..., None, :] - largest[..., None]
    within = largest, chunks.decayed(excess, seen).sum(-1)
    ends = (
        jnp.concatenate([first[..., None], x[..., -1]], 2)
        for first, x in zip((start.largest, start.total), within, strict=True)
    )
    largest, total = jax.lax.associative_scan(_merged, tuple(ends), axis=2)
    before = largest[:, :, :-1, None], total[:, :, :-1, None]
    highest, sums = _merged(before, within)
    shares = chunks.decayed(logits - highest, visible) / _divisor(sums)
    return shares, largest[..., -1], total[..., -1]


def _merged(
    one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    largest = jnp.maximum(one[0], two[0])
    first, second = (total * jnp.exp(own - largest) for own, total in (one, two))
    return largest, first + second


def causal_flow(
    features: tuple[jax.Array, jax.Array],
    value: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    options: Options,
    *,
    state: FlowState | None = None,
    chunking: chunks.Chunking | None = None,
    as_terms: bool = False,
) -> tuple[Any, FlowState]:
    """Runs causal Flow-Attention, heads first.

    Args:
      features: phi(q) and phi(k), `[B, N, T, M]`, zero where hidden.
      value: `[B, N, T, Hv]`.
      mask: the real sources, `[B, T]`; None = all.
      query_mask: the real sinks, `[B, T]`; None = all.
      options: clip, eps, precision; the competition is always over the sources.
      state: what came before; None = nothing.
      chunking: how the sequence is cut.
      as_terms: return the `FlowTerms` in place of the output.

    Returns:
      The output `[B, N, T, Hv]`, or the terms `[B, N, T]`, and the state after.

    Raises:
      ValueError: the state does not fit, or the competition runs over the heads.
    """
    if options.competition_axis != "source":
        raise ValueError(
            "competition_axis: expected 'source' in the causal form, whose competition "
            f"is among the earlier sources, got {options.competition_axis!r}"
        )
    query, key = features
    batch, _, length, _ = query.shape
    plan = (chunking or chunks.Chunking()).plan(length)
    start, before = _nothing(query, key, value), (None, None)
    if state is not None:
        start = shapes.checked_state(state.sums, start)
        before = (state.sinks, state.sources)
    sinks, sources = (
        _counts(real, count, length)
        for real, count in zip((query_mask, mask), before, strict=True)
    )
    visible = jnp.ones((1, 1, length), bool) if mask is None else mask[:, None]
    block = FlowBlock(plan, options, as_terms)
    tables = _Tables(sinks.astype(query.dtype), sources.astype(query.dtype), visible)
    out, sums = chunks.run(block, start, _Arrays(query, key, value), tables)
    ends = (jnp.broadcast_to(counts[:, 0, -1], (batch,)) for counts in (sources, sinks))
    return out, FlowState(sums, *ends)


def _counts(mask: jax.Array | None, before: jax.Array | None, length: int) -> jax.Array:
    """Real positions up to each one, `[1 or B, 1, T]` int32."""
    if mask is None:
        counts = jnp.asarray(np.arange(1, length + 1)[None], jnp.int32)
    else:
        counts = jnp.cumsum(mask.astype(jnp.int32), 1)
    if before is not None:
        counts = counts + before[:, None]
    return counts[:, None]


def _nothing(query: jax.Array, key: jax.Array, value: jax.Array) -> FlowSums:
    # Zeros of a first update and not of a shape, as in `causal.causal_linear`.
    sums = jnp.zeros_like(query[:, :, 0] * key[:, :, 0])
    summary = jnp.zeros_like(sums[..., None] * value[:, :, :1])
    total = sums[..., 0]
    largest = total + jnp.asarray(jnp.finfo(total.dtype).min, total.dtype)
    return FlowSums(sums, sums, sums, sums, largest, total, summary)


def no_flow(
    batch: int, heads: int, width: int, value_dim: int, dtype: jnp.dtype
) -> FlowState:
    """The state before the first position; ``width`` is M."""
    one = jnp.zeros((batch, heads, 1, width), dtype)
    count = jnp.zeros((batch,), jnp.int32)
    sums = _nothing(one, one, jnp.zeros((batch, heads, 1, value_dim), dtype))
    return FlowState(sums, count, count)
