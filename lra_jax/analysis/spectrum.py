"""How much of an attention matrix lies in a few directions (Wang et al. 2020,
"Linformer", Figure 1).

The paper's curve is the sum of the k largest singular values over the sum of all, not
of their squares, averaged over sentences.
"""

import numpy as np
from numpy.typing import ArrayLike

from lra_jax.errors import expected


def cumulative_spectrum(weights: ArrayLike) -> np.ndarray:
    """Sums of the k largest singular values, k = 1 .. min(T, S), over the sum of all.

    Args:
      weights: attention matrices `[..., T, S]`, with any entries.

    Returns:
      float64 `[..., min(T, S)]`, rising to 1. A matrix of zeros, which any number of
      values explains, gives ones.

    Raises:
      ValueError: fewer than two axes, or values that are not finite.

    Examples:
      >>> cumulative_spectrum(np.diag([3.0, 1.0]))
      array([0.75, 1.  ])
    """
    sums = np.cumsum(_singular_values(weights), -1)
    whole = sums[..., -1:]
    return np.where(whole == 0, 1.0, sums / np.where(whole == 0, 1.0, whole))


def effective_rank(weights: ArrayLike, fraction: float | None = None) -> np.ndarray:
    """The number of directions that a matrix effectively uses.

    Args:
      weights: attention matrices `[..., T, S]`.
      fraction: None for ``exp(entropy(s / sum(s)))`` of the singular values s (Roy and
        Vetterli 2007), a real number between 1 and min(T, S); or a number in (0, 1]
        for the least k such that the k largest values sum to that share of the total.

    Returns:
      float64 `[...]`; 0 for a matrix of zeros.

    Raises:
      ValueError: the fraction is out of range, or as in `cumulative_spectrum`.

    Examples:
      >>> effective_rank(np.eye(8)), effective_rank(np.full((8, 8), 1 / 8))
      (array(8.), array(1.))
    """
    if fraction is not None and not 0 < fraction <= 1:
        raise expected("fraction", "None or a number in (0, 1]", fraction)
    values = _singular_values(weights)
    whole = values.sum(-1, keepdims=True)
    shares = values / np.where(whole == 0, 1.0, whole)
    if fraction is None:
        logs = np.log(np.where(shares > 0, shares, 1.0))
        ranks = np.exp(-(shares * logs).sum(-1))
    else:
        # The last sum may fall short of 1 by rounding.
        enough = np.cumsum(shares, -1) >= fraction - 1e-12
        ranks = enough.argmax(-1) + 1.0
    return np.where(whole[..., 0] == 0, 0.0, ranks)


def _singular_values(weights: ArrayLike) -> np.ndarray:
    weights = np.asarray(weights, np.float64)
    if weights.ndim < 2 or 0 in weights.shape[-2:]:
        raise expected("weights", "[..., T, S]", weights.shape)
    if not np.isfinite(weights).all():
        raise expected("weights", "finite numbers", "infinite or NaN ones")
    return np.linalg.svd(weights, compute_uv=False)
