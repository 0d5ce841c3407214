"""Images in square patches: a sequence of fewer, wider inputs.

Pixels come row by row, `[B, T]` with T = rows * columns, or `[B, T, C]` in colour. A
patch of P x P of them is one position of the encoder, which then has T / P^2 positions,
also row by row, as in the Vision Transformer (Dosovitskiy et al. 2020,
arXiv:2010.11929). A dense layer on patches is a convolution whose stride is its size;
hierarchical models have one between two stages.
"""

from typing import Any

import jax
from flax import nnx

from lra_jax.attention.inputs import check_shape
from lra_jax.models.config import ModelConfig
from lra_jax.models.layers import Dense

Sides = tuple[int, int]


def cut(pixels: jax.Array, grid: Sides, patch: int) -> jax.Array:
    """`[B, T]` to `[B, T / P^2, P^2]`, each patch row by row; `[B, T, C]` to
    `[B, T / P^2, P^2 C]`. The grid's rows and columns are multiples of P."""
    (rows, columns), (batch, _, *more) = grid, pixels.shape
    axes = "B T C" if more else "B T"
    check_shape("tokens", pixels, axes, None, rows * columns, *[None] * len(more))
    parts = pixels.reshape(batch, rows // patch, patch, columns // patch, patch, *more)
    # In two steps, for a batch that is split on explicit axes.
    parts = parts.swapaxes(2, 3).reshape(batch, -1, patch, patch, *more)
    return parts.reshape(batch, parts.shape[1], -1)


def any_real(mask: jax.Array, grid: Sides, patch: int) -> jax.Array:
    """Whether a patch has a real pixel: boolean `[B, T]` to `[B, T / P^2]`."""
    return cut(mask, grid, patch).any(-1)


class Merge(nnx.Module):
    """Between two stages: a convolution over squares of 2 x 2 positions, with stride 2.

    The config is that of the stage before (`ModelConfig.at`), whose width is D.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.grid: Any = config.patch_grid
        width = config.embed_dim
        self.layer = Dense(4 * width, 2 * width, dtype=config.dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """`[B, T, D]` to `[B, T / 4, 2 D]`, and which of these positions are real."""
        merged = None if mask is None else any_real(mask, self.grid, 2)
        return self.layer(cut(x, self.grid, 2)), merged
