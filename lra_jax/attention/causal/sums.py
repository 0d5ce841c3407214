"""The one engine for causal linear attention: chunks inside super-blocks.

``out_i = phi(q_i)^T sum_{j <= i} w(i - j) phi(k_j) v_j^T``, with w = 1 (the Linear
Transformer), an exponential decay (retention, lightning attention) or the cosine of a
distance (cosFormer). How a sequence is cut and differentiated stands in
`lra_jax.attention.causal.chunks`.

Cost: O(T (C + M) (M + Hv)) time for chunks of C positions, O(T (M + Hv)) memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import raw
from lra_jax.attention.causal.chunks import Chunking, Plan, run
from lra_jax.attention.causal.linear_block import LinearBlock, Sums
from lra_jax.attention.causal.raw import Divided, bounded

__all__ = [
    "Chunking",
    "Divided",
    "LinearBlock",
    "Sums",
    "attend",
    "bounded",
    "causal_linear",
    "no_sums",
]


def no_sums(batch: int, heads: int, width: int, value_dim: int, dtype: Any) -> Sums:
    """The sums before the first position; ``width`` is M, doubled if re-weighted."""
    return Sums(
        jnp.zeros((batch, heads, width, value_dim), dtype),
        jnp.zeros((batch, heads, width), dtype),
    )


def sizes(query: jax.Array, value: jax.Array) -> Sums:
    """The sums' shapes for queries `[B, T, N, M]` and values `[B, T, N, Hv]`."""
    batch, _, heads, width = query.shape
    axes = (batch, heads, width, value.shape[-1])
    return jax.eval_shape(functools.partial(no_sums, *axes, jnp.float32))


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    feature_map: feature_maps.FeatureMap,
    finish: Divided,
    *,
    query_mask: jax.Array | None = None,
    angles: tuple[jax.Array, jax.Array] | None = None,
    turn: float | None = None,
    start: Sums | None = None,
    chunking: Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, Sums]:
    """Causal linear attention of `[B, T, N, H]`, see `lra_jax.attention.causal.raw`.

    Args:
      query: `[B, T, N, H]`; key and value with N heads or a divisor of it.
      key: `[B, T, N, H]`.
      value: `[B, T, N, Hv]`.
      mask: the real keys, `[B, T]`; None = all.
      feature_map: phi.
      finish: what to divide by.
      query_mask: the real queries, `[B, T]`; None = all. Other rows are zero.
      angles: cosine and sine of every position's angle, each `[1 or B, T]`: multiplies
        each weight by the cosine of the distance. The state is twice as large.
      turn: the angle between neighbouring positions, if it is one and known.
      start: the state before the first position; None = nothing came before. Its dtype
        is that of the sums.
      chunking: how the sequence is cut.
      precision: of the matrix products.

    Returns:
      The output `[B, T, N, Hv]` in the query's dtype, and the state after.

    Raises:
      ValueError: the start does not fit.
    """
    dtype = inputs.accumulation_dtype(query, key, value)
    dtype = dtype if start is None else start.total.dtype
    out_dtype, arrays = query.dtype, raw.Inputs(query, key, value)
    arrays, phi = raw.given(arrays, (mask, query_mask), feature_map, dtype)
    total, summary = raw.first(arrays, dtype)
    total = jnp.concatenate([total] * (1 if angles is None else 2), -1)
    empty = Sums(total[..., None] + summary[..., None, :], total)
    start = empty if start is None else inputs.checked_state(start, empty)
    batch, length, heads = query.shape[:3]
    plan = (chunking or Chunking()).plan(length, batch * heads)
    return raw.run(
        LinearBlock(plan, precision, turn),
        start,
        arrays,
        raw.Tables(mask, query_mask, angles),
        feature_map=phi,
        scale=finish,
        dtype=dtype,
        out_dtype=out_dtype,
    )


def causal_linear(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    slopes: jax.Array | None = None,
    ends: jax.Array | None = None,
    angles: tuple[jax.Array, jax.Array] | None = None,
    start: Sums | None = None,
    chunking: Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array, Sums]:
    """``sum_{j <= i} w(i, j) v_j`` and ``sum_{j <= i} w(i, j)``, heads first.

    ``w(i, j) = (q_i . k_j) exp(-slope (i - j))``, or with ``cos(angle_i - angle_j)``
    in place of the decay; both are optional.

    Args:
      query: features `[B, N, T, M]`, float32 or float64.
      key: features `[B, N, T, M]`, zero where hidden.
      value: `[B, N, T, Hv]`.
      slopes: `[N]`, not negative. The features' width M stays; the decay is made of
        differences within a chunk and of chunk-sized factors, which cannot overflow.
      ends: `[B]` integers, one past each sample's last real position: from there on
        nothing decays, so that the state is the one after that position; None = T.
      angles: cosine and sine of every position's angle, each `[1 or B, 1, T]`, without
        a gradient. The state has 2M features.
      start: the state before the first position; None = nothing came before.
      chunking: how the sequence is cut.
      precision: of the matrix products, as in ``jnp.einsum``.

    Returns:
      Numerators `[B, N, T, Hv]`, denominators `[B, N, T]`, and the state after the last
      position.

    Raises:
      ValueError: the start or the slopes do not fit.
    """
    batch, heads, length = query.shape[:3]
    plan = (chunking or Chunking()).plan(length, batch * heads)
    empty = _nothing(query, key, value, 1 if angles is None else 2)
    start = empty if start is None else inputs.checked_state(start, empty)
    arrays = query, key, value
    if slopes is not None:
        if jnp.shape(slopes) != query.shape[1:2]:
            raise ValueError(
                f"slopes: expected one for each head, [N]={query.shape[1:2]}, "
                f"got shape {jnp.shape(slopes)}"
            )
        arrays = (*arrays, _fade(plan, query, slopes, ends))
    block = LinearBlock(plan, precision)
    (numerator, denominator), state = run(block, start, arrays, angles)
    return numerator, denominator, state


def _nothing(query: jax.Array, key: jax.Array, value: jax.Array, times: int) -> Sums:
    # Zeros of a first update and not of a shape: a loop's carry then has the sharding
    # and the varying axes of what is added to it.
    first = jnp.concatenate([query[:, :, 0] * key[:, :, 0]] * times, 2)
    summary = first[..., None] * value[:, :, :1]
    return Sums(jnp.zeros_like(summary), jnp.zeros_like(first))


def _fade(
    plan: Plan, query: jax.Array, slopes: jax.Array, ends: jax.Array | None
) -> jax.Array:
    """Logarithm of the decay since each position's chunk began, `[B, N, padded T]`.

    Positions from ``ends`` on, and those appended to fill the plan, do not decay, so
    that the state after the last chunk is the state after the last real position.
    """
    size = plan.blocks * plan.chunks * plan.chunk
    places = np.arange(size, dtype=np.int32)[None]
    starts = places // plan.chunk * plan.chunk
    if ends is None:
        steps = np.minimum(places + 1, query.shape[2]) - starts
    else:
        steps = jnp.minimum(places + 1, ends[:, None]) - starts
    steps = jnp.asarray(jnp.maximum(steps, 0), query.dtype)[:, None]
    slopes = jnp.asarray(slopes, query.dtype)[None, :, None]
    # The zeros give it the query's sharding.
    return jnp.zeros_like(query[:, :, :1, 0]) - slopes * steps
