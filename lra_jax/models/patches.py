"""Images in square patches: a sequence of fewer, wider inputs.

Pixels come row by row, `[B, T]` with T = rows * columns. A patch of P x P of them is
one position of the encoder, which then has T / P^2 positions, also row by row, as in
the Vision Transformer (Dosovitskiy et al. 2020, arXiv:2010.11929).
"""

import jax

from lra_jax.attention.inputs import check_shape

Sides = tuple[int, int]


def cut(pixels: jax.Array, grid: Sides, patch: int) -> jax.Array:
    """`[B, T]` to `[B, T / P^2, P^2]`, each patch row by row.

    Args:
      pixels: `[B, T]`.
      grid: rows and columns of the image, multiples of P.
      patch: P.

    Raises:
      ValueError: T is not that of the grid.
    """
    rows, columns = grid
    batch = pixels.shape[0]
    check_shape("tokens", pixels, "B T", None, rows * columns)
    parts = pixels.reshape(batch, rows // patch, patch, columns // patch, patch)
    # In two steps, for a batch that is split on explicit axes.
    parts = parts.swapaxes(2, 3).reshape(batch, -1, patch, patch)
    return parts.reshape(batch, -1, patch**2)


def any_real(mask: jax.Array, grid: Sides, patch: int) -> jax.Array:
    """Whether a patch has a real pixel: boolean `[B, T]` to `[B, T / P^2]`."""
    return cut(mask, grid, patch).any(-1)
