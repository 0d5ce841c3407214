"""Rotations of neighbouring columns by position, as in retention and RoPE.

Columns 2c and 2c + 1 of position i are rotated by ``i 10000^(-c / (H/2 - 1))``, so that
the inner product of two rotated vectors depends on the difference of their positions.
These are retention's rates; RoPE itself has 10000^(-2c / H).
"""

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.errors import expected

Angles = tuple[jax.Array, jax.Array]

# Positions covered by the low digit's table; that of the high digit has T / 256 rows.
_BASE = 256


def check_width(head_dim: int) -> None:
    """Raises ``ValueError`` unless the columns come in pairs."""
    if head_dim % 2:
        needed = "False for an odd head width, because columns are rotated in pairs"
        raise expected("rotate", needed, f"True with H={head_dim}")


def tables(length: int, head_dim: int, dtype: jnp.dtype) -> Angles:
    """Cosine and sine for positions 0 to length, `[length + 1, H / 2]` each.

    Built from two small tables by ``cos(a + b) = cos a cos b - sin a sin b``: angles
    computed directly would lose precision far from the start, and a full table would be
    a large constant in the program.
    """
    rates = 10000.0 ** -np.linspace(0, 1, head_dim // 2)
    low = np.arange(min(_BASE, length + 1))[None, :, None] * rates
    high = np.arange(0, length + 1, _BASE)[:, None, None] * rates
    cos_low, sin_low, cos_high, sin_high = (
        jnp.asarray(table, dtype)
        for table in (np.cos(low), np.sin(low), np.cos(high), np.sin(high))
    )
    cos = cos_high * cos_low - sin_high * sin_low
    sin = sin_high * cos_low + cos_high * sin_low
    width = head_dim // 2
    return cos.reshape(-1, width)[: length + 1], sin.reshape(-1, width)[: length + 1]


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """Rotates `[..., H]`; cosine and sine broadcast to `[..., H / 2]`."""
    cos, sin = angles
    even, odd = x[..., 0::2], x[..., 1::2]
    pairs = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return pairs.reshape(x.shape)
