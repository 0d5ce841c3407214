"""cosFormer in two dimensions: its formula."""

from typing import Any

import numpy as np
import pytest

from lra_jax import attention

from .. import dense
from ..mechanisms import inputs
from .grids import assert_grid

GRID = (2, 4)


def _formula(q: Any, k: Any, v: Any, mask: Any = None) -> np.ndarray:
    """Pixel by pixel, with the cosines of both distances."""
    places = np.array([(row, column) for row in range(2) for column in range(4)])

    def head(q, k, v, where):
        distance = places[:, None] - places[where][None]
        near = np.cos(np.pi / 2 * distance / GRID).prod(-1)
        scores = np.maximum(q, 0) @ np.maximum(k, 0).T * near
        return scores @ v / np.maximum(scores.sum(-1, keepdims=True), 1e-6)

    return dense.each_head(q, k, v, mask, head)


@pytest.mark.parametrize("max_length", [4, np.array([8, 3])])
def test_a_grid_ignores_the_length(max_length: Any) -> None:
    q, k, v = inputs(3, length=8, query_length=8)
    wanted = attention.cosformer_attention(q, k, v, grid=GRID)
    got = attention.cosformer_attention(q, k, v, max_length=max_length, grid=GRID)
    np.testing.assert_array_equal(got, wanted)


def test_the_grid_is_its_formula() -> None:
    arrays = inputs(1, length=8, query_length=8)
    mask = np.array([[1, 1, 1, 1, 1, 0, 1, 1], [1] * 6 + [0] * 2], bool)
    assert_grid("cosformer", arrays, mask, _formula, grid=GRID)
