"""cosFormer's positions: M, the angles that belong to it, and what lies beyond.

Position i stands at the angle ``pi i / 2M``. Tables for a fixed M are constants, made
by numpy in float64; those for one M a sample, or for a stream, are computed.
"""

import math

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs

MaxLength = int | np.integer | jax.Array | np.ndarray | None


def max_lengths(
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


def visible(
    mask: jax.Array | None, lengths: int | jax.Array, batch: int, length: int
) -> jax.Array | None:
    """The padding mask `[B, S]` without the positions beyond M; None = all."""
    mask = inputs.padding_mask(mask, batch, length)
    if isinstance(lengths, int):
        return mask
    below = within(lengths, length)
    return below if mask is None or below is None else mask & below


def within(lengths: int | jax.Array, length: int) -> jax.Array | None:
    """`[B, S]`: the positions below each sample's own M; None for one fixed M."""
    if isinstance(lengths, int):
        return None
    return jnp.arange(length, dtype=lengths.dtype)[None] < lengths[:, None]


def fixed(max_length: int | None, length: int) -> int:
    """M of a stream that holds at least this many positions.

    Raises:
      ValueError: it is not an int, or smaller.
    """
    if not isinstance(max_length, int | np.integer) or max_length < length:
        raise ValueError(
            f"max_length: expected an int of at least {length}, fixed for all that "
            f"the stream will hold, got {max_length!r}"
        )
    return int(max_length)


def tables(
    length: int, lengths: int | jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angle, `[1 or B, 1, T]`."""
    positions = np.arange(length)[None]
    if isinstance(lengths, int):
        # Made here and not by XLA, which would fuse the cosine into the product and
        # evaluate it once for every element.
        angles = positions * (math.pi / 2 / lengths)
        both = np.cos(angles), np.sin(angles)
    else:
        longest = jnp.maximum(lengths, 1).astype(dtype)
        angles = jnp.asarray(positions, dtype) * (math.pi / 2 / longest)[:, None]
        both = jnp.cos(angles), jnp.sin(angles)
    cos, sin = (jnp.asarray(table, dtype)[:, None] for table in both)
    return cos, sin


def turn(lengths: int | jax.Array) -> float | None:
    """The angle between neighbouring positions, if M is one known number."""
    return math.pi / 2 / lengths if isinstance(lengths, int) else None


def stream_tables(
    position: jax.Array, length: int, max_length: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """The tables of ``length`` positions from each sample's own on, `[B, 1, T]`.

    Positions from M on share the angle of the last one, M - 1, so that every weight
    stays positive.

    Raises:
      ValueError: they reach beyond M; only where the position is a concrete array.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in (position, max_length))
    if not traced and np.max(position) + length > max_length:
        raise ValueError(
            f"max_length: expected at least {np.max(position) + length} for a stream "
            f"that goes this far, got {max_length}"
        )
    places = position[:, None] + jnp.arange(length, dtype=position.dtype)[None]
    places = jnp.minimum(places, max_length - 1).astype(dtype)
    angles = places * (math.pi / 2 / max_length.astype(dtype))
    return jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
