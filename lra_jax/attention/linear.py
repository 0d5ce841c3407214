"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs").

``out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j) + eps)`` with
``phi(x) = elu(x) + 1`` and no 1 / sqrt(H).

Cost: O((T + S) H Hv) time, O(H Hv) beside the inputs and the output.

The denominator's eps is added, as in the authors' code (idiap/fast-transformers), so
rows sum to ``z / (z + eps)``; a row without visible keys is exactly zero. Features,
sums and products are float32 or wider even for half-precision inputs: with H = 64,
float16 sums overflow beyond some 760 keys.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import kernels, shapes

__all__ = ["linear_attention", "linear_weights"]


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    feature_map: kernels.FeatureMap = "elu",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes ``phi(q) (phi(k)^T v)``, normalised over the visible keys.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: must be False in this version.
      feature_map: "elu" (elu(x) + 1), "relu", "sigmoid", or a non-negative function of
        an array.
      eps: added to the denominator.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, or `is_causal` is True.
    """
    shapes.check_inputs(query, key, value, is_causal)
    shapes.refuse_causal("linear", is_causal)
    mask = shapes.padding_mask(mask, query.shape[0], key.shape[1])
    dtype = shapes.accumulation_dtype(query, key, value)
    query_features, key_features = _features(query, key, mask, feature_map, dtype)
    value = shapes.by_head(value, query.shape[2], mask, dtype)
    sums = kernels.project(query_features, key_features.sum(2), precision)
    out = kernels.contract(query_features, key_features, value, precision)
    out = jnp.swapaxes(out / (sums + eps)[..., None], 1, 2)
    return out.astype(query.dtype)


def linear_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    feature_map: kernels.FeatureMap = "elu",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, S]` that `linear_attention` never builds.

    float32 or wider; arguments and errors are those of `linear_attention`.
    """
    shapes.check_inputs(query, key, None, is_causal)
    shapes.refuse_causal("linear", is_causal)
    mask = shapes.padding_mask(mask, query.shape[0], key.shape[1])
    dtype = shapes.accumulation_dtype(query, key)
    query_features, key_features = _features(query, key, mask, feature_map, dtype)
    scores = kernels.products(query_features, key_features, precision)
    return scores / (scores.sum(-1, keepdims=True) + eps)


def _features(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    feature_map: kernels.FeatureMap,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    phi = kernels.feature_map(feature_map)
    num_heads = query.shape[2]
    query_features = phi(shapes.by_head(query, num_heads, dtype=dtype))
    key_features = phi(shapes.by_head(key, num_heads, mask, dtype))
    # Hidden again after the map, because phi(0) is not zero.
    return query_features, shapes.hide_by_head(key_features, mask)
