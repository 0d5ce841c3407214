"""Causal softmax features: exact for every norm, and blind to the future.

``out_i`` needs ``sum_{j <= i} sum_r exp(a_ir + g_jr)``, with the exponents a of the
queries and g of the keys. As a product of two factors, exp(a_ir + c_r) exp(g_jr - c_r),
it needs a reference c_r. One over all keys would let a large later key round the
earlier ones to zero. So the keys before a position are taken in groups that lie
entirely in its past, each with its own reference:

- all chunks before its own, as one running sum whose reference is a running maximum;
- within the chunk the left halves of 8, 16, 32, ... positions in whose right half it
  stands;
- its own group of 4, pair by pair.

A group gives a numerator, a denominator and the exponent that both lack; they are added
up as in a softmax computed by blocks. Every factor is at most 1, every denominator at
least 1, and no later key enters any of them: outputs do not change to the last bit.

The projection to M features happens inside a super-block, so that no array of the size
T x M is ever kept. See `lra_jax.attention.causal.chunks` for the loop and its gradient.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs
from lra_jax.attention.causal import chunks
from lra_jax.attention.linear.random_features import (
    half_square,
    lifted,
    lowest,
    nonzero,
)

# Positions computed pair by pair.
_GROUP = 4


class PerformerSums(NamedTuple):
    """The past of a position; float32 or float64.

    With softmax features both sums are in units of ``exp(peak)``.
    """

    summary: jax.Array  # sum of phi(k_j) v_j^T, [B, N, M, Hv]
    total: jax.Array  # sum of phi(k_j), [B, N, M]
    peak: jax.Array  # largest exponent of each feature so far, [B, N, M]


class _Carry(NamedTuple):
    sums: PerformerSums
    # Constant; carried because only carries and arrays have gradients. A copy for each
    # head, [B, N, M, H], so that it is sharded as they are.
    matrix: jax.Array


class _Arrays(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array


class _Part(NamedTuple):
    """What one group of keys gives to the positions of each chunk."""

    peak: jax.Array  # [B, N, P, C]
    numerator: jax.Array  # in units of exp(peak), [B, N, P, C, Hv]
    denominator: jax.Array  # likewise, [B, N, P, C]


@dataclasses.dataclass(frozen=True)
class SoftmaxFeaturesBlock(chunks.Block):
    """One super-block; the chunks of its plan are powers of two."""

    plan: chunks.Plan
    precision: jax.lax.PrecisionLike
    axis: int = 2

    def __call__(
        self, start: _Carry, arrays: _Arrays, visible: jax.Array
    ) -> tuple[jax.Array, _Carry]:
        query, key, value = self.plan.split(arrays)
        visible = self.plan.split(visible)
        rows, columns = (
            self._product("bnpih,bnmh->bnpim", x, start.matrix) for x in (query, key)
        )
        columns = columns - half_square(key)
        columns = jnp.where(visible[..., None], columns, lowest(columns.dtype))
        far, after = self._far(start.sums, rows, columns, value, visible)
        parts = [far, self._nearest(rows, columns, value, visible)]
        parts += self._halves(rows, columns, value, visible)
        out = self.plan.join(_added_up(parts))
        return out, _Carry(after, start.matrix)

    def _far(
        self,
        start: PerformerSums,
        rows: jax.Array,
        columns: jax.Array,
        value: jax.Array,
        visible: jax.Array,
    ) -> tuple[_Part, PerformerSums]:
        """The keys before each chunk, and the sums after the last."""
        tops = columns.max(3)
        tops = jnp.concatenate([start.peak[:, :, None], tops], 2)
        tops = jax.lax.cummax(jax.lax.stop_gradient(tops), 2)
        before, after = tops[:, :, :-1], tops[:, :, 1:]
        keys = chunks.decayed(columns - after[:, :, :, None], visible[..., None])
        updates = self._product("bnpjm,bnpjv->bnpmv", keys, value), keys.sum(3)
        # Before the first visible key there is nothing to shrink.
        decay = jnp.where(before > lowest(before.dtype), before - after, 0)
        past = (start.summary, start.total)
        (summary, total), sums = chunks.prefix(self.plan, past, updates, decay)
        queries, peak = lifted(rows, before[:, :, :, None])
        part = _Part(
            peak,
            self._product("bnpim,bnpmv->bnpiv", queries, summary),
            self._product("bnpim,bnpm->bnpi", queries, total),
        )
        return part, PerformerSums(sums[0], sums[1], after[:, :, -1])

    def _nearest(
        self, rows: jax.Array, columns: jax.Array, value: jax.Array, visible: jax.Array
    ) -> _Part:
        """The keys of each position's own group, pair by pair."""
        size = min(_GROUP, self.plan.chunk)
        rows, columns, value, visible = (
            _grouped(x, size) for x in (rows, columns, value, visible)
        )
        exponents = rows[..., :, None, :] + columns[..., None, :, :]
        seen = chunks.triangle(size)[None] & visible[..., None, :]
        highest = jnp.where(seen[..., None], exponents, lowest(rows.dtype))
        peak = jax.lax.stop_gradient(highest.max((-1, -2)))
        exponents = exponents - peak[..., None, None]
        scores = chunks.decayed(exponents, seen[..., None]).sum(-1)
        numerator = self._product("bnpgij,bnpgjv->bnpgiv", scores, value)
        part = _Part(peak, numerator, scores.sum(-1))
        return _Part(*(x.reshape(*x.shape[:3], -1, *x.shape[5:]) for x in part))

    def _halves(
        self, rows: jax.Array, columns: jax.Array, value: jax.Array, visible: jax.Array
    ) -> Iterator[_Part]:
        """For each size the keys of the left halves, for the right halves."""
        size = _GROUP
        while size < self.plan.chunk:
            keys, values, seen = (
                _grouped(x, 2 * size)[:, :, :, :, :size]
                for x in (columns, value, visible)
            )
            top = jax.lax.stop_gradient(keys.max(4, keepdims=True))
            keys = chunks.decayed(keys - top, seen[..., None])
            queries, peak = lifted(_grouped(rows, 2 * size)[:, :, :, :, size:], top)
            scores = self._product("bnpgim,bnpgjm->bnpgij", queries, keys)
            numerator = self._product("bnpgij,bnpgjv->bnpgiv", scores, values)
            floor = jnp.full_like(peak, lowest(peak.dtype))
            yield _Part(
                _right_half(peak, floor),
                _right_half(numerator, jnp.zeros_like(numerator)),
                _right_half(scores.sum(-1), jnp.zeros_like(peak)),
            )
            size *= 2

    def _product(self, terms: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(terms, *arrays, precision=self.precision)


def _grouped(x: jax.Array, size: int) -> jax.Array:
    """`[B, N, P, C, ...]` -> `[B, N, P, C / size, size, ...]`."""
    return x.reshape(*x.shape[:3], -1, size, *x.shape[4:])


def _right_half(x: jax.Array, left: jax.Array) -> jax.Array:
    """Twice `[B, N, P, G, size, ...]` -> `[B, N, P, C, ...]`."""
    both = jnp.stack([left, x], 4)
    return both.reshape(*x.shape[:3], -1, *x.shape[5:])


def _added_up(parts: list[_Part]) -> jax.Array:
    peak = functools.reduce(jnp.maximum, [part.peak for part in parts])
    # The references have no gradient: the quotient does not depend on them.
    weights = [jnp.exp(part.peak - peak) for part in parts]
    pairs = list(zip(parts, weights, strict=True))
    numerator = sum(part.numerator * weight[..., None] for part, weight in pairs)
    denominator = sum(part.denominator * weight for part, weight in pairs)
    return numerator / nonzero(jnp.asarray(denominator))[..., None]


def causal_softmax_features(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    matrix: jax.Array,
    mask: jax.Array | None,
    *,
    start: PerformerSums | None = None,
    chunking: chunks.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, PerformerSums]:
    """Causal attention with softmax features, heads first.

    Args:
      query: `[B, N, T, H]`, scaled.
      key: `[B, N, T, H]`, scaled.
      value: `[B, N, T, Hv]`.
      matrix: W, `[M, H]`.
      mask: the visible keys, boolean `[B, T]`; None = all.
      start: the sums before the first position; None = nothing came before.
      chunking: how the sequence is cut; chunks are rounded up to powers of two.
      precision: of the matrix products.

    Returns:
      The output `[B, N, T, Hv]`, and the sums after the last position.

    Raises:
      ValueError: the start does not fit.
    """
    batch, heads, length = query.shape[:3]
    chunking = chunking or chunks.Chunking()
    chunk = 1 << (min(chunking.chunk, length) - 1).bit_length()
    chunking = dataclasses.replace(chunking, chunk=chunk)
    plan = chunking.plan(max(length, chunk), batch * heads)
    # The query's zeros give it its sharding.
    matrix = matrix[None, None] + jnp.zeros_like(query[:, :, :1, :1])
    empty = _nothing(query, key, value, matrix)
    sums = empty if start is None else inputs.checked_state(start, empty)
    visible = jnp.ones((1, 1, length), bool) if mask is None else mask[:, None]
    block = SoftmaxFeaturesBlock(plan, precision)
    arrays = _Arrays(query, key, value)
    out, carry = chunks.run(block, _Carry(sums, matrix), arrays, visible)
    return out, carry.sums


def _nothing(
    query: jax.Array, key: jax.Array, value: jax.Array, matrix: jax.Array
) -> PerformerSums:
    # Zeros of a first update and not of a shape, as in `causal.causal_linear`.
    total = jnp.zeros_like(matrix[..., 0] * query[:, :, 0, :1] * key[:, :, 0, :1])
    summary = jnp.zeros_like(total[..., None] * value[:, :, :1])
    return PerformerSums(summary, total, total + lowest(total.dtype))
