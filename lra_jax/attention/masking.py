"""Masks, and the positions that they hide.

A mask is boolean, True where a position may be attended. Padding is exact: hidden
positions are set to zero before anything is summed, whatever they held.
"""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs
from lra_jax.errors import expected


def padding_mask(
    mask: jax.Array | None,
    batch: int,
    length: int,
    name: str = "mask",
) -> jax.Array | None:
    """Converts a padding mask to boolean `[B, S]`.

    Args:
      mask: True = may be attended. `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`. Numbers above zero count as True, because
        ``flax.nnx.make_attention_mask`` makes float masks of 0 and 1; additive masks
        (0 and -inf) are rejected if their values are known, outside ``jax.jit``.
      batch: B.
      length: S (or T, for a query mask).
      name: the argument's name, for the error message.

    Raises:
      ValueError: the shape does not fit, or the mask has a query or a head axis. A
        linear mechanism sums over the keys once for all queries, and other fast ones
        form few pairs, so they cannot leave out single query-key pairs.
    """
    if mask is None:
        return None
    mask = _boolean(mask, name)
    shape = mask.shape
    if len(shape) == 4 and (shape[1] != 1 or shape[2] != 1):
        raise expected(
            name,
            "[B, S] or [B, 1, 1, S]: here a key is hidden from all queries and heads "
            "alike, so a mask with a query or head axis cannot be applied (pass the "
            "padding of the keys, [B, S], instead of make_attention_mask(pad, pad), or "
            "is_causal=True)",
            shape,
        )
    full = (batch, 1, 1, length)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    if not _broadcasts(aligned, full):
        words = f"[B, S]={(batch, length)} or anything that broadcasts to [B, 1, 1, S]"
        raise expected(name, f"{words}={full}", shape)
    rows = aligned[0] if len(aligned) == 4 else 1
    return jnp.broadcast_to(mask.reshape(rows, -1), (batch, length))


def pair_mask(
    mask: jax.Array | None, batch: int, num_heads: int, query_length: int, length: int
) -> jax.Array | None:
    """Converts a mask to boolean rank 4, broadcastable to `[B, N, T, S]`.

    For mechanisms that do build the matrix. A rank-2 mask is `[B, S]`, as everywhere in
    this package; pass a `[T, S]` mask as `[1, 1, T, S]`. A rank-3 mask is refused if
    its first axis could be the batch or the heads.

    Raises:
      ValueError: the shape does not fit.
    """
    if mask is None:
        return None
    mask = _boolean(mask, "mask")
    shape = mask.shape
    full = (batch, num_heads, query_length, length)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    unclear = len(shape) == 3 and shape[0] != 1
    if unclear or not _broadcasts(aligned, full):
        words = f"[B, S]={(batch, length)} or anything that broadcasts to [B, N, T, S]"
        raise expected("mask", f"{words}={full}", shape)
    return mask.reshape((1,) * (4 - len(aligned)) + aligned)


def check_mask(
    name: str, mask: jax.Array | None, axes: str, *sizes: inputs.Size
) -> jax.Array | None:
    """Converts a mask with these axes to boolean; None remains None.

    Arguments are those of `inputs.check_shape`; masks of numbers are as in
    `padding_mask`.

    Raises:
      ValueError: the shape does not fit, or it is known not to be a mask.
    """
    if mask is None:
        return None
    inputs.check_shape(name, mask, axes, *sizes)
    return _boolean(mask, name)


def both(one: jax.Array | None, two: jax.Array | None) -> jax.Array | None:
    """Where two masks are both True; None = everywhere."""
    if one is None or two is None:
        return two if one is None else one
    return one & two


def next_position(mask: jax.Array | None, batch: int, length: int) -> jax.Array:
    """`[B]` int32: one past the last visible position; 0 if there is none."""
    if mask is None:
        return jnp.full((batch,), length, jnp.int32)
    after = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
    return jnp.where(mask, after, 0).max(1)


def hide(array: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Zeroes the padded positions of `[B, S, N, H]`, whatever they held (even NaN)."""
    if mask is None:
        return array
    return jnp.where(mask[:, :, None, None], array, 0)


def hide_broken(
    query: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Zeroes the rows of a query `[..., H]` that hold NaN or infinity.

    A padded row may hold anything. Even if its output is discarded, the row still meets
    every key in the gradient, and zero times NaN is NaN. So such a row is computed from
    zeros, and `broken_again` makes its output NaN. Without a mask nothing is padded,
    and the query is not changed.

    Returns:
      The query, and which rows were not changed, `[..., 1]`; None = all.
    """
    if mask is None:
        return query, None
    finite = jnp.isfinite(query).all(-1, keepdims=True)
    return jnp.where(finite, query, 0), finite


def broken_again(out: jax.Array, finite: jax.Array | None) -> jax.Array:
    """Sets rows that `hide_broken` zeroed to NaN; no gradient passes through them."""
    if finite is None:
        return out
    return jnp.where(finite, out, jnp.nan)


def by_head(
    array: jax.Array,
    num_heads: int,
    mask: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Zeroes the padding of `[B, S, n, H]`, repeats heads up to N, and puts them first.

    Returns:
      `[B, N, S, H]` in ``dtype``; None = the array's dtype.
    """
    array = hide(array, mask).astype(dtype or array.dtype)
    return jnp.swapaxes(inputs.match_heads(array, num_heads), 1, 2)


def hide_unseen(array: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Zeroes the keys `[B, S, N, H]` that no query or head sees, by a `pair_mask`."""
    if pairs is None:
        return array
    return hide(array, jnp.broadcast_to(pairs.any((1, 2)), array.shape[:2]))


def hide_by_head(array: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Zeroes the padded positions of `[B, N, S, H]`."""
    if mask is None:
        return array
    return jnp.where(mask[:, None, :, None], array, 0)


def _boolean(mask: jax.Array, name: str) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.dtype == jnp.bool_:
        return mask
    if jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise expected(name, "a boolean mask", mask.dtype)
    # An additive mask would hide everything. Traced values are unknown; the others are
    # read with numpy, because jnp would trace them inside jax.jit.
    if isinstance(mask, jax.core.Tracer) or not mask.is_fully_addressable:
        return mask > 0
    values = np.asarray(mask).astype(np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise expected(name, "a boolean mask, or one of 0 and 1", "other numbers")
    return mask > 0


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    if not 1 <= len(shape) <= len(full):
        return False
    pairs = zip(shape[::-1], full[::-1], strict=False)
    return all(size in (1, needed) for size, needed in pairs)
