"""Exact softmax attention over the few keys that a pattern lets each query see.

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j`` with a set A(i) that
depends on positions alone: windows, global tokens, strides, random blocks. The sequence
is cut into P blocks of C positions. A pattern names, for the queries of each block, the
sets of keys that they may see (`softmax.key_sets`): gathered blocks, not an
n-by-n mask. `attend` forms the scores of every set, leaves out the pairs that the
pattern's rule excludes, and normalises over all sets together. Sets must not overlap: a
pair that two of them allow would count twice.

Cost: O(T K (H + Hv)) time and O(T K) memory for K gathered keys a query. The backward
pass keeps the inputs alone and gathers again: the mechanisms wrap their computation in
``jax.checkpoint``.

Positions count from 0 and are those of the padded batch, so padding on the right is
exact; hidden keys have the position -1 wherever they are gathered. Scores, softmax and
sums are float32 or wider, and a row that may see nothing is exactly zero.
"""

import functools
import math

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.softmax.key_sets import Keys, Sequence

# Of each layout: queries `[B, N, P, C, H]` times keys, and weights times values.
_PRODUCTS = {
    "block": ("bnpch,bnpkh->bnpck", "bnpck,bnpkv->bnpcv"),
    "shared": ("bnpch,bnkh->bnpck", "bnpck,bnkv->bnpcv"),
    "column": ("bnpch,bnkch->bnpck", "bnpck,bnkcv->bnpcv"),
}

# Positions of a block where a pattern leaves the choice: small enough that few gathered
# keys lie outside a query's window, large enough for the matrix products.
_SMALLEST, _LARGEST = 32, 64


def prepare(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    name: str,
) -> tuple[jax.Array, Sequence, jax.Array | None]:
    """Checks the inputs of a pattern and brings the heads to the front.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, N, H]`; its heads may be a divisor of N.
      value: `[B, T, N, Hv]`.
      mask: padding mask in any of its forms.
      is_causal: as everywhere.
      name: of the mechanism, for the messages.

    Returns:
      The query `[B, N, T, H]`, keys and values, and the mask `[B, T]` or None.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, or T and S differ.
    """
    inputs.check_inputs(query, key, value, is_causal)
    inputs.check_self(query, key, name)
    batch, length, num_heads, _ = query.shape
    mask = padding_mask(mask, batch, length, name)
    dtype = None
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        dtype = inputs.accumulation_dtype(query, key, value)
    position = jnp.arange(length, dtype=jnp.int32)[None]
    if mask is not None:
        position = jnp.where(mask, position, jnp.int32(-1))
    sequence = Sequence(
        inputs.by_head(key, num_heads, mask, dtype),
        inputs.by_head(value, num_heads, mask, dtype),
        position,
    )
    return inputs.by_head(query, num_heads, dtype=dtype), sequence, mask


def padding_mask(
    mask: jax.Array | None, batch: int, length: int, name: str
) -> jax.Array | None:
    """`inputs.padding_mask` with this family's reason to refuse any other."""
    reason = (
        f"{name} attention chooses the pairs of query and key by their positions and "
        "never forms the others"
    )
    return inputs.padding_mask(mask, batch, length, reason=reason)


def lengths(mask: jax.Array | None, length: int) -> jax.Array:
    """One past the last visible position, `[1 or B]` int32."""
    if mask is None:
        return jnp.full((1,), length, jnp.int32)
    return inputs.next_position(mask, *mask.shape)


def band_sizes(window: int, length: int, is_causal: bool) -> tuple[int, int, int]:
    """How to cut for a window: positions of a block, keys before it and behind it."""
    reach = min(window, length - 1)
    size = min(max(_SMALLEST, min(reach, _LARGEST)), length)
    return size, reach, 0 if is_causal else reach


def attend(
    query: jax.Array,
    position: jax.Array,
    sets: list[Keys],
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Softmax attention over the union of the sets.

    Args:
      query: `[B, N, P, C, H]`.
      position: of the queries, broadcastable to `[B, N, P, C, 1]`.
      sets: without a pair in common.
      precision: of the matrix products.

    Returns:
      `[B, N, P, C, Hv]`, float32 or wider; zero for queries that see nothing.
    """
    return attend_with_sum(query, position, sets, precision)[0]


def attend_with_sum(
    query: jax.Array,
    position: jax.Array,
    sets: list[Keys],
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array]:
    """`attend`, and what it divided by.

    Returns:
      The attention, and the logarithm of each query's sum of ``exp(score)``,
      `[B, N, P, C, 1]`; the lowest finite number for queries that see nothing.
    """
    dtype = inputs.accumulation_dtype(query)
    product = functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=dtype
    )
    lowest = jnp.asarray(jnp.finfo(dtype).min, dtype)
    scale = 1 / math.sqrt(query.shape[-1])
    seen = [(s.position >= 0) & s.rule(position, s.position) for s in sets]
    scores = []
    for s, visible in zip(sets, seen, strict=True):
        score = product(_PRODUCTS[s.layout][0], query, s.key) * scale
        score = score if s.discount is None else score - s.discount
        scores.append(jnp.where(visible, score, lowest))
    peaks = [score.max(-1, keepdims=True) for score in scores]
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, peaks))
    total, out = jnp.zeros((), dtype), jnp.zeros((), dtype)
    for s, visible, score in zip(sets, seen, scores, strict=True):
        weights = jnp.where(visible, jnp.exp(score - peak), jnp.zeros((), dtype))
        total = total + weights.sum(-1, keepdims=True)
        weights = weights.astype(s.value.dtype)
        out = out + product(_PRODUCTS[s.layout][1], weights, s.value)
    # The largest visible weight is 1, so a total of 0 means that there is none.
    any_seen = total > 0
    total = jnp.where(any_seen, total, jnp.ones((), dtype))
    return out / total, jnp.where(any_seen, jnp.log(total) + peak, lowest)


def dense_weights(
    query: jax.Array,
    sequence: Sequence,
    visible: jax.Array,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """The matrix `[B, N, T, S]` of a pattern, for plots and tests.

    Args:
      query: `[B, N, T, H]`.
      sequence: keys; those with position -1 are hidden.
      visible: the pattern, broadcastable to `[B, N, T, S]`.
      precision: of the product.
    """
    dtype = inputs.accumulation_dtype(query, sequence.key)
    query, key = query.astype(dtype), sequence.key.astype(dtype)
    scores = feature_maps.products(query, key, precision)
    visible = visible & (sequence.position >= 0)[:, None, None]
    scores = scores / math.sqrt(query.shape[-1])
    visible = jnp.broadcast_to(visible, scores.shape)
    return feature_maps.masked_softmax(scores, visible, axis=-1)
