"""Attention as a sum over paths (Dong, Cordonnier and Loukas 2021, Theorem 2.1).

A network of L attention layers with H heads and no MLP is

    SAN(X) = sum over (h_1 .. h_L) of P_path X W_path + remainder,
    P_path = P^L_{h_L} .. P^1_{h_1},   W_path = W^1_{h_1} .. W^L_{h_L},

where a head's W is its value times its output projection, and the remainder holds the
biases: a matrix of equal rows if the rows of every P sum to one. A skip connection adds
an identity branch to each layer, and with it paths of every length.

There are H^L paths, (H + 1)^L with skips: exact for small networks, sampled for others.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lra_jax.attention.inputs import check_shape, check_size
from lra_jax.errors import expected

SKIPPED = -1
_MOST_PATHS = 100_000


class Paths(NamedTuple):
    """The result of `path_decomposition`, in float64.

    Attributes:
      paths: the head that each path takes in each layer, `int [P, L]`; -1 = skipped.
      terms: their contributions `[P, T, D]`.
      remainder: what the biases contribute, `[T, D]`.
      num_paths: number of paths in the whole network, of which P are included.
    """

    paths: np.ndarray
    terms: np.ndarray
    remainder: np.ndarray
    num_paths: int

    @property
    def lengths(self) -> np.ndarray:
        """Attention layers on each path, `int [P]`."""
        return (self.paths != SKIPPED).sum(1)

    def total(self) -> np.ndarray:
        """The network's output `[T, D]`: exact, or an unbiased estimate if the paths
        are a sample."""
        scale = self.num_paths / len(self.paths)
        return self.terms.sum(0) * scale + self.remainder


def path_decomposition(
    x: ArrayLike,
    weights: ArrayLike,
    kernels: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    skip: bool = False,
    num_samples: int | None = None,
    seed: int = 0,
) -> Paths:
    """Computes the contribution of every path, or of a sample of them.

    The attention matrices are those of the network on this input; the decomposition
    takes them as given and is linear in x.

    Args:
      x: `[T, D]`, the input of the first layer.
      weights: attention matrices P, `[L, H, T, T]`.
      kernels: each head's value times output projection W, `[L, H, D, D]`.
      bias: of each layer's output, `[L, D]`: output bias plus value bias times output
        projection (exact if the rows of P sum to one).
      skip: the layers have skip connections.
      num_samples: paths to draw, uniformly and with replacement; None = all of them.
      seed: of that draw.

    Raises:
      ValueError: shapes do not fit, or over 100,000 paths and no ``num_samples``.

    Examples:
      >>> rng = np.random.default_rng(0)
      >>> x, weights = rng.normal(size=(5, 4)), np.full((2, 3, 5, 5), 1 / 5)
      >>> kernels = rng.normal(size=(2, 3, 4, 4))
      >>> network = path_decomposition(x, weights, kernels, skip=True)
      >>> network.num_paths  # Three heads or none, in each of two layers.
      16
      >>> for layer in range(2):
      ...     x = x + sum(weights[layer, h] @ x @ kernels[layer, h] for h in range(3))
      >>> bool(np.allclose(network.total(), x))
      True
    """
    x, weights, kernels, bias = _check(x, weights, kernels, bias)
    num_layers, num_heads = weights.shape[:2]
    branches = list(range(num_heads)) + [SKIPPED] * skip
    num_paths = len(branches) ** num_layers
    if num_samples is not None:
        check_size("num_samples", num_samples)
        rng = np.random.default_rng(seed)
        paths = rng.choice(branches, size=(num_samples, num_layers))
    elif num_paths > _MOST_PATHS:
        number = f"an int for more than {_MOST_PATHS} paths ({num_paths})"
        raise expected("num_samples", number, None)
    else:
        grid = np.meshgrid(*[branches] * num_layers, indexing="ij")
        paths = np.stack(grid, -1).reshape(-1, num_layers)
    terms = np.stack([_walk(x, weights, kernels, path) for path in paths])
    remainder = _remainder(x, weights, kernels, bias, skip)
    return Paths(paths, terms, remainder, num_paths)


def path_length_distribution(num_layers: int, num_heads: int) -> np.ndarray:
    """The share of paths of each length 0..L in a network with skip connections.

    ``C(L, k) H^k / (1 + H)^L``, float64 `[L + 1]`.

    Raises:
      ValueError: a size is not positive.

    Examples:
      >>> path_length_distribution(num_layers=2, num_heads=1)
      array([0.25, 0.5 , 0.25])
    """
    check_size("num_layers", num_layers)
    check_size("num_heads", num_heads)
    num_paths = (1 + num_heads) ** num_layers
    # Python's integers are exact, whatever the number of paths.
    counts = [math.comb(num_layers, k) * num_heads**k for k in range(num_layers + 1)]
    return np.array([count / num_paths for count in counts])


def _walk(
    x: np.ndarray, weights: np.ndarray, kernels: np.ndarray, path: np.ndarray
) -> np.ndarray:
    for layer, head in enumerate(path):
        if head != SKIPPED:
            x = weights[layer, head] @ x @ kernels[layer, head]
    return x


def _remainder(
    x: np.ndarray,
    weights: np.ndarray,
    kernels: np.ndarray,
    bias: np.ndarray,
    skip: bool,
) -> np.ndarray:
    """The network's output for zeros: the biases, passed through the layers above."""
    rest = np.zeros_like(x)
    for matrices, products, row in zip(weights, kernels, bias, strict=True):
        heads = np.einsum("hts,sd,hde->te", matrices, rest, products, optimize=True)
        rest = rest * skip + heads + row
    return rest


def _check(
    x: ArrayLike, weights: ArrayLike, kernels: ArrayLike, bias: ArrayLike | None
) -> tuple[np.ndarray, ...]:
    x, weights, kernels = (np.asarray(a, np.float64) for a in (x, weights, kernels))
    check_shape("x", x, "T D", None, None)
    length, width = x.shape
    check_shape("weights", weights, "L H T T", None, None, length, length)
    layers, heads = weights.shape[:2]
    check_shape("kernels", kernels, "L H D D", layers, heads, width, width)
    bias = np.zeros((layers, width)) if bias is None else np.asarray(bias, np.float64)
    check_shape("bias", bias, "L D", layers, width)
    return x, weights, kernels, bias
