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
    clipped,
    compete,
    divisor,
    so_far,
)


class FlowSums(NamedTuple):
    """The past of a position; float32 or float64."""

    keys: jax.Array  # sum of phi(k), [B, N, M]
    queries: jax.Array  # sum of phi(q), [B, N, M]
    key_flow: jax.Array  # sum of phi(k) n / O, [B, N, M]
    query_flow: jax.Array  # sum of phi(q) n / I, [B, N, M]
    largest: jax.Array  # O' at its largest, [B, N]
    total: jax.Array  # sum of exp(O' - largest), [B, N]
    summary: jax.Array  # sum of phi(k) c v^T, [B, N, M, Hv]


class Tables(NamedTuple):
    """`[1 or B, T]`; real sinks and sources up to each position."""

    sinks: jax.Array
    sources: jax.Array
    visible: jax.Array  # which sources are real


# Clips up to this leave room in exp for sums of any length.
_SMALL = 30.0


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
        logits = clipped(flows.conserved_source, self.options.clip)
        shares, largest, total = self._compete(logits, visible, start)
        competition = shares * sources
        allocation = jax.nn.sigmoid(flows.conserved_sink)
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
        if scale is not raw.identity or not self.small_clip:
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

    def _compete(
        self, logits: jax.Array, visible: jax.Array, start: FlowSums
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Each source's share among those up to it: `[B, N, P, C]`, and the state."""
        if not self.small_clip:
            return compete(logits, visible, start)
        weights, sums, total = self.weights(logits, visible, self.opening(*start[4:6]))
        return weights / divisor(sums), jnp.full_like(total, self._top), total

    @property
    def small_clip(self) -> bool:
        """No logit leaves [-clip, clip], and the clip can stand for the largest."""
        return self._top <= _SMALL

    @property
    def _top(self) -> float:
        clip = self.options.clip
        return np.inf if clip is None else clip

    def opening(self, largest: jax.Array, total: jax.Array) -> jax.Array:
        """The total of what came before, in units of the clip's exponential."""
        return total * jnp.exp(jnp.minimum(largest - self._top, 0))

    def weights(
        self, logits: jax.Array, visible: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The exponentials, their sums up to each position, and the one after all."""
        weights = chunks.decayed(logits - self._top, visible)
        before, total = chunks.prefix(self.plan, first, weights.sum(-1))
        return weights, before[..., None] + so_far(weights), total

    def product(self, terms: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(terms, *arrays, precision=self.options.precision)


def _hidden(pairs: jax.Array, visible: np.ndarray) -> jax.Array:
    return jnp.where(visible, pairs, jnp.zeros((), pairs.dtype))
