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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import chunks, raw
from lra_jax.attention.flow.block import FlowBlock, FlowSums, Tables
from lra_jax.attention.flow.parts import Options


class FlowState(NamedTuple):
    """Everything that the next position needs of the earlier ones."""

    sums: FlowSums
    sources: jax.Array  # real keys so far, [B] int32
    sinks: jax.Array  # real queries so far, [B] int32


def causal_flow(
    arrays: raw.Inputs,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    options: Options,
    feature_map: feature_maps.FeatureMap,
    *,
    state: FlowState | None = None,
    chunking: Any = None,
    as_terms: bool = False,
) -> tuple[Any, FlowState]:
    """Runs causal Flow-Attention on `[B, T, N, H]`, see `lra_jax.attention.causal.raw`.

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
    batch, length, heads = arrays.query.shape[:3]
    cut = chunks.Chunking()
    if chunking is not None:
        cut = chunks.Chunking(chunking.chunk, chunking.segment, chunking.implementation)
    plan = cut.plan(length, batch * heads)
    dtype, out_dtype = inputs.accumulation_dtype(*arrays), arrays.query.dtype
    dtype = dtype if state is None else state.sums.total.dtype
    masks = mask, query_mask
    arrays, phi = raw.given(arrays, masks, feature_map, dtype)
    start, before = _nothing(*raw.first(arrays, dtype)), (None, None)
    if state is not None:
        start = inputs.checked_state(state.sums, start)
        before = (state.sinks, state.sources)
    sinks, sources = (
        _counts(real, count, length)
        for real, count in zip((query_mask, mask), before, strict=True)
    )
    visible = jnp.ones((1, length), bool) if mask is None else mask
    tables = Tables(sinks.astype(dtype), sources.astype(dtype), visible)
    block = FlowBlock(plan, options, as_terms)
    if as_terms:
        features = feature_maps.features(*arrays[:2], phi, dtype, *masks)
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
