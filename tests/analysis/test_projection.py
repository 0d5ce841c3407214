"""Linformer's Theorem 1, measured: random projections and the nearest matrices."""

import math
from typing import Any

import numpy as np
import pytest

from lra_jax.analysis.projection import (
    projection_bound,
    projection_error,
    truncation_errors,
)
from lra_jax.analysis.spectra import Spectra, projection_section


def attention(length: int, width: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, length, length))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return weights, rng.normal(size=(3, length, width))


def test_nearest_matrices() -> None:
    weights, values = attention(20)
    errors = truncation_errors(weights, values)
    assert errors.shape == (3, 21, 6)
    assert errors[:, 0] == pytest.approx(1)
    assert (np.diff(errors, axis=1) < 0).all() and errors[:, -1].max() < 1e-13
    # A matrix of rank 2 times anything is exact from there on.
    low = weights[..., :2] @ weights[..., :2, :]
    errors = truncation_errors(low, values)
    assert errors[:, 2].max() < 1e-12 and errors[:, 1].max() > 1e-3


def test_a_random_projection_keeps_the_lemma_and_not_the_theorem() -> None:
    weights, values = attention(512)
    rank = 400
    grant = projection_bound(rank, 512)
    assert projection_error(weights, values, rank, factors=True).max() < grant
    # Rows that average values of both signs: ||P w|| is far below ||P|| ||w||.
    assert projection_error(weights, values, rank).mean() > 2 * grant
    # Values of one sign: the theorem's own unit.
    assert projection_error(weights, np.abs(values), rank).max() < grant


def test_the_error_is_that_of_its_formula() -> None:
    weights, values = attention(7)
    rows = np.random.default_rng(3).normal(size=(4, 7)) / 2
    off = weights @ rows.T @ rows @ values - weights @ values
    actual = projection_error(weights, values, 4, seed=3)
    for head in range(3):
        for column in range(6):
            exact = weights[head] @ values[head, :, column]
            expected = np.linalg.norm(off[head, :, column]) / np.linalg.norm(exact)
            assert actual[head, column] == pytest.approx(expected)
    assert (projection_error(weights * 0, values, 4) == 0).all()


@pytest.mark.parametrize(("rank", "length"), [(256, 512), (512, 512), (5000, 100)])
def test_the_bound_solves_its_equation(rank: int, length: int) -> None:
    error = projection_bound(rank, length)
    assert 0 < error <= 2 / 3
    assert rank * (error**2 - error**3) == pytest.approx(5 * math.log(length))


def test_a_rank_that_the_theorem_does_not_reach() -> None:
    least = 33.75 * math.log(512)
    assert math.isnan(projection_bound(math.floor(least), 512))
    assert projection_bound(math.ceil(least), 512) == pytest.approx(2 / 3, abs=0.02)


def test_errors() -> None:
    weights, values = attention(5)
    with pytest.raises(ValueError, match=r"rank: expected .*got 0"):
        projection_error(weights, values, 0)
    with pytest.raises(ValueError, match=r"length: expected .*got 1"):
        projection_bound(4, 1)


@pytest.mark.parametrize(("length", "is_bound"), [(128, False), (512, True)])
def test_only_drawn_lines_are_in_the_legend(length, is_bound):
    """Below 33.75 ln(n) the theorem allows no error, so it has no line."""
    sizes = 2 ** np.arange(2, length.bit_length())
    error = np.full((1, len(sizes)), 0.1)
    none = np.empty((1, 1, 65)), np.empty((1, 1))
    spectra = Spectra(*none, length, sizes, error, error, 2 * error[0], error, none[0])
    section: Any = projection_section({"softmax": spectra}, "")
    chart, _ = section.parts
    (legend,) = chart.draw().legends
    names = [text.get_text() for text in legend.get_texts()]
    assert len(names) == 4 + is_bound and ("Theorem 1" in names) == is_bound
