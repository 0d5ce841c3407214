"""The distance of a matrix from rank one with equal rows (Dong, Cordonnier and Loukas
2021, "Attention is not all you need").

``res(X) = X - 1 x^T``, measured in ``||X|| = sqrt(||X||_1 ||X||_inf)``: the geometric
mean of the largest column sum and the largest row sum of absolute values. It is not
strictly a norm: it does not satisfy the triangle inequality.

The paper uses the x that minimises ``||res(X)||``; its published code and figures, and
this module, use the mean of the rows, which minimises the Frobenius norm instead.

Everything is float64 on the host: a collapse to 1e-12 can be measured, if the hidden
states were computed to that precision.
"""

import numpy as np
from numpy.typing import ArrayLike

from lra_jax.errors import expected


def residual(x: ArrayLike, mask: ArrayLike | None = None) -> np.ndarray:
    """Computes ``X - 1 x^T`` over the tokens, x being the mean of the rows.

    Args:
      x: `[..., T, D]`.
      mask: boolean `[..., T]`, True = a real token; other rows are left out of all sums
        and set to zero.

    Returns:
      float64 `[..., T, D]`.

    Raises:
      ValueError: a mask of another shape or dtype.

    Examples:
      >>> residual([[1.0, 4.0], [3.0, 4.0]])
      array([[-1.,  0.],
             [ 1.,  0.]])
    """
    x, mask = _check(x, mask)
    count = np.maximum(mask.sum(-1), 1)
    middle = np.where(mask[..., None], x, 0.0).sum(-2) / count[..., None]
    return np.where(mask[..., None], x - middle[..., None, :], 0.0)


def composite_norm(x: ArrayLike) -> np.ndarray:
    """Computes ``sqrt(max_j sum_i |X_ij| max_i sum_j |X_ij|)`` of `[..., T, D]`.

    The published ``functions.py`` omits the root; the published figures include it.

    Examples:
      >>> composite_norm([[3.0, 0.0], [0.0, -12.0]])
      np.float64(12.0)
    """
    size = np.abs(np.asarray(x, np.float64))
    return np.sqrt(size.sum(-2).max(-1, initial=0) * size.sum(-1).max(-1, initial=0))


def relative_residual(x: ArrayLike, mask: ArrayLike | None = None) -> np.ndarray:
    """Computes ``||res(X)|| / ||X||``: 0 when all tokens are equal, about 1 when they
    share nothing.

    Arguments and errors are those of `residual`.

    Returns:
      float64 `[...]`; 0 for a matrix of zeros.

    Examples:
      >>> relative_residual([[1.0, 2.0], [1.0, 2.0]])  # Two equal tokens.
      np.float64(0.0)
    """
    x, mask = _check(x, mask)
    norm = composite_norm(np.where(mask[..., None], x, 0.0))
    rest = composite_norm(residual(x, mask))
    return rest / np.where(norm == 0, 1.0, norm)


def _check(x: ArrayLike, mask: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """float64 `[..., T, D]` and a boolean mask `[..., T]`."""
    x = np.asarray(x, np.float64)
    if mask is None:
        return x, np.ones(x.shape[:-1], bool)
    mask = np.asarray(mask)
    if mask.dtype != bool or mask.shape != x.shape[:-1]:
        raise expected("mask", f"bool {x.shape[:-1]}", f"{mask.dtype} {mask.shape}")
    return x, mask
