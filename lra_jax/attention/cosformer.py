"""cosFormer (Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention").

``out_i = sum_j s(i, j) v_j / sum_j s(i, j)`` with
``s(i, j) = ReLU(q_i) . ReLU(k_j) cos(pi (i - j) / 2M)``.

``cos(a - b) = cos a cos b + sin a sin b`` splits exactly into features of width 2H,
``[ReLU(x_i) cos(pi i / 2M), ReLU(x_i) sin(pi i / 2M)]``, so the cost is
O((T + S) 2H Hv) time. There is no 1 / sqrt(H).

Positions and M. Only position differences matter, so they count from 0 here. M must
exceed every position, or weights turn negative and the denominator may cross zero. With
``max_length=None`` M is max(T, S), as in the authors' code (OpenNLPLab/cosFormer); the
weights then depend on the padded length, so a padded batch equals its samples run alone
only with a fixed ``max_length``.

Deviations from the authors' code: it has no mask; here padding is exact. Angles and
sums are float32 or wider whatever the inputs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import kernels, shapes

__all__ = ["cosformer_attention", "cosformer_weights"]

MaxLength = int | np.integer | jax.Array | np.ndarray | None


def cosformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: MaxLength = None,
    *,
    denominator: str = "clamp",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes attention with ReLU features, re-weighted by the cosine of distance.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: must be False in this version.
      max_length: M. An int of at least max(T, S); None for max(T, S); or an integer
        array `[B]` with one M a sample, whose positions from its M on are padding: such
        keys are hidden and such query rows are zero.
      denominator: "clamp" divides by max(sum, eps), as the authors do; "add" divides by
        sum + eps (davidsvy/cosformer-pytorch, with eps 1e-5).
      eps: see `denominator`.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype. A row whose query, or whose every visible
      key, is negative throughout is exactly zero, with zero gradient to query and key.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, a position lies beyond
        `max_length`, or `is_causal` is True.
    """
    shapes.check_inputs(query, key, value, is_causal)
    _check_options(is_causal, denominator)
    lengths = _lengths(max_length, query, key)
    mask = _visible(mask, lengths, query.shape[0], key.shape[1])
    dtype = shapes.accumulation_dtype(query, key, value)
    query_features, key_features = _features(query, key, mask, lengths, dtype)
    value = shapes.by_head(value, query.shape[2], mask, dtype)
    sums = kernels.project(query_features, key_features.sum(2), precision)
    out = kernels.contract(query_features, key_features, value, precision)
    out = out / _bounded(sums, denominator, eps)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def cosformer_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: MaxLength = None,
    *,
    denominator: str = "clamp",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, S]` that `cosformer_attention` never builds.

    float32 or wider; arguments and errors are those of `cosformer_attention`.
    """
    shapes.check_inputs(query, key, None, is_causal)
    _check_options(is_causal, denominator)
    lengths = _lengths(max_length, query, key)
    mask = _visible(mask, lengths, query.shape[0], key.shape[1])
    dtype = shapes.accumulation_dtype(query, key)
    query_features, key_features = _features(query, key, mask, lengths, dtype)
    scores = kernels.products(query_features, key_features, precision)
    return scores / _bounded(scores.sum(-1, keepdims=True), denominator, eps)


def _check_options(is_causal: bool, denominator: str) -> None:
    shapes.refuse_causal("cosformer", is_causal)
    if denominator not in ("clamp", "add"):
        raise ValueError(f"denominator: expected 'clamp' or 'add', got {denominator!r}")


def _lengths(
    max_length: MaxLength, query: jax.Array, key: jax.Array
) -> int | jax.Array:
    """M as an int, or as an integer array `[B]`."""
    longest = max(query.shape[1], key.shape[1])
    if max_length is None:
        return longest
    if isinstance(max_length, int | np.integer):
        if max_length < longest:
            raise ValueError(
                f"max_length: expected at least max(T, S)={longest}, so that every "
                f"weight is positive, got {max_length}"
            )
        return int(max_length)
    lengths = jnp.asarray(max_length)
    expected = (query.shape[0],)
    if lengths.shape != expected or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"max_length: expected an int, None or an integer array [B]={expected}, "
            f"got {lengths.dtype} of shape {lengths.shape}"
        )
    return lengths


def _visible(
    mask: jax.Array | None, lengths: int | jax.Array, batch: int, length: int
) -> jax.Array | None:
    mask = shapes.padding_mask(mask, batch, length)
    if isinstance(lengths, int):
        return mask
    within = _within(lengths, length)
    return within if mask is None else mask & within


def _within(lengths: jax.Array, length: int) -> jax.Array:
    """`[B, S]`: the positions below each sample's own M."""
    return jnp.arange(length, dtype=lengths.dtype)[None] < lengths[:, None]


def _features(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    lengths: int | jax.Array,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    num_heads = query.shape[2]
    rows = None
    if not isinstance(lengths, int):
        rows = _within(lengths, query.shape[1])
    # ReLU(0) is zero, and its gradient there too: what is hidden stays hidden.
    return (
        _rotated(shapes.by_head(query, num_heads, rows, dtype), lengths),
        _rotated(shapes.by_head(key, num_heads, mask, dtype), lengths),
    )


def _rotated(x: jax.Array, lengths: int | jax.Array) -> jax.Array:
    """`[B, N, T, H]` -> `[B, N, T, 2H]`: cosine half, then sine half."""
    cos, sin = _angle_tables(x.shape[2], lengths, x.dtype)
    active = jax.nn.relu(x)
    return jnp.concatenate([active * cos, active * sin], -1)


def _angle_tables(
    length: int, lengths: int | jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angle, `[1 or B, 1, T, 1]`."""
    positions = np.arange(length)[None]
    if isinstance(lengths, int):
        # Made here and not by XLA, which would fuse the cosine into the product and
        # evaluate it once for every element.
        angles = positions * (math.pi / 2 / lengths)
        tables = np.cos(angles), np.sin(angles)
    else:
        longest = jnp.maximum(lengths, 1).astype(dtype)
        angles = jnp.asarray(positions, dtype) * (math.pi / 2 / longest)[:, None]
        tables = jnp.cos(angles), jnp.sin(angles)
    cos, sin = (jnp.asarray(table, dtype)[:, None, :, None] for table in tables)
    return cos, sin


def _bounded(sums: jax.Array, denominator: str, eps: float) -> jax.Array:
    return kernels.at_least(sums, eps) if denominator == "clamp" else sums + eps
