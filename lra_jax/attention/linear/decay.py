"""The slopes of a decay with distance, for retention and lightning attention.

Weights are multiplied by ``exp(-slope |i - j|)``, with one slope per head. Only
differences of positions matter, so padding on the left changes nothing. The sums are
those of `lra_jax.attention.linear.core`.
"""

from collections.abc import Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import feature_maps
from lra_jax.attention.call import Call
from lra_jax.errors import expected

Slopes = jax.Array | np.ndarray | Sequence[float]


def check_slopes(
    slopes: Slopes | None, published: np.ndarray, dtype: jnp.dtype
) -> jax.Array:
    """The slopes `[N]`; None = the published ones.

    Raises:
      ValueError: not one per head, or one is known to be negative or infinite.
    """
    if slopes is None:
        return jnp.asarray(published, dtype)
    known = not isinstance(slopes, jax.core.Tracer)
    slopes = np.asarray(slopes) if known else slopes
    if slopes.shape != published.shape:
        raise expected(
            "slopes", f"one for each head, [N]={published.shape}", slopes.shape
        )
    if known and not slopes.min() >= 0:
        raise expected(
            "slopes", "none below zero, because weights would grow", slopes.min()
        )
    if known and slopes.max() == np.inf:
        raise expected("slopes", "finite numbers", slopes.max())
    return jnp.asarray(slopes, dtype)


def kernel_refusal(call: Call, slopes: Slopes | None) -> kernels.Refusal | None:
    """The argument that kernels do not support; None = they support all.

    Kernels have no gradient of the slopes, so the slopes must be known.
    """
    if isinstance(slopes, jax.core.Tracer):
        return "slopes", "known numbers, because they get no gradient", "a tracer"
    length, keys = call.query.shape[1], call.key.shape[1]
    if length != keys:
        return "key", f"the query's length T={length}", f"{keys}"
    return None


def spread(
    slopes: jax.Array, length: int, first: jax.Array, last: jax.Array | None
) -> jax.Array:
    """``sum_j exp(-slope |i - j|)`` for every query i, `[B or 1, N, T]`.

    Args:
      slopes: `[N]`.
      length: T.
      first: the first j, `[B or 1, T or 1]`; negative if in an earlier part.
      last: the last j, `[B or 1, T or 1]`; None = i itself.
    """
    places = jnp.arange(length, dtype=jnp.int32)[None]
    if last is None:
        return _geometric(slopes, jnp.maximum(places - first + 1, 1))
    until = jnp.minimum(places, last) - first + 1
    after = last - jnp.maximum(places, first - 1)
    total = _geometric(slopes, until, jnp.maximum(places - last, 0))
    total += _geometric(slopes, after, jnp.maximum(first - places, 1))
    # The sum nearly vanishes for queries far after the last key, and without any keys.
    # A floor keeps divisions by its root finite, including in gradients.
    return feature_maps.at_least(total, 1e-20)


def _geometric(
    slopes: jax.Array, terms: jax.Array, distance: jax.Array | None = None
) -> jax.Array:
    """``exp(-slope distance) sum_{d < terms} exp(-slope d)``, `[B or 1, N, T]`."""
    slopes = slopes[None, :, None]
    count = jnp.maximum(terms, 0).astype(slopes.dtype)[:, None]
    # Near a slope of 0 the quotient's derivative loses its digits, and at 0 there is
    # none: the sum's Taylor series replaces it there.
    far = slopes * count > jnp.finfo(slopes.dtype).eps ** 0.25
    rates, near = jnp.where(far, slopes, 1), jnp.where(far, 0, slopes)
    quotient = jnp.expm1(-rates * count) / jnp.expm1(-rates)
    rest = 1 - near * (2 * count - 1) / 6 + jnp.square(near) * count * (count - 1) / 12
    series = count * (1 - near * (count - 1) / 2 * rest)
    total = jnp.where(far, quotient, series)
    if distance is None:
        return total
    return total * jnp.exp(-slopes * distance.astype(slopes.dtype)[:, None])
