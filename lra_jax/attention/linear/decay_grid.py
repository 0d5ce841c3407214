"""Decay with the distance in rows and columns, for sequences that are images.

``out_i = sum_j exp(-slope (|a_i - a_j| + |b_i - b_j|)) (q_i . k_j) v_j``, where i is at
row a_i and column b_i of an image read row by row: the Manhattan distance of Fan et al.
2024 ("RMT: Retentive Networks Meet Vision Transformers"). Their code builds the
matrix, or attends along one axis after the other, which is a different function. Here
the sum is exact, in bands of a few rows:

- pixels within a band interact as pairs;
- for the bands before, each column c keeps a state, ``S_c = sum exp(-slope (a - a_j))
  k_j v_j^T`` over its pixels j, where a is the last row before the band. A pixel reads
  ``exp(-slope (a_i - a)) q_i . sum_c exp(-slope |b_i - c|) S_c``: the sum over columns
  is computed once per column of a band, not once per pixel;
- the bands after are the bands before in the image rotated by 180 degrees.

So bands are the chunks of the causal engine, and a state has a column axis. With C
columns and bands of R rows, a pixel takes R C (H + Hv) products for its own band and
2 (C / R + 2) H Hv for the others. For all T pixels of a square image this grows as
T^1.5, while the matrix grows as T^2. The gradient keeps 2 T / R states of H Hv numbers.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention.causal import engine
from lra_jax.attention.causal.prefix import prefix
from lra_jax.attention.linear import decay
from lra_jax.attention.linear.sums import Sums, no_sums, row_sums

# Most rows in a band. The two parts of the cost are equal at sqrt(H) rows, which is 4
# for H = 16 and 8 for H = 64, but pairs take memory.
_BAND = 4


class _Options(NamedTuple):
    """`feature_maps.Options`, and those of a band."""

    feature_map: str
    dtype: Any
    precision: jax.lax.PrecisionLike
    columns: int
    own: bool  # whether a pixel sees its own band


def sums(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array,
    grid: tuple[int, int],
    *,
    mask: jax.Array | None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array]:
    """``sum_j w(i, j) v_j`` and ``sum_j w(i, j)``, in the slopes' dtype.

    Args:
      query: `[B, T, N, H]`, T = rows * columns.
      key: `[B, T, N, H]`; its heads may be a divisor of N.
      value: `[B, T, N, Hv]`.
      slopes: `[N]`, float32 or float64.
      grid: rows and columns.
      mask: the real keys, `[B, T]`; None = all.
      precision: of the matrix products.

    Returns:
      `[B, T, N, Hv]` and `[B, T, N]`.
    """
    rows, columns = grid
    # Bands of equal height, so that they are the same from both ends.
    band = max(x for x in range(1, _BAND + 1) if rows % x == 0)
    chunking = engine.Chunking(chunk=band * columns)
    log_decay = jnp.broadcast_to(-slopes, (1, rows * columns, len(slopes)))
    arrays = engine.Arrays(query, key, value, log_decay)

    def run(arrays: engine.Arrays, mask: jax.Array | None, own: bool) -> Any:
        options = _Options("identity", slopes.dtype, precision, columns, own)
        form = engine.Form(decay.prepared, _segment, options)
        nothing = no_sums(arrays, key.shape[-1], slopes.dtype)
        start = jax.tree.map(lambda x: jnp.repeat(x[:, :, None], columns, 2), nothing)
        return engine.run(
            form, start, arrays, mask=mask, chunking=chunking, dtype=slopes.dtype
        )[0]

    until = run(arrays, mask, True)
    backward, hidden = jax.tree.map(lambda x: jnp.flip(x, 1), (arrays, mask))
    after = run(backward, hidden, False)
    return jax.tree.map(lambda x, y: x + jnp.flip(y, 1), until, after)


def spread(slopes: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """``sum_j exp(-slope |i - j|)`` over the grid for every pixel i, `[1, N, T]`."""
    first = jnp.zeros((1, 1), jnp.int32)
    by_row, by_column = (
        decay.spread(slopes, size, first, first + size - 1) for size in grid
    )
    both = by_row[..., :, None] * by_column[..., None, :]
    return both.reshape(1, len(slopes), math.prod(grid))


def _segment(
    options: _Options,
    state: Sums,
    features: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    _: None,
) -> tuple[tuple[jax.Array, jax.Array], Sums]:
    """One segment, see `engine.Form`: numerators, denominators and the state after.

    The states are those at the last row of a band, `[B, N, columns, ...]`.
    """
    product = functools.partial(jnp.einsum, precision=options.precision)
    columns = options.columns
    rate = features[3][..., :1]
    places = np.arange(features[0].shape[-2])
    row, column = np.divmod(places, columns)

    def fading(distance: np.ndarray) -> jax.Array:
        """``exp(-slope distance)``, `[B, N, P, ...]`."""
        rates = rate.reshape(*rate.shape[:3], *[1] * distance.ndim)
        return jnp.exp(rates * jnp.asarray(distance, rate.dtype)[None, None, None])

    def by_column(x: jax.Array) -> jax.Array:
        """`[B, N, P, R C, M]` -> `[B, N, P, R, C, M]`."""
        return x.reshape(*x.shape[:3], -1, columns, x.shape[-1])

    query, key, value = features[:3]
    reader = by_column(query * fading(row + 1)[..., None])
    kept = by_column(key * fading(row[-1] - row)[..., None])
    updates = Sums(
        product("bnprcm,bnprcv->bnpcmv", kept, by_column(value)), kept.sum(3)
    )
    before, after = prefix(state, updates, rate[..., 0] * float(row[-1] + 1))
    across = fading(np.abs(np.subtract.outer(column[:columns], column[:columns])))
    near = Sums(
        product("bnpcd,bnpdmv->bnpcmv", across, before.summary),
        product("bnpcd,bnpdm->bnpcm", across, before.total),
    )
    numerator = product("bnprcm,bnpcmv->bnprcv", reader, near.summary)
    numerator = numerator.reshape(*value.shape)
    denominator = product("bnprcm,bnpcm->bnprc", reader, near.total)
    denominator = denominator.reshape(*query.shape[:-1])
    if options.own:
        apart = [np.abs(np.subtract.outer(x, x)) for x in (row, column)]
        scores = product("bnpim,bnpjm->bnpij", query, key) * fading(apart[0] + apart[1])
        numerator += product("bnpij,bnpjv->bnpiv", scores, value)
        denominator += row_sums(scores)
    return (numerator, denominator), after
