"""Softmax attention, the quadratic baseline.

``out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j``
(Vaswani et al. 2017, "Attention Is All You Need").

Cost: O(T S (H + Hv)) time and O(T S) memory.

Deviations from common code: a row that may attend to nothing is exactly zero, with zero
gradients, where an additive -inf gives NaN and an additive -1e9 gives the mean of the
hidden values.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import kernels, shapes

__all__ = ["softmax_attention", "softmax_weights"]


def softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes ``softmax(q k^T / sqrt(H)) v``.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N (grouped queries).
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, N, T, S]`. This is the one mechanism that takes a query axis.
      is_causal: position i sees keys 0..i only; needs T == S.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; logits and softmax are float32 or wider.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit.
    """
    shapes.check_inputs(query, key, value, is_causal)
    pairs, key, value = _prepare(query, key, value, mask)
    weights = _weights(query, key, pairs, is_causal, precision)
    out = jnp.einsum(
        "bnts,bsnv->btnv",
        weights.astype(value.dtype),
        value,
        precision=precision,
        preferred_element_type=weights.dtype,
    )
    return out.astype(query.dtype)


def softmax_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, S]`, float32 or wider; rows sum to one or zero.

    Arguments and errors are those of `softmax_attention`.
    """
    shapes.check_inputs(query, key, None, is_causal)
    pairs, key, _unused = _prepare(query, key, key, mask)
    return _weights(query, key, pairs, is_causal, precision)


def _prepare(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Rank-4 mask, and key and value with N heads and nothing left in the padding."""
    batch, length, num_heads, _ = query.shape
    pairs = shapes.pair_mask(mask, batch, num_heads, length, key.shape[1])
    key, value = (
        shapes.match_heads(shapes.hide_padding(x, pairs), num_heads)
        for x in (key, value)
    )
    return pairs, key, value


def _weights(
    query: jax.Array,
    key: jax.Array,
    pairs: jax.Array | None,
    is_causal: bool,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    dtype = shapes.accumulation_dtype(query, key)
    if query.dtype != key.dtype:
        query, key = query.astype(dtype), key.astype(dtype)
    logits = jnp.einsum(
        "btnh,bsnh->bnts",
        query,
        key,
        precision=precision,
        preferred_element_type=dtype,
    )
    if is_causal:
        earlier = jnp.tri(query.shape[1], dtype=bool)[None, None]
        pairs = earlier if pairs is None else earlier & pairs
    logits = logits / math.sqrt(query.shape[-1])
    return kernels.masked_softmax(logits, pairs, axis=-1)
