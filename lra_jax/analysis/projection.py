"""How well attention survives a random projection of its positions (Wang et al. 2020,
"Linformer", Theorem 1), compared with the best matrix of the same rank."""

import math

import numpy as np
from numpy.typing import ArrayLike

from lra_jax.attention.inputs import check_size


def projection_error(
    weights: ArrayLike,
    values: ArrayLike,
    rank: int,
    *,
    factors: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Computes ``||P R^T R w - P w|| / ||P w||`` for every column w of the values.

    The entries of R `[rank, S]` are independent and normal with variance 1 / rank, as
    in the proof of Theorem 1. The proof applies the lemma of Johnson and Lindenstrauss
    to each row u of P as ``|u R^T R w - u w| <= e |u w|``; but the lemma gives
    ``e ||u|| ||w||`` on the right, which is far larger if a row averages values of both
    signs. ``factors`` measures in that unit.

    Args:
      weights: attention matrices P `[..., T, S]`.
      values: `[..., S, H]`.
      rank: rows of R, the paper's k.
      factors: divide by ``||P|| ||w||``, with the Frobenius norm, instead of
        ``||P w||``.
      seed: of R, which is the same for all matrices.

    Returns:
      float64 `[..., H]`; 0 where the divisor is 0.

    Raises:
      ValueError: shapes that do not fit, or a rank below 1.
    """
    check_size("rank", rank)
    weights, values = np.asarray(weights, np.float64), np.asarray(values, np.float64)
    length = weights.shape[-1]
    rows = np.random.default_rng(seed).normal(size=(rank, length)) / math.sqrt(rank)
    projected = (weights @ rows.T) @ (rows @ values)
    exact = weights @ values
    size = np.linalg.norm(exact, axis=-2)
    if factors:
        size = np.linalg.norm(weights, axis=(-1, -2))[..., None]
        size = size * np.linalg.norm(values, axis=-2)
    return _quotient(np.linalg.norm(projected - exact, axis=-2), size)


def truncation_errors(weights: ArrayLike, values: ArrayLike) -> np.ndarray:
    """The same error for the matrix nearest to P, of every rank from 0 to min(T, S).

    All come from one decomposition. The parts of ``P w`` along different left singular
    vectors are orthogonal, so the error at a rank is the root of the sum of the squares
    of the parts left out.

    Args:
      weights, values: as in `projection_error`.

    Returns:
      float64 `[..., min(T, S) + 1, H]`; 0 where ``P w`` is zero.

    Raises:
      ValueError: as `projection_error`.

    Examples:
      >>> truncation_errors(np.diag([4.0, 3.0]), [[1.0], [1.0]])
      array([[1. ],
             [0.6],
             [0. ]])
    """
    weights, values = np.asarray(weights, np.float64), np.asarray(values, np.float64)
    _, sizes, right = np.linalg.svd(weights, full_matrices=False)
    parts = (sizes[..., None] * (right @ values)) ** 2
    left_out = np.cumsum(parts[..., ::-1, :], -2)[..., ::-1, :]
    errors = np.sqrt(np.concatenate([left_out, 0 * parts[..., :1, :]], -2))
    return _quotient(errors, np.linalg.norm(weights @ values, axis=-2)[..., None, :])


def projection_bound(rank: int, length: int) -> float:
    """The error e allowed by Theorem 1 at a rank ``k = 5 ln(n) / (e^2 - e^3)``.

    It holds for a fixed column with a probability that tends to 1 as n grows.

    Args:
      rank: the paper's k.
      length: n.

    Returns:
      e in (0, 2/3]; NaN if the rank is too small for any e: below ``33.75 ln(n)``.

    Raises:
      ValueError: a rank below 1, or a length below 2.

    Examples:
      >>> round(projection_bound(rank=1024, length=512), 3)
      0.194
    """
    check_size("rank", rank)
    check_size("length", length, lowest=2)
    needed = 5 * math.log(length) / rank
    roots = np.roots([-1.0, 1.0, 0.0, -needed])
    real = roots[np.abs(roots.imag) < 1e-9].real
    errors = real[(real > 0) & (real <= 2 / 3 + 1e-9)]
    return float(errors.min()) if len(errors) else math.nan


def _quotient(error: np.ndarray, size: np.ndarray) -> np.ndarray:
    return np.where(size == 0, 0.0, error / np.where(size == 0, 1.0, size))
