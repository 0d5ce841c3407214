"""Retention in two dimensions: its formula and its gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from .. import dense
from ..mechanisms import assert_close, fast_jit, inputs
from .grids import assert_grid


def _formula(
    q: Any, k: Any, v: Any, grid: tuple[int, int], mask: Any = None, norm: Any = None
) -> np.ndarray:
    """Pixel by pixel, with the decay of the Manhattan distance; no rotation."""
    places = np.array(list(np.ndindex(grid)))
    apart = np.abs(places[:, None] - places[None]).sum(-1)
    slopes = -np.log(1 - 2.0 ** (-5 - np.arange(q.shape[2])))

    def head(slope, q, k, v, where):
        near = np.exp(-slope * apart)
        total = near.sum(1, keepdims=True)
        scores = q @ k.T / np.sqrt(q.shape[1]) * near[:, where] / np.sqrt(total)
        return scores @ v / np.maximum(np.abs(scores.sum(1, keepdims=True)), 1)

    out = dense.each_slope(q, k, v, mask, slopes, head)
    return dense.normed(out, norm, 3, 1e-6)


@pytest.mark.parametrize("grid", [(8, 3), (3, 8), (5, 2)])
def test_the_grid_is_its_formula(grid: tuple[int, int]) -> None:
    """In bands of 4, 3 and 1."""
    length = grid[0] * grid[1]
    arrays = tuple(3 * x for x in inputs(1, length=length, query_length=length))
    mask = np.ones((2, length), bool)
    mask[0, [1, 4]] = mask[1, -2:] = False
    options = {"grid": grid, "rotate": False, "norm": None}
    form = functools.partial(_formula, grid=grid)
    assert_grid("retention", arrays, mask, form, **options)


def test_gradients_are_those_of_the_matrix() -> None:
    """The derivative of a matrix that is written down, with slopes that are learned."""
    grid, apart = (4, 3), np.array(list(np.ndindex(4, 3)))
    apart = np.abs(apart[:, None] - apart[None]).sum(-1).astype("float32")
    arrays = [*inputs(2, length=12, query_length=12), np.array([0.1, 0.5], "float32")]

    def written(q, k, v, slopes):
        near = jnp.exp(-slopes[None, :, None, None] * apart[None, None])
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / 2
        scores = scores * near / jnp.sqrt(near.sum(-1, keepdims=True))
        scores = scores / jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), 1)
        return jnp.einsum("bnts,bsnv->btnv", scores, v, precision="highest")

    def ours(q, k, v, slopes):
        return attention.retention_attention(
            q, k, v, slopes=slopes, grid=grid, rotate=False, norm=None
        )

    @fast_jit
    def slopes_of(*arrays):
        def loss(form):
            return jax.grad(lambda *x: jnp.sin(form(*x)).sum(), (0, 1, 2, 3))(*arrays)

        return loss(ours), loss(written)

    assert_close(*slopes_of(*arrays), 1e-4)
