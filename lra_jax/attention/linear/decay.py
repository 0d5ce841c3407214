"""Linear attention with a decay, the basis of retention and lightning attention.

``out_i = sum_j exp(-slope |i - j|) (phi(q_i) . phi(k_j)) v_j``, with one slope per
head. The causal engine computes the causal sum over j <= i. The two-sided form adds the
same sum over the reversed sequence, for the keys after each query: linear in the
length, each pair counted once, nothing subtracted.

Positions count from 0 in both queries and keys, whose lengths may differ. Only
differences of positions matter, so padding on the left changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import feature_maps, masking
from lra_jax.attention.causal import documents, engine, fades
from lra_jax.attention.causal.both_ends import from_both_ends
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import decayed, so_far
from lra_jax.attention.linear.sums import Sums, over_chunks, started
from lra_jax.errors import expected

Slopes = jax.Array | np.ndarray | Sequence[float]


def checked_slopes(
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


def kernel_refusal(
    query: jax.Array, key: jax.Array, slopes: Slopes | None
) -> kernels.Refusal | None:
    """The argument that kernels do not support; None = they support all.

    They have no gradient of the slopes, so these have to be known.
    """
    if isinstance(slopes, jax.core.Tracer):
        return "slopes", "known numbers, because they get no gradient", "a tracer"
    if query.shape[1] != key.shape[1]:
        return "key", f"the query's length T={query.shape[1]}", f"{key.shape[1]}"
    return None


def sums(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array,
    is_causal: bool,
    *,
    mask: jax.Array | None,
    resets: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "identity",
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes ``sum_j w(i, j) v_j`` and ``sum_j w(i, j)``, in the slopes' dtype.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      slopes: `[N]`, float32 or float64.
      is_causal: sums over j <= i instead of all j.
      mask: the real keys, `[B, S]`; None = all.
      resets: where documents start, `[B, T]`; None = one per row.
      feature_map: phi.
      chunking: how the sequence is cut.
      precision: of the matrix products.

    Returns:
      `[B, T, N, Hv]` and `[B, T, N]`.
    """
    arguments = {"feature_map": feature_map, "precision": precision}
    rest: dict[str, Any] = {
        "resets": resets,
        "chunking": chunking,
        "dtype": slopes.dtype,
    }
    if is_causal:
        form, start, arrays = _form(query, key, value, slopes, mask, **arguments)
        return engine.run(form, start, arrays, mask=mask, **rest)[0]
    length, longest = query.shape[1], max(query.shape[1], key.shape[1])
    if mask is None and key.shape[1] < longest:
        mask = jnp.ones(key.shape[:2], bool)
    query, key, value = (engine.filled(x, longest) for x in (query, key, value))
    mask = None if mask is None else engine.filled(mask, longest)
    form, start, arrays = _form(query, key, value, slopes, mask, **arguments)
    until, after = from_both_ends(form, start, arrays, mask=mask, **rest)
    step = jnp.exp(-slopes)[None, None]
    numerator = until[0] + after[0] * step[..., None]
    denominator = until[1] + after[1] * step
    return numerator[:, :length], denominator[:, :length]


def prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array,
    *,
    mask: jax.Array | None,
    resets: jax.Array | None = None,
    state: Sums | None,
    feature_map: feature_maps.FeatureMap = "identity",
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[tuple[jax.Array, jax.Array], Sums]:
    """The causal `sums`, and the state after each sample's last real position.

    After that position nothing decays.

    Raises:
      ValueError: the state does not fit.
    """
    ends = None if mask is None else masking.next_position(mask, *mask.shape)
    form, start, arrays = _form(
        query,
        key,
        value,
        slopes,
        mask,
        ends,
        state,
        feature_map=feature_map,
        precision=precision,
    )
    return engine.run(
        form,
        start,
        arrays,
        mask=mask,
        resets=resets,
        chunking=chunking,
        dtype=slopes.dtype,
    )


def _form(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slopes: jax.Array,
    mask: jax.Array | None,
    ends: jax.Array | None = None,
    state: Sums | None = None,
    *,
    feature_map: feature_maps.FeatureMap,
    precision: jax.lax.PrecisionLike,
) -> tuple[engine.Form, Sums, engine.Arrays]:
    """The causal form, the state before it (None = an empty one), and its arrays.

    Nothing decays from ``ends`` `[B]` on, one past each sample's last real position.
    """
    dtype = slopes.dtype
    places = jnp.arange(query.shape[1], dtype=jnp.int32)[None, :, None]
    log_decay = fades.bounded(-slopes)[None, None] * jnp.ones_like(places, dtype)
    if ends is not None:
        before = places < ends[:, None, None]
        log_decay = jnp.where(before, log_decay, 0)
    options = feature_maps.Options(feature_map, dtype, precision)
    arrays = engine.Arrays(query, key, value, log_decay)
    options, start, arrays = started(options, arrays, state, mask=mask)
    return engine.Form(prepared, _segment, options), start, arrays


def prepared(
    options: Any,
    arrays: engine.Arrays,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """`feature_maps.prepared`, and the logarithm of each position's decay."""
    features = feature_maps.prepared(options, arrays, mask, query_mask)
    return *features, jnp.swapaxes(jnp.asarray(arrays.log_decay), 1, 2)


def _segment(
    options: feature_maps.Options,
    state: Sums,
    features: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    _: None,
    found: Documents | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Sums]:
    """One segment, see `engine.Form`: numerators, denominators and the state after.

    Only differences within a chunk and the decays of whole chunks are exponentiated;
    none of these is positive, so nothing can overflow.
    """
    query, key, value, log_decay = features
    precision = options.precision
    fade = so_far(log_decay)
    end = fade[..., -1]
    scores = jnp.einsum("bnpim,bnpjm->bnpij", query, key, precision=precision)
    near = fade[..., None] - fade[..., None, :]
    scores = scores * decayed(near, documents.visible(scores.shape[-1], found))
    query = documents.readers(query * jnp.exp(fade)[..., None], found)
    key = documents.stayers(key * jnp.exp(end[..., None] - fade)[..., None], found)
    left = documents.decay(end, found, key.dtype)
    return over_chunks(
        state, scores, query, key, value, decay=left, precision=precision
    )


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
