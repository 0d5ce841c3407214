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
      ValueError: values that are not finite.

    Examples:
      >>> cumulative_spectrum(np.diag([3.0, 1.0]))
      array([0.75, 1.  ])
    """
    sums = np.cumsum(_singular_values(weights), -1)
    total = sums[..., -1:]
    return np.where(total == 0, 1.0, sums / np.where(total == 0, 1.0, total))


def effective_rank(weights: ArrayLike) -> np.ndarray:
    """The number of directions that a matrix effectively uses.

    ``exp(entropy(s / sum(s)))`` of the singular values s (Roy and Vetterli 2007).

    Args:
      weights: attention matrices `[..., T, S]`.

    Returns:
      float64 `[...]`, between 1 and min(T, S); 0 for a matrix of zeros.

    Raises:
      ValueError: as in `cumulative_spectrum`.

    Examples:
      >>> effective_rank(np.eye(8)), effective_rank(np.full((8, 8), 1 / 8))
      (array(8.), array(1.))
    """
    values = _singular_values(weights)
    total = values.sum(-1, keepdims=True)
    shares = values / np.where(total == 0, 1.0, total)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    ranks = np.exp(-(shares * logs).sum(-1))
    return np.where(total[..., 0] == 0, 0.0, ranks)


def spectral_gap(weights: ArrayLike) -> np.ndarray:
    """``1 - s_2 / s_1`` of matrices `[..., T, S]`: 1 where the rank is at most one.

    For random stochastic matrices it grows with the length (Nait Saada et al. 2025).

    Examples:
      >>> float(spectral_gap(np.diag([4.0, 1.0])))
      0.75
    """
    values = _singular_values(weights)
    first = np.where(values[..., 0] == 0, 1.0, values[..., 0])
    return 1 - values[..., 1:2].sum(-1) / first


def attention_sink(weights: ArrayLike) -> np.ndarray:
    """The largest mean share of the queries' attention that one key of `[..., T, S]`
    receives, between 1 / S and 1; of negative weights their sizes count.

    Examples:
      >>> float(attention_sink([[1.0, 0.0], [0.5, 0.5]]))
      0.75
    """
    sizes = np.abs(np.asarray(weights, np.float64))
    sums = sizes.sum(-1, keepdims=True)
    return (sizes / np.where(sums == 0, 1.0, sums)).mean(-2).max(-1)


def _singular_values(weights: ArrayLike) -> np.ndarray:
    weights = np.asarray(weights, np.float64)
    if not np.isfinite(weights).all():
        raise expected("weights", "finite numbers", "infinite or NaN ones")
    return np.linalg.svd(weights, compute_uv=False)
