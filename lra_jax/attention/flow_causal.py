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

from lra_jax.attention import chunks, kernels, raw, shapes
from lra_jax.attention.flow_parts import FlowTerms, Options, clipped, compete, divisor


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


class _Tables(NamedTuple):
    """`[1 or B, T]`; real sinks and sources up to each position."""

    sinks: jax.Array
    sources: jax.Array
    visible: jax.Array  # which sources are real


# Clips up to this leave room in exp for sums of any length.
_SMALL = 30.0
_Four = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


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
        self, start: FlowSums, arrays: tuple[jax.Array, ...], tables: _Tables
    ) -> tuple[Any, FlowSums]:
        query, key, value = self.plan.split(arrays)
        sinks, sources, visible = self.plan.split(tables)
        # Appended positions have counts of 0.
        sinks, sources = jnp.maximum(sinks, 1), jnp.maximum(sources, 1)
        scores = self._product("bnpim,bnpjm->bnpij", query, key)
        earlier = _hidden(scores, chunks.triangle(self.plan.chunk))
        flows, sums = self._flows(start, query, key, scores, earlier, sinks, sources)
        incoming, _outgoing, conserved_sink, conserved_source = flows
        logits = clipped(conserved_source, self.options.clip)
        shares, largest, total = self._compete(logits, visible, start)
        competition = shares * sources
        allocation = jax.nn.sigmoid(conserved_sink)
        sums = sums._replace(largest=largest, total=total)
        if self.as_terms:
            return self.plan.join(FlowTerms(*flows, competition, allocation)), sums
        value = value * competition[..., None]
        updates = self._product("bnpjm,bnpjv->bnpmv", key, value)
        before, summary = chunks.prefix(self.plan, start.summary, updates)
        out = self._product("bnpij,bnpjv->bnpiv", earlier, value)
        out += self._product("bnpim,bnpmv->bnpiv", query, before)
        outputs = self.plan.join((out, allocation / divisor(incoming)))
        return outputs, sums._replace(summary=summary)

    def _flows(
        self,
        start: FlowSums,
        query: jax.Array,
        key: jax.Array,
        scores: jax.Array,
        earlier: jax.Array,
        sinks: jax.Array,
        sources: jax.Array,
    ) -> tuple[_Four, FlowSums]:
        """I, O, I' and O', in this order, and their sums after the block.

        ``scores`` are all pairs of a chunk, ``earlier`` its lower triangle.
        """
        later = _hidden(scores, np.swapaxes(chunks.triangle(self.plan.chunk), -1, -2))
        sides = key.sum(-1), query.sum(-1)
        (keys, queries), after = chunks.prefix(
            self.plan, (start.keys, start.queries), (key.sum(3), query.sum(3))
        )
        ones = jnp.ones(scores.shape[-1], scores.dtype)
        near = (
            self._product("bnpij,j->bnpi", earlier, ones),
            self._product("bnpij,i->bnpj", later, ones),
        )
        incoming = self._inner(near[0], sides[0], query, keys)
        outgoing = self._inner(near[1], sides[1], key, queries)
        of_keys, of_queries = sinks / divisor(outgoing), sources / divisor(incoming)
        updates = (
            self._product("bnpjm,bnpj->bnpm", key, of_keys),
            self._product("bnpjm,bnpj->bnpm", query, of_queries),
        )
        flows, after_flows = chunks.prefix(
            self.plan, (start.key_flow, start.query_flow), updates
        )
        near = (
            self._product("bnpij,bnpj->bnpi", earlier, of_keys),
            self._product("bnpij,bnpi->bnpj", later, of_queries),
        )
        conserved = (
            self._inner(near[0], sides[0] * of_keys, query, flows[0]) / sources,
            self._inner(near[1], sides[1] * of_queries, key, flows[1]) / sinks,
        )
        sums = dict(zip(("keys", "queries"), after, strict=True))
        sums |= dict(zip(("key_flow", "query_flow"), after_flows, strict=True))
        return (incoming, outgoing, *conserved), start._replace(**sums)

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
        far = self._product("bnpim,bnpm->bnpi", features, before)
        eps, width = self.options.eps, features.shape[-1]
        constant = before.sum(-1)[..., None] + features.sum(-1) + width * eps
        return near + far + eps * (constant + _so_far(others)) + self.options.extra_eps

    def _compete(
        self, logits: jax.Array, visible: jax.Array, start: FlowSums
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Each source's share among those up to it: `[B, N, P, C]`, and the state."""
        clip = self.options.clip
        if clip is None or clip > _SMALL:
            return compete(logits, visible, start)
        # No logit leaves [-clip, clip], so the clip can stand for the largest.
        top = jnp.full_like(start.largest, clip)
        first = start.total * jnp.exp(jnp.minimum(start.largest - top, 0))
        weights = chunks.decayed(logits - clip, visible)
        before, total = chunks.prefix(self.plan, first, weights.sum(-1))
        sums = before[..., None] + _so_far(weights)
        return weights / divisor(sums), top, total

    def _product(self, terms: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(terms, *arrays, precision=self.options.precision)


def _hidden(pairs: jax.Array, visible: np.ndarray) -> jax.Array:
    return jnp.where(visible, pairs, jnp.zeros((), pairs.dtype))


def _so_far(x: jax.Array) -> jax.Array:
    """Sums along a chunk up to each position, as a product: quicker than a scan."""
    earlier = jnp.asarray(np.tri(x.shape[-1]), x.dtype)
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum("bnpj,ij->bnpi", x, earlier, precision=highest)


def causal_flow(
    arrays: raw.Inputs,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    options: Options,
    feature_map: kernels.FeatureMap,
    *,
    state: FlowState | None = None,
    chunking: chunks.Chunking | None = None,
    as_terms: bool = False,
) -> tuple[Any, FlowState]:
    """Runs causal Flow-Attention on `[B, T, N, H]`, see `lra_jax.attention.raw`.

    Args:
      arrays: query, key and value.
      mask: the real sources, `[B, T]`; None = all.
      query_mask: the real sinks, `[B, T]`; None = all.
      options: clip, eps, precision; the competition is always over the sources.
      feature_map: phi.
      state: what came before; None = nothing.
      chunking: how the sequence is cut.
      as_terms: return the `FlowTerms` in place of the output.

    Returns:
      The output `[B, T, N, Hv]` in the query's dtype, or the terms `[B, N, T]`, and
      the state after.

    Raises:
      ValueError: the state does not fit, or the competition runs over the heads.
    """
    if options.competition_axis != "source":
        raise ValueError(
            "competition_axis: expected 'source' in the causal form, whose competition "
            f"is among the earlier sources, got {options.competition_axis!r}"
        )
    batch, length = arrays.query.shape[:2]
    plan = (chunking or chunks.Chunking()).plan(length)
    dtype, out_dtype = shapes.accumulation_dtype(*arrays), arrays.query.dtype
    dtype = dtype if state is None else state.sums.total.dtype
    masks = mask, query_mask
    arrays, phi = raw.given(arrays, masks, feature_map, dtype)
    start, before = _nothing(*raw.first(arrays, dtype)), (None, None)
    if state is not None:
        start = shapes.checked_state(state.sums, start)
        before = (state.sinks, state.sources)
    sinks, sources = (
        _counts(real, count, length)
        for real, count in zip((query_mask, mask), before, strict=True)
    )
    visible = jnp.ones((1, length), bool) if mask is None else mask
    tables = _Tables(sinks.astype(dtype), sources.astype(dtype), visible)
    block = FlowBlock(plan, options, as_terms)
    if as_terms:
        features = kernels.features(*arrays[:2], phi, dtype, *masks)
        tables = jax.tree.map(lambda x: x[:, None], tables)
        heads_first = (*features, features[1][..., :1])
        out, sums = chunks.run(
            block, start._replace(summary=start.summary[..., :1]), heads_first, tables
        )
    else:
        more: dict[str, Any] = {"dtype": dtype, "out_dtype": out_dtype}
        given = start, arrays, raw.Tables(mask, query_mask, tables)
        more |= {"feature_map": phi, "scale": raw.identity}
        out, sums = raw.run(block, *given, **more)
    ends = (jnp.broadcast_to(counts[:, -1], (batch,)) for counts in (sources, sinks))
    return out, FlowState(sums, *ends)


def _counts(mask: jax.Array | None, before: jax.Array | None, length: int) -> jax.Array:
    """Real positions up to each one, `[1 or B, T]` int32."""
    if mask is None:
        counts = jnp.asarray(np.arange(1, length + 1)[None], jnp.int32)
    else:
        counts = jnp.cumsum(mask.astype(jnp.int32), 1)
    if before is not None:
        counts = counts + before[:, None]
    return counts


def _nothing(sums: jax.Array, value: jax.Array) -> FlowSums:
    """The past of the first position; zeros like phi(k) and v of one position."""
    summary = sums[..., None] + value[..., None, :]
    total = sums[..., 0]
    largest = total + jnp.asarray(jnp.finfo(total.dtype).min, total.dtype)
    return FlowSums(sums, sums, sums, sums, largest, total, summary)


def no_flow(
    batch: int, heads: int, width: int, value_dim: int, dtype: jnp.dtype
) -> FlowState:
    """The state before the first position; ``width`` is M."""
    count = jnp.zeros((batch,), jnp.int32)
    one, value = (jnp.zeros((batch, heads, size), dtype) for size in (width, value_dim))
    return FlowState(_nothing(one, value), count, count)
