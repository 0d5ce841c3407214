"""One super-block of causal Flow-Attention.

What it computes: `lra_jax.attention.flow.causal_form`; how a sequence is cut:
`lra_jax.attention.causal.chunks`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention.causal import chunks, raw
from lra_jax.attention.flow.gradient import pull
from lra_jax.attention.flow.parts import (
    FlowTerms,
    Options,
    allocated,
    clipped,
    compete,
    divisor,
    opened,
    so_far,
    without_competition,
)


class FlowSums(NamedTuple):
    """The past of a position; float32 or float64."""

    keys: jax.Array  # sum of phi(k), [B, N, M]
    queries: jax.Array  # sum of phi(q), [B, N, M]
    key_flow: jax.Array  # sum of phi(k) n / O, [B, N, M]
    query_flow: jax.Array  # sum of phi(q) n / I, [B, N, M]
    largest: jax.Array  # O' at its largest, or 0 with a small clip, [B, N]
    total: jax.Array  # sum of exp(O' - largest), [B, N]
    summary: jax.Array  # sum of phi(k) c v^T, [B, N, M, Hv]


class Tables(NamedTuple):
    """`[1 or B, T]`; real sinks and sources up to each position."""

    sinks: jax.Array
    sources: jax.Array
    visible: jax.Array  # which sources are real


class Flows(NamedTuple):
    """A super-block's flows, and the sums that each of its chunks finds before it."""

    earlier: jax.Array  # phi(q_i) . phi(k_j) for j <= i, else 0, [B, N, P, C, C]
    later: jax.Array  # for i <= j
    incoming: jax.Array  # I, [B, N, P, C], as are the next five
    outgoing: jax.Array  # O
    conserved_sink: jax.Array  # I'
    conserved_source: jax.Array  # O'
    of_keys: jax.Array  # n / O
    of_queries: jax.Array  # n / I
    keys: jax.Array  # [B, N, P, M], as are the next three
    queries: jax.Array
    key_flow: jax.Array
    query_flow: jax.Array


@dataclass(frozen=True)
class FlowBlock(chunks.Block):
    """One super-block of causal Flow-Attention.

    Attributes:
      plan: how it is cut.
      options: clip, eps and precision.
      as_terms: return the `FlowTerms`, heads first, in place of the output.
    """

    plan: chunks.Plan
    options: Options
    as_terms: bool = False
    axis: int = 2

    def __call__(
        self, start: FlowSums, arrays: tuple[jax.Array, ...], tables: Tables
    ) -> tuple[Any, FlowSums]:
        query, key, value = self.plan.split(arrays)
        sinks, sources, visible = self.plan.split(tables)
        # Appended positions have counts of 0.
        sinks, sources = jnp.maximum(sinks, 1), jnp.maximum(sources, 1)
        flows, sums = self.flows(start, query, key, sinks, sources)
        competition, largest, total = self.compete(
            flows.conserved_source, visible, sources, start.largest, start.total
        )
        allocation = allocated(flows.conserved_sink, self.options)
        sums = sums._replace(largest=largest, total=total)
        if self.as_terms:
            terms = FlowTerms(*flows[2:6], competition, allocation)
            return self.plan.join(terms), sums
        value = value * competition[..., None]
        updates = self.product("bnpjm,bnpjv->bnpmv", key, value)
        before, summary = chunks.prefix(self.plan, start.summary, updates)
        out = self.product("bnpij,bnpjv->bnpiv", flows.earlier, value)
        out += self.product("bnpim,bnpmv->bnpiv", query, before)
        outputs = self.plan.join((out, allocation / divisor(flows.incoming)))
        return outputs, sums._replace(summary=summary)

    def scaled_pullback(
        self,
        state: FlowSums,
        arrays: tuple[jax.Array, ...],
        tables: Tables,
        outputs: jax.Array,
        cotangents: Any,
        scale: Callable[[jax.Array], jax.Array],
    ) -> tuple[FlowSums, tuple[jax.Array, ...]]:
        """Written out in `lra_jax.attention.flow.gradient` where the clip is small."""
        given = state, arrays, tables, outputs, cotangents
        if scale is not raw.identity or not self.options.sums_as_is:
            return super().scaled_pullback(*given, scale)
        return pull(self, *given)

    def flows(
        self,
        start: FlowSums,
        query: jax.Array,
        key: jax.Array,
        sinks: jax.Array,
        sources: jax.Array,
    ) -> tuple[Flows, FlowSums]:
        """The flows, and their sums after the block."""
        scores = self.product("bnpim,bnpjm->bnpij", query, key)
        visible = chunks.triangle(self.plan.chunk)
        earlier = _hidden(scores, visible)
        later = _hidden(scores, np.swapaxes(visible, -1, -2))
        sides = key.sum(-1), query.sum(-1)
        (keys, queries), after = chunks.prefix(
            self.plan, (start.keys, start.queries), (key.sum(3), query.sum(3))
        )
        ones = jnp.ones(scores.shape[-1], scores.dtype)
        near = (
            self.product("bnpij,j->bnpi", earlier, ones),
            self.product("bnpij,i->bnpj", later, ones),
        )
        incoming = self._inner(near[0], sides[0], query, keys)
        outgoing = self._inner(near[1], sides[1], key, queries)
        of_keys, of_queries = sinks / divisor(outgoing), sources / divisor(incoming)
        updates = (
            self.product("bnpjm,bnpj->bnpm", key, of_keys),
            self.product("bnpjm,bnpj->bnpm", query, of_queries),
        )
        (key_flow, query_flow), after_flows = chunks.prefix(
            self.plan, (start.key_flow, start.query_flow), updates
        )
        near = (
            self.product("bnpij,bnpj->bnpi", earlier, of_keys),
            self.product("bnpij,bnpi->bnpj", later, of_queries),
        )
        conserved = (
            self._inner(near[0], sides[0] * of_keys, query, key_flow) / sources,
            self._inner(near[1], sides[1] * of_queries, key, query_flow) / sinks,
        )
        before = keys, queries, key_flow, query_flow
        of_both = of_keys, of_queries
        flows = Flows(earlier, later, incoming, outgoing, *conserved, *of_both, *before)
        sums = dict(zip(("keys", "queries"), after, strict=True))
        sums |= dict(zip(("key_flow", "query_flow"), after_flows, strict=True))
        return flows, start._replace(**sums)

    def _inner(
        self, near: jax.Array, others: jax.Array, features: jax.Array, before: jax.Array
    ) -> jax.Array:
        """``(features_i + eps) . (sum_{j <= i} weights_j others_j + eps)``.

        Args:
          near: ``sum_j features_i . weights_j others_j`` within the chunk.
          others: weights_j times the sum of the features others_j.
          features: of position i.
          before: the sum before the chunk.
        """
        far = self.product("bnpim,bnpm->bnpi", features, before)
        eps, width = self.options.eps, features.shape[-1]
        constant = before.sum(-1)[..., None] + features.sum(-1) + width * eps
        return near + far + eps * (constant + so_far(others)) + self.options.extra_eps

    def compete(
        self,
        conserved_source: jax.Array,
        visible: jax.Array,
        sources: jax.Array,
        largest: jax.Array,
        total: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """c `[B, N, P, C]`, and the largest logit and the total after."""
        if not self.options.competition:
            return without_competition(conserved_source, visible), largest, total
        logits = clipped(conserved_source, self.options.clip)
        if not self.options.sums_as_is:
            shares, largest, total = compete(logits, visible, largest, total)
            return shares * sources, largest, total
        weights = chunks.decayed(logits, visible)
        before, total = chunks.prefix(
            self.plan, opened(largest, total), weights.sum(-1)
        )
        sums = before[..., None] + so_far(weights)
        return weights / divisor(sums) * sources, jnp.zeros_like(total), total

    def product(self, terms: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(terms, *arrays, precision=self.options.precision)


def _hidden(pairs: jax.Array, visible: np.ndarray) -> jax.Array:
    return jnp.where(visible, pairs, jnp.zeros((), pairs.dtype))
