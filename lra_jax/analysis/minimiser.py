"""The row vector that is nearest to all rows in the composite norm, exactly.

``min_x f(x) g(x)`` with ``f(x) = max_j sum_i |X_ij - x_j|`` and ``g(x) = max_i sum_j
|X_ij - x_j|``. Both are convex and piecewise linear, so the Pareto-optimal pairs (f, g)
form a convex polygonal chain, each of whose corners is the solution of a linear
programme ``min a f + b g``. The product is concave along an edge, so its minimum is at
a corner. The corners are searched from the two ends inwards; edges below which nothing
better can lie are skipped.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_TOLERANCE = 1e-9


class _Corner(NamedTuple):
    columns: float  # f
    rows: float  # g
    x: np.ndarray

    @property
    def product(self) -> float:
        """The number to minimise, ``f(x) g(x)``."""
        return self.columns * self.rows


def composite_minimiser(matrix: np.ndarray) -> np.ndarray:
    """Returns the x `[D]` that minimises ``||X - 1 x^T||`` for X `[T, D]`.

    Cost: a few linear programs with T D variables.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.size == 0:
        return np.zeros(matrix.shape[1])
    # The solver's tolerances are absolute, so scale numbers to order one.
    shift = np.median(matrix, 0)
    scale = np.abs(matrix - shift).max()
    if scale == 0:
        return shift
    corner = _make_solver((matrix - shift) / scale)
    left, right = corner(1.0, 1e-7), corner(1e-7, 1.0)
    best = min(left, right, key=lambda corner: corner.product)
    edges = [(left, right)]
    while edges:
        left, right = edges.pop()
        # Every corner between the two has at least left's f and right's g.
        if left.columns * right.rows >= best.product * (1 - _TOLERANCE):
            continue
        a, b = left.rows - right.rows, right.columns - left.columns
        if a <= 0 or b <= 0:
            continue
        middle = corner(a, b)
        level = a * left.columns + b * left.rows
        if a * middle.columns + b * middle.rows >= level * (1 - _TOLERANCE):
            continue  # an edge of the polygon: no corner lies beyond it
        best = min(best, middle, key=lambda corner: corner.product)
        edges += [(left, middle), (middle, right)]
    return best.x * scale + shift


def _make_solver(matrix: np.ndarray) -> Callable[[float, float], _Corner]:
    """A function of a and b for the corner that minimises ``a f + b g``.

    The variables are x, f, g and u with ``u_ij >= |X_ij - x_j|``, column sums of u at
    most f and row sums at most g.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    rows, columns = matrix.shape
    cells = sparse.identity(rows * columns)
    to_x = sparse.kron(np.ones((rows, 1)), sparse.identity(columns))
    column_sums = sparse.kron(np.ones((1, rows)), sparse.identity(columns))
    row_sums = sparse.kron(sparse.identity(rows), np.ones((1, columns)))
    constraints = sparse.bmat(
        [
            [-to_x, None, None, -cells],  # X - x <= u
            [to_x, None, None, -cells],  # x - X <= u
            [None, -np.ones((columns, 1)), None, column_sums],
            [None, None, -np.ones((rows, 1)), row_sums],
        ],
        format="csr",
    )
    limits = np.concatenate([-matrix.ravel(), matrix.ravel(), np.zeros(columns + rows)])
    bounds = [(None, None)] * columns + [(0, None)] * (2 + rows * columns)

    def corner(a: float, b: float) -> _Corner:
        """Solves the linear programme."""
        cost = np.zeros(len(bounds))
        cost[columns], cost[columns + 1] = a, b
        solved = linprog(cost / cost.sum(), constraints, limits, bounds=bounds)
        if not solved.success:
            raise RuntimeError(f"the linear programme failed: {solved.message}")
        x = solved.x[:columns]
        size = np.abs(matrix - x)
        return _Corner(size.sum(0).max(), size.sum(1).max(), x)

    return corner
