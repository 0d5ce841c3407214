"""Softmax attention in blocks: the full matrix of weights is never formed.

Queries and keys are cut into blocks, and one loop runs over pairs of blocks. In the
forward pass each query block carries the largest score so far, the sum of
``exp(score - largest)``, and the sum of the values weighted by these; when a larger
score appears, both sums are rescaled (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"). The backward pass recomputes the weights from the largest
score and the sum (Dao et al. 2022, "FlashAttention", from the sum's logarithm, which
rounds more): the loop keeps the inputs, the output and two numbers per query.

Cost: O(T S (H + Hv)) time like the dense form, and half of it if causal, since pairs of
blocks in the future are never visited; O((T + S) (H + Hv)) memory.

Gradients of gradients work, with the memory of the dense form; forward-mode derivatives
(``jax.jvp``) do not.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps, inputs, masking, packed
from lra_jax.attention.softmax import key_sets


class Visible(NamedTuple):
    """Which keys a query sees; these arrays have no gradient.

    Attributes:
      pairs: boolean, rank 4, broadcastable to `[B, N, T, S]`; None = all.
      last: index of the last key that each query sees, `[1 or B, T]`; None = S - 1.
      document: the number of each position's document, from 1, or 0 for padding,
        `[B, T]`, with T == S: a query sees only its own document; None = there is one.
    """

    pairs: jax.Array | None
    last: jax.Array | None = None
    document: jax.Array | None = None


@dataclass(frozen=True)
class Plan:
    """How the matrix of scores is cut into blocks."""

    size: int  # positions of a block
    queries: int  # T
    keys: int  # S
    is_causal: bool  # no query sees a later key; T == S
    scale: float  # factor of the scores
    precision: jax.lax.PrecisionLike

    def pairs(self) -> jax.Array:
        """The pairs of blocks to visit, `[count, 2]` int32, row by row."""
        blocks = [-(-length // self.size) for length in (self.queries, self.keys)]
        every = np.ones(blocks, bool)
        seen = np.tril(every) if self.is_causal else every
        return jnp.asarray(np.argwhere(seen), jnp.int32)

    def product(self, terms: str, *arrays: jax.Array) -> jax.Array:
        """``jnp.einsum`` with the precision of the call."""
        return jnp.einsum(terms, *arrays, precision=self.precision)

    def cut(self, x: jax.Array) -> jax.Array:
        """`[B, N, T, H]` -> `[rows, B, N, size, H]`, padded with zeros."""
        return jnp.moveaxis(key_sets.cut(x, self.size), 2, 0)

    def paste(self, x: jax.Array, length: int) -> jax.Array:
        """The inverse of `cut`."""
        x = jnp.moveaxis(x, 0, 2)
        return x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :length]


class _Rows(NamedTuple):
    """The running results of all queries, in blocks: `[rows, B, N, size, ...]`."""

    largest: jax.Array  # [..., 1]
    total: jax.Array  # sum of exp(score - largest), [..., 1]
    out: jax.Array  # sum of exp(score - largest) v, [..., Hv]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visible,
    is_causal: bool = False,
    *,
    block: int,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """``softmax(q k^T / sqrt(H)) v``, heads first, in blocks of ``block`` positions.

    Args:
      query, key, value: `[B, N, T, H]`, `[B, N, S, H]`, `[B, N, S, Hv]`.
      visible: which keys a query sees, in addition to `is_causal`.
      is_causal: position i sees keys 0..i only; T == S.
      block, precision: as in `softmax_attention`.

    Returns:
      `[B, N, T, Hv]`, float32 or wider; zero for queries that see nothing.
    """
    length, keys = query.shape[2], key.shape[2]
    size = min(block, max(length, keys))
    scale = 1 / math.sqrt(query.shape[-1])
    plan = Plan(size, length, keys, is_causal, scale, precision)
    cuts = (plan.cut(x) for x in (query, key, value))
    return plan.paste(_attend(plan, *cuts, _fill_blocks(plan, visible)), length)


def _fill_blocks(plan: Plan, visible: Visible) -> Visible:
    """Masks over whole blocks; padding appended to the keys is hidden."""
    pairs, last, document = visible
    if plan.is_causal:
        # Hides the appended padding as well: T == S.
        causal = jnp.asarray(np.arange(plan.queries, dtype=np.int32)[None])
        last = causal if last is None else jnp.minimum(last, causal)
    elif last is None and plan.keys % plan.size:
        last = jnp.full((1, plan.queries), plan.keys - 1, jnp.int32)
    missing = -plan.queries % plan.size
    if last is not None:
        last = jnp.pad(last, [(0, 0), (0, missing)], constant_values=-1)
    if pairs is not None:
        ends = [(0, -x % plan.size if x > 1 else 0) for x in pairs.shape[2:]]
        pairs = jnp.pad(pairs, [(0, 0), (0, 0), *ends])
    if document is not None:
        document = jnp.pad(document, [(0, 0), (0, missing)])
    return Visible(pairs, last, document)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible
) -> jax.Array:
    return _forward(plan, query, key, value, visible)[0]


def _forward(
    plan: Plan, query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible
) -> tuple[jax.Array, tuple]:
    dtype = inputs.accumulation_dtype(query, key, value)

    def step(rows: _Rows, pair: jax.Array) -> tuple[_Rows, None]:
        i, j = pair[0], pair[1]
        scores = _scores(plan, _at(query, i), _at(key, j), visible, pair, dtype)
        before = jax.tree.map(lambda x: _at(x, i), rows)
        # Without a gradient, because the results do not depend on it.
        top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
        largest = jnp.maximum(before.largest, top)
        weights = jnp.exp(feature_maps.below(scores, largest))
        shrunk = jnp.exp(feature_maps.below(before.largest, largest))
        out = plan.product("bnij,bnjv->bniv", weights, _at(value, j).astype(dtype))
        after = _Rows(
            largest,
            before.total * shrunk + weights.sum(-1, keepdims=True),
            before.out * shrunk + out,
        )
        return jax.tree.map(lambda x, new: _put(x, new, i), rows, after), None

    rows, _ = jax.lax.scan(step, _nothing(query, key, value, dtype), plan.pairs())
    # The largest visible weight is 1, so a total of 0 means that there is none.
    total = jnp.where(rows.total > 0, rows.total, 1)
    out = rows.out / total
    # Kept apart: for large scores their logarithm would be rounded away in a sum.
    return out, (query, key, value, visible, out, rows.largest, total)


def _backward(plan: Plan, kept: tuple, cotangent: jax.Array) -> tuple:
    query, key, value, visible, out, largest, total = kept
    dtype = out.dtype
    # sum_j weight_ij (dout_i . v_j), for all j at once.
    mean = (out * cotangent).sum(-1, keepdims=True)

    def step(slopes: tuple, pair: jax.Array) -> tuple[tuple, None]:
        i, j = pair[0], pair[1]
        q, k, v = (x.astype(dtype) for x in (_at(query, i), _at(key, j), _at(value, j)))
        of_out = _at(cotangent, i)
        scores = _scores(plan, q, k, visible, pair, dtype)
        weights = jnp.exp(feature_maps.below(scores, _at(largest, i))) / _at(total, i)
        of_weights = plan.product("bniv,bnjv->bnij", of_out, v)
        of_scores = weights * (of_weights - _at(mean, i)) * plan.scale
        added = (
            (plan.product("bnij,bnjh->bnih", of_scores, k), i),
            (plan.product("bnij,bnih->bnjh", of_scores, q), j),
            (plan.product("bnij,bniv->bnjv", weights, of_out), j),
        )
        slopes = tuple(
            _put(x, _at(x, place) + new, place)
            for x, (new, place) in zip(slopes, added, strict=True)
        )
        return slopes, None

    start = tuple(jnp.zeros_like(x, dtype) for x in (query, key, value))
    slopes, _ = jax.lax.scan(step, start, plan.pairs())
    arrays = query, key, value
    return *(x.astype(y.dtype) for x, y in zip(slopes, arrays, strict=True)), None


_attend.defvjp(_forward, _backward)


def _nothing(
    query: jax.Array, key: jax.Array, value: jax.Array, dtype: jnp.dtype
) -> _Rows:
    # Zeros derived from a first update, not from a shape: the loop's carry then has the
    # same sharding and varying axes as the values added to it.
    others = (key[0, :, :, :1, :1], value[0, :, :, :1])
    first, second = (jnp.zeros_like(x, dtype)[None] for x in others)
    total = jnp.zeros_like(query[..., :1], dtype) + first
    # The exponential of a hidden score is 0 even relative to this first maximum.
    lowest = jnp.asarray(_hidden_score(dtype) / 2, dtype)
    return _Rows(total + lowest, total, total + second)


def _hidden_score(dtype: jnp.dtype) -> float:
    """The score of a hidden pair."""
    return float(jnp.finfo(dtype).min)


def _scores(
    plan: Plan,
    query: jax.Array,
    key: jax.Array,
    visible: Visible,
    pair: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
    """The scores of a pair of blocks; those of hidden pairs are `_hidden_score`."""
    terms = "bnih,bnjh->bnij"
    scores = plan.product(terms, query.astype(dtype), key.astype(dtype)) * plan.scale
    starts = pair[0] * plan.size, pair[1] * plan.size
    seen = None
    if visible.last is not None:
        last = jax.lax.dynamic_slice_in_dim(visible.last, starts[0], plan.size, 1)
        columns = starts[1] + np.arange(plan.size, dtype=np.int32)
        seen = columns[None, None, None] <= last[:, None, :, None]
    if visible.pairs is not None:
        pairs: Any = visible.pairs
        for axis, start in zip((2, 3), starts, strict=True):
            if pairs.shape[axis] > 1:
                pairs = jax.lax.dynamic_slice_in_dim(pairs, start, plan.size, axis)
        seen = masking.both(seen, pairs)
    if visible.document is not None:
        rows, columns = (
            jax.lax.dynamic_slice_in_dim(visible.document, start, plan.size, 1)
            for start in starts
        )
        seen = masking.both(seen, packed.share(rows, columns))
    if seen is None:
        return scores
    return jnp.where(seen, scores, jnp.asarray(_hidden_score(dtype), dtype))


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def _put(x: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, new, index, 0)
