"""The one engine for causal linear attention: chunks inside super-blocks.

``out_i = phi(q_i)^T sum_{j <= i} w(i - j) phi(k_j) v_j^T``, with w = 1 (the Linear
Transformer), an exponential decay (retention, lightning attention) or the cosine of a
distance (cosFormer). How a sequence is cut and differentiated stands in
`lra_jax.attention.chunks`.

Cost: O(T (C + M) (M + Hv)) time for chunks of C positions, O(T (M + Hv)) memory.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import kernels, shapes
from lra_jax.attention.chunks import (
    Chunking,
    Plan,
    decayed,
    prefix,
    run,
    triangle,
)

__all__ = ["Chunking", "LinearBlock", "Sums", "causal_linear", "no_sums"]


class Sums(NamedTuple):
    """The past of a position in linear attention; float32 or float64."""

    summary: jax.Array  # sum of phi(k_j) v_j^T, [B, N, M, Hv]
    total: jax.Array  # sum of phi(k_j), [B, N, M]


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


class _Arrays(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    fade: jax.Array | None  # log of the decay since the chunk began, [B, N, T]


@dataclass(frozen=True)
class LinearBlock:
    """One super-block of linear attention, plain, with decay, or re-weighted."""

    plan: Plan
    precision: jax.lax.PrecisionLike

    def __call__(
        self, start: Sums, arrays: _Arrays, angles: tuple[jax.Array, jax.Array] | None
    ) -> tuple[tuple[jax.Array, jax.Array], Sums]:
        query, key, value, fade = self.plan.split(arrays)
        product = functools.partial(jnp.einsum, precision=self.precision)
        scores = product("bnpim,bnpjm->bnpij", query, key)
        visible = triangle(self.plan.chunk)
        decay = None
        if angles is not None:
            cos, sin = self.plan.split(angles)
            near = _outer(cos) + _outer(sin)  # cos(a - b)
            scores = scores * near
            query = kernels.rotated(query, cos, sin)
            key = kernels.rotated(key, cos, sin)
        if fade is not None:
            decay = fade[..., -1]
            scores = scores * decayed(fade[..., None] - fade[..., None, :], visible)
            query = query * jnp.exp(fade)[..., None]
            key = key * jnp.exp(decay[..., None] - fade)[..., None]
        scores = jnp.where(visible, scores, jnp.zeros((), scores.dtype))
        updates = Sums(product("bnpjm,bnpjv->bnpmv", key, value), key.sum(3))
        before, after = prefix(self.plan, start, updates, decay)
        numerator = product("bnpij,bnpjv->bnpiv", scores, value)
        numerator += product("bnpim,bnpmv->bnpiv", query, before.summary)
        denominator = scores.sum(-1)
        denominator += product("bnpim,bnpm->bnpi", query, before.total)
        return self.plan.join((numerator, denominator)), after


def _outer(x: jax.Array) -> jax.Array:
    return x[..., :, None] * x[..., None, :]


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

    ``w(i, j) = (q_i . k_j) exp(-slope (i - j)) cos(angle_i - angle_j)``; the decay
    (retention, lightning attention) and the cosine (cosFormer) are optional.

    Args:
      query: features `[B, N, T, M]`, float32 or float64.
      key: features `[B, N, T, M]`, zero where hidden.
      value: `[B, N, T, Hv]`.
      slopes: `[N]`, not negative. The features' width M stays; the decay is made of
        differences within a chunk and of chunk-sized factors, which cannot overflow.
      ends: `[B]` integers, one past each sample's last real position: from there on
        nothing decays, so that the state is the one after that position; None = T.
      angles: cosine and sine of every position's angle, each `[1 or B, 1, T]`, without
        a gradient. Doubled features exist inside a super-block only; the state has 2M.
      start: the state before the first position; None = nothing came before.
      chunking: how the sequence is cut.
      precision: of the matrix products, as in ``jnp.einsum``.

    Returns:
      Numerators `[B, N, T, Hv]`, denominators `[B, N, T]`, and the state after the last
      position.

    Raises:
      ValueError: the start or the slopes do not fit.
    """
    plan = (chunking or Chunking()).plan(query.shape[2])
    empty = _nothing(query, key, value, 1 if angles is None else 2)
    start = empty if start is None else shapes.checked_state(start, empty)
    fade = None
    if slopes is not None:
        if jnp.shape(slopes) != query.shape[1:2]:
            raise ValueError(
                f"slopes: expected one for each head, [N]={query.shape[1:2]}, "
                f"got shape {jnp.shape(slopes)}"
            )
        fade = _fade(plan, query, slopes, ends)
    block = LinearBlock(plan, precision)
    arrays = _Arrays(query, key, value, fade)
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
