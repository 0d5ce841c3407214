"""Linear attention with a decay, the part under retention and lightning attention.

``out_i = sum_j exp(-slope |i - j|) (phi(q_i) . phi(k_j)) v_j``, with one slope a head.
The causal sum over j <= i is the causal engine's. The two-sided one is that
sum, and the same over the reversed sequence for the keys behind each query: linear in
the length, each pair counted once, nothing subtracted.

Positions count from 0 in queries and keys alike, so that lengths may differ. Only
differences of positions matter: padding on the left moves nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import sums as causal

Slopes = jax.Array | np.ndarray | Sequence[float]


def checked_slopes(
    slopes: Slopes | None, published: np.ndarray, dtype: jnp.dtype
) -> jax.Array:
    """The slopes `[N]`; those published where None is given.

    Raises:
      ValueError: not one for each head, or a negative one, where it is known.
    """
    if slopes is None:
        return jnp.asarray(published, dtype)
    known = not isinstance(slopes, jax.core.Tracer)
    slopes = np.asarray(slopes) if known else slopes
    if slopes.shape != published.shape:
        raise ValueError(
            f"slopes: expected one for each head, [N]={published.shape}, "
            f"got shape {slopes.shape}"
        )
    if known and not slopes.min() >= 0:
        raise ValueError(
            f"slopes: expected none below zero, or weights grow, got {slopes.min()}"
        )
    return jnp.asarray(slopes, dtype)


def sums(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array,
    is_causal: bool,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """``sum_j w(i, j) v_j`` and ``sum_j w(i, j)``, heads first.

    Args:
      query: features `[B, N, T, M]`.
      key: features `[B, N, S, M]`, zero where hidden.
      value: `[B, N, S, Hv]`.
      slopes: `[N]`.
      is_causal: sums over j <= i instead of all j.
      **options: chunking and precision, as in `causal.causal_linear`.

    Returns:
      `[B, N, T, Hv]` and `[B, N, T]`.
    """
    if is_causal:
        arrays = (query, key, value)
        return causal.causal_linear(*arrays, slopes=slopes, **options)[:2]
    length, longest = query.shape[2], max(query.shape[2], key.shape[2])
    arrays = [_filled(x, longest) for x in (query, key, value)]
    *until, _state = causal.causal_linear(*arrays, slopes=slopes, **options)
    backward = [jnp.flip(x, 2) for x in arrays]
    # One step later, a key is no longer seen by its own query.
    backward[1:] = [_later(x) for x in backward[1:]]
    *after, _state = causal.causal_linear(*backward, slopes=slopes, **options)
    step = jnp.exp(-slopes)[None, :, None]
    numerator = until[0] + jnp.flip(after[0], 2) * step[..., None]
    denominator = until[1] + jnp.flip(after[1], 2) * step
    return numerator[:, :, :length], denominator[:, :, :length]


def weights(
    query: jax.Array,
    key: jax.Array,
    slopes: jax.Array,
    is_causal: bool,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """The dense ``w(i, j)``, `[B, N, T, S]`."""
    scores = feature_maps.products(query, key, precision)
    rows, columns = np.arange(query.shape[2]), np.arange(key.shape[2])
    distance = jnp.asarray(np.abs(rows[:, None] - columns), slopes.dtype)
    scores = scores * jnp.exp(-slopes[:, None, None] * distance[None])[None]
    return feature_maps.hide_future(scores) if is_causal else scores


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array,
    mask: jax.Array | None,
    start: causal.Sums | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array, causal.Sums]:
    """The causal `sums`, and the state after each sample's last real position.

    Rows behind that position decay no further.
    """
    ends = None
    if mask is not None:
        ends = inputs.next_position(mask, *mask.shape)
    return causal.causal_linear(
        query, key, value, slopes=slopes, ends=ends, start=start, **options
    )


def spread(
    slopes: jax.Array, length: int, first: jax.Array, last: jax.Array | None
) -> jax.Array:
    """``sum_j exp(-slope |i - j|)`` of every query i, `[B or 1, N, T]`.

    Args:
      slopes: `[N]`.
      length: T.
      first: `[B or 1]`, the first j; below zero if it lies in an earlier part.
      last: `[B or 1]`, the last j; None = i itself.
    """
    places, first = jnp.arange(length, dtype=jnp.int32)[None], first[:, None]
    if last is None:
        return _geometric(slopes, jnp.maximum(places - first + 1, 1))
    last = last[:, None]
    until = jnp.minimum(places, last) - first + 1
    after = last - jnp.maximum(places, first - 1)
    total = _geometric(slopes, until, jnp.maximum(places - last, 0))
    total += _geometric(slopes, after, jnp.maximum(first - places, 1))
    # Queries far behind a shorter row of keys, and samples without any, have nearly
    # none; a floor keeps what is divided by its root finite, gradients included.
    return feature_maps.at_least(total, 1e-20)


def _geometric(
    slopes: jax.Array, terms: jax.Array, distance: jax.Array | None = None
) -> jax.Array:
    """``exp(-slope distance) sum_{d < terms} exp(-slope d)``, `[B or 1, N, T]`."""
    slopes = slopes[None, :, None]
    count = jnp.maximum(terms, 0).astype(slopes.dtype)[:, None]
    moving = slopes > 0
    rates = jnp.where(moving, slopes, jnp.ones_like(slopes))
    total = jnp.where(moving, jnp.expm1(-rates * count) / jnp.expm1(-rates), count)
    if distance is None:
        return total
    return total * jnp.exp(-slopes * distance.astype(slopes.dtype)[:, None])


def _filled(x: jax.Array, length: int) -> jax.Array:
    """Appends zeros to `[B, N, T, ...]` up to a length."""
    missing = length - x.shape[2]
    return jnp.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else x


def _later(x: jax.Array) -> jax.Array:
    """`[B, N, T, M]` one position later; zeros come first, the last drops out."""
    return jnp.pad(x[:, :, :-1], [(0, 0), (0, 0), (1, 0), (0, 0)])
