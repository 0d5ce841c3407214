"""A short convolution along the sequence, one filter for each column."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax import kernels
from lra_jax.attention.inputs import Grid, accumulation_dtype, check_shape
from lra_jax.models.layers import at_positions


class ShortConv(nnx.Module):
    """``y_t = b + sum_j w_j x_(t + j)``, for each column separately.

    Without ``is_causal`` the window is centred, ``-(size // 2) <= j < (size + 1) // 2``
    (one more position on the left if the size is even); with it, ``-size < j <= 0``.
    Masked positions, and those beyond either end, count as zeros, so padding does not
    change a sequence's output.

    With ``grid``, positions are the pixels of an image read row by row, and the window
    is a square of ``size`` by ``size`` pixels.

    Source: linear attention with short convolutions, as in fla-org's
    flash-linear-attention and in Poli et al. 2023 (Hyena).

    Args:
      features: number of columns.
      size: positions in the window.
      is_causal: look back only; not with a grid.
      grid: rows and columns of the images; None = sequences.
      rngs: for initialisation (uniform in +-1 / sqrt(positions in the window), zero
        bias).
    """

    def __init__(
        self,
        features: int,
        size: int,
        *,
        is_causal: bool = False,
        grid: Grid = None,
        rngs: nnx.Rngs,
    ):
        window = (size,) if grid is None else (size, size)
        bound = math.prod(window) ** -0.5
        draw = nnx.initializers.uniform(2 * bound)
        weights = draw(rngs.params(), (*window, features), jnp.float32)
        self.kernel = nnx.Param(weights - bound)
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.before = size - 1 if is_causal else size // 2
        self.grid = grid

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        label: jax.Array | None = None,
    ) -> jax.Array:
        """`[B, T, C]` to `[B, T, C]`; ``mask`` `[B, T]` is True at real positions.

        ``label`` `[B, T]` numbers packed documents, which do not mix.

        Raises:
          ValueError: T is not that of the grid.
        """
        if mask is not None:
            x = jnp.where(mask[:, :, None], x, 0)
        bias = at_positions(self.bias[...], x)
        if label is not None:
            return _within_documents(x, self.kernel[...], self.before, label) + bias
        kernel = self.kernel[...].astype(x.dtype)
        if self.grid is not None:
            check_shape("inputs", x, "B T D", None, math.prod(self.grid), None)
            return _within_image(x, kernel, self.before, self.grid) + bias
        out: Any = convolve(x, kernel, self.before)
        return out + bias


def _within_image(
    x: jax.Array, kernel: jax.Array, before: int, grid: tuple[int, int]
) -> jax.Array:
    """The sum of the image's rows after `convolve`; the kernel is `[J, J, C]`."""
    batch, _, width = x.shape
    rows, columns = grid
    size = kernel.shape[0]
    edges = [(0, 0), (before, size - 1 - before), (0, 0), (0, 0)]
    image = jnp.pad(x.reshape(batch, rows, columns, width), edges)
    total: Any = jnp.zeros((), x.dtype)
    for first, taps in enumerate(kernel):
        near = image[:, first : first + rows].reshape(batch * rows, columns, width)
        total = total + convolve(near, taps, before)
    # In two steps, for a batch that is split on explicit axes.
    return total.reshape(batch, rows, columns, width).reshape(x.shape)


def _within_documents(
    x: jax.Array, kernel: jax.Array, before: int, label: jax.Array
) -> jax.Array:
    """`convolve` within each document, summed in float32 or wider; gradients, too, by
    autodiff."""
    label, wide = label[:, :, None], accumulation_dtype(x)
    taps = zip(
        kernel,
        _shifts(x, len(kernel), before),
        _shifts(label, len(kernel), before),
        strict=True,
    )
    terms = (
        jnp.where(other == label, near.astype(wide), 0) * row.astype(wide)[None, None]
        for row, near, other in taps
    )
    return sum(terms, start=jnp.zeros((), wide)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(x: jax.Array, kernel: jax.Array, before: int) -> jax.Array:
    """``sum_j kernel_j x_(t + j - before)``: `[B, T, C]` and `[J, C]` -> `[B, T, C]`.

    A sum of shifted arrays, which fuses into one loop. So do the gradients written out
    here: on a CPU those derived by XLA are slower, and a grouped convolution is much
    slower (docs/performance.md). ``jax.jvp`` raises TypeError.
    """
    shifts, rows = _shifts(x, len(kernel), before), kernel[:, None, None]
    terms = (near * row for near, row in zip(shifts, rows, strict=True))
    return sum(terms, start=jnp.zeros((), x.dtype))


def _forward(
    x: jax.Array, kernel: jax.Array, before: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return convolve(x, kernel, before), (x, kernel)


def _backward(
    before: int, kept: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    # Otherwise the gradient's inputs are recomputed for every shift.
    grad = jax.lax.optimization_barrier(grad)
    of_x: Any = convolve(grad, kernel[::-1], kernel.shape[0] - 1 - before)
    sums = kernels.by_sample(functools.partial(_of_taps, len(kernel), before), x, grad)
    return of_x, sums.sum(0).astype(kernel.dtype)


def _of_taps(size: int, before: int, x: jax.Array, grad: jax.Array) -> jax.Array:
    """The gradient of the kernel, `[1, J, C]`, in float32 or wider."""
    wide = accumulation_dtype(x)

    def products(near: jax.Array, slope: jax.Array) -> list[jax.Array]:
        slope = slope.astype(wide)
        return [shift.astype(wide) * slope for shift in _shifts(near, size, before)]

    if jax.default_backend() != "cpu":
        return jnp.stack([x.sum((0, 1)) for x in products(x, grad)])[None]

    def add(
        sums: list[jax.Array], row: tuple[jax.Array, jax.Array]
    ) -> tuple[list[jax.Array], None]:
        added = products(*(x[None] for x in row))
        return [total + one[0] for total, one in zip(sums, added, strict=True)], None

    # Sample by sample, so that the sums stay in a CPU's caches.
    start = [jnp.zeros_like(x[0], wide)] * size
    sums, _ = jax.lax.scan(add, start, (x, grad))
    return jnp.stack([total.sum(0) for total in sums])[None]


convolve.defvjp(_forward, _backward)


def _shifts(x: jax.Array, size: int, before: int) -> list[jax.Array]:
    """``x_(t + j - before)`` for each j of ``size``, zero beyond the ends."""
    length = x.shape[1]
    padded = jnp.pad(x, ((0, 0), (before, size - 1 - before), (0, 0)))
    return [padded[:, tap : tap + length] for tap in range(size)]
