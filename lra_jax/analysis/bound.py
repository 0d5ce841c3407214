"""The collapse of pure attention, bounded (Dong, Cordonnier and Loukas 2021, Theorems
2.2 and 2.3)."""

import math

import numpy as np
from numpy.typing import ArrayLike

from lra_jax.analysis.residual import composite_norm
from lra_jax.attention.inputs import check_eps, check_size


def collapse_bound(
    residual_norm: float,
    depth: int,
    *,
    beta: float,
    head_dim: int,
    num_heads: int = 1,
    gamma: float = 1.0,
    lipschitz: float = 1.0,
) -> float:
    """Computes ``(4 gamma beta H l / sqrt(d))^((3^L - 1) / 2) ||res(X)||^(3^L)``.

    An upper bound on ``||res(SAN(X))||`` after L layers of pure attention: it falls
    doubly exponentially if ``4 gamma beta H l ||res(X)||^2 < sqrt(d)``; otherwise it
    grows and is of no use.

    Args:
      residual_norm: ``||res(X)||`` of the input, in the composite norm.
      depth: L; 0 returns ``residual_norm``.
      beta: bounds ``||W_QK||_1 ||W_V||`` of every layer; see `collapse_beta`.
      head_dim: d, the width of the queries and keys.
      num_heads: H.
      gamma: depends on the entries of the attention matrices; the paper's first version
        omits it (gamma = 1).
      lipschitz: l, of the MLP between the layers; 1 without one.

    Returns:
      The bound; infinity if it exceeds the largest float, 0 if below the smallest.

    Raises:
      ValueError: a negative or non-finite argument, or a size that is not positive.

    Examples:
      >>> [collapse_bound(0.5, depth, beta=1.0, head_dim=64) for depth in range(4)]
      [0.5, 0.0625, 0.00012207031250000008, 9.094947017729282e-13]
    """
    check_eps(residual_norm, "residual_norm")
    for name, factor in {"beta": beta, "gamma": gamma, "lipschitz": lipschitz}.items():
        check_eps(factor, name)
    check_size("depth", depth, lowest=0)
    check_size("head_dim", head_dim)
    check_size("num_heads", num_heads)
    base = 4 * gamma * beta * num_heads * lipschitz / math.sqrt(head_dim)
    if residual_norm == 0 or (base == 0 and depth > 0):
        return 0.0
    # In logarithms, because either factor alone may be out of range. A float holds
    # 3^600, and the bound is out of range long before.
    power = 3 ** min(depth, 600)
    log = power * math.log(residual_norm)
    if depth > 0:
        log += (power - 1) // 2 * math.log(base)
    return math.exp(log) if log < 709 else math.inf


def collapse_beta(
    query_kernel: ArrayLike, key_kernel: ArrayLike, value_kernel: ArrayLike
) -> float:
    """The smallest beta for `collapse_bound` with given projections.

    ``max ||W_Q W_K^T||_1 ||W_V||`` over layers and heads, where the first norm is the
    largest column sum of absolute values and the second the composite norm.

    Args:
      query_kernel: W_Q, `[..., D, H]`, with any leading axes for layers and heads.
      key_kernel: W_K, of the same shape.
      value_kernel: W_V times the head's output projection, `[..., D, D]`.
    """
    query, key = np.asarray(query_kernel), np.asarray(key_kernel)
    products = np.abs(query.astype(np.float64) @ np.swapaxes(key, -1, -2))
    sizes = products.sum(-2).max(-1) * composite_norm(value_kernel)
    return float(sizes.max())
