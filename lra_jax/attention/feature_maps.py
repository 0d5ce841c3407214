"""Steps that several mechanisms share.

Kernelised attention writes a weight as an inner product of features,
``phi(q_i) . phi(k_j)``. Then ``sum_j phi(q_i) . phi(k_j) v_j`` is
``phi(q_i)^T (sum_j phi(k_j) v_j^T)``: the bracket is summed once for all queries, and
the cost is linear in both lengths. The feature width M may differ from the head width.

Inside the mechanisms the heads come first, `[B, N, T, M]`: batched products then see
each head as a plain matrix, and the single transposition works on H columns, before
any map widens them (docs/performance.md).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import inputs, masking
from lra_jax.errors import expected

FeatureMap = str | Callable[[jax.Array], jax.Array]


def _elu_plus_one(x: jax.Array) -> jax.Array:
    # exp(x) itself where x < 0: elu(x) = exp(x) - 1 has lost its digits. Positive
    # numbers do not reach the exponential, where they could overflow.
    negative = jnp.exp(jnp.where(x > 0, 0, x))
    return jnp.where(x > 0, x + 1, negative)


def _relu_plus_eps(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x) + 1e-6


def _identity(x: jax.Array) -> jax.Array:
    return x


# jax.nn.relu has gradient 0 at 0; jnp.maximum(x, 0) would give 0.5.
FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": _elu_plus_one,
    "identity": _identity,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "relu+1e-6": _relu_plus_eps,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
}


def feature_map(spec: FeatureMap) -> Callable[[jax.Array], jax.Array]:
    """Returns a feature map by name ("elu" is elu(x) + 1), or the callable itself."""
    if callable(spec):
        return spec
    if not isinstance(spec, str) or spec not in FEATURE_MAPS:
        choices = f"one of {sorted(FEATURE_MAPS)} or a function of one array"
        raise expected("feature_map", choices, f"{spec!r}")
    return FEATURE_MAPS[spec]


def for_kernels(spec: FeatureMap) -> FeatureMap:
    """The name of a feature map that kernels implement, otherwise the function."""
    known = isinstance(spec, str) and spec in kernels.FEATURE_MAPS
    return spec if known else feature_map(spec)


def features(
    query: jax.Array,
    key: jax.Array,
    spec: FeatureMap,
    dtype: jnp.dtype,
    mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """phi(q) and phi(k), `[B, N, T, M]`, zero where hidden."""
    phi = feature_map(spec)
    num_heads = query.shape[2]
    query_features = phi(masking.by_head(query, num_heads, query_mask, dtype))
    key_features = phi(masking.by_head(key, num_heads, mask, dtype))
    # Hidden again after the map, because phi(0) may not be zero.
    return (
        masking.hide_by_head(query_features, query_mask),
        masking.hide_by_head(key_features, mask),
    )


class Options(NamedTuple):
    """How a causal form computes its features; compared by value."""

    feature_map: FeatureMap
    dtype: Any  # of the computation
    precision: jax.lax.PrecisionLike = None


def prepare(
    options: Any, arrays: Any, tables: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """phi(q), phi(k) and v of one segment, heads first, zero where hidden.

    The ``prepare`` of a causal `Form`; ``options`` has the fields of `Options`.
    """
    query, key, value = arrays[:3]
    phi, dtype = options.feature_map, options.dtype
    pair = features(query, key, phi, dtype, tables.mask, tables.query_mask)
    return *pair, masking.by_head(value, query.shape[2], tables.mask, dtype)


def apply_custom(
    query: jax.Array,
    key: jax.Array,
    spec: FeatureMap,
    dtype: jnp.dtype,
    mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, str]:
    """Query, key, and the name of the feature map still to be applied in the loop.

    A function from outside is applied here: it may close over an array, to which the
    loop's custom derivative would pass no gradient.

    Raises:
      ValueError: an unknown name.
    """
    phi = feature_map(spec)
    if isinstance(spec, str):
        return query, key, spec
    query = phi(masking.hide(query, query_mask).astype(dtype))
    return query, phi(masking.hide(key, mask).astype(dtype)), "identity"


def project(
    features: jax.Array, total: jax.Array, precision: jax.lax.PrecisionLike = None
) -> jax.Array:
    """``features_i . total``: `[B, N, T, M]` and `[B, N, M]` -> `[B, N, T]`."""
    return jnp.einsum("bntm,bnm->bnt", features, total, precision=precision)


def products(
    query_features: jax.Array,
    key_features: jax.Array,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """``phi(q_i) . phi(k_j)``, the dense `[B, N, T, S]`."""
    return jnp.einsum(
        "bntm,bnsm->bnts", query_features, key_features, precision=precision
    )


def at_least(x: jax.Array, floor: float) -> jax.Array:
    """``max(x, floor)`` whose gradient passes where x == floor, as torch's does."""
    return jnp.where(x >= floor, x, jnp.asarray(floor, x.dtype))


def nonzero(denominator: jax.Array) -> jax.Array:
    """Replaces 0 by 1: there the numerator is zero as well."""
    return jnp.where(denominator == 0, 1, denominator)


@jax.custom_jvp
def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x / y`` with a derivative that does not square y, which could overflow."""
    return x / y


@quotient.defjvp
def _quotient_slope(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    (x, y), (of_x, of_y) = primals, tangents
    ratio = x / y
    return ratio, of_x / y - of_y / y * ratio


def over(x: jax.Array, denominator: jax.Array) -> jax.Array:
    """``x / nonzero(denominator)``."""
    return quotient(x, nonzero(denominator))


def clamp(x: jax.Array, bound: float) -> jax.Array:
    """Clips x to [-bound, bound]; the gradient passes at both bounds."""
    limited = jnp.where(x > bound, jnp.asarray(bound, x.dtype), x)
    return jnp.where(limited < -bound, jnp.asarray(-bound, x.dtype), limited)


def check_norm(norm: str | None) -> None:
    """Raises ``ValueError`` unless `normalise` supports the norm."""
    if norm not in ("rms", "layer", None):
        raise expected("norm", "'rms', 'layer' or None", f"{norm!r}")


def normalise(
    x: jax.Array, norm: str | None, axes: tuple[int, ...], eps: float
) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps)``, without a learned gain.

    Args:
      x: any shape, float32 or wider.
      norm: "rms", or "layer", which first subtracts the mean of x; None = x itself.
      axes: the axes that are normalised together.
      eps: keeps zeros zero.
    """
    if norm is None:
        return x
    inputs.check_eps(eps)
    if norm == "layer":
        x = x - x.mean(axes, keepdims=True)
    return _over_root(x, axes, eps)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _over_root(x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    """``y = x / sqrt(mean(x^2) + eps)``, and ``dy = (dx - y mean(y dx)) / sqrt(...)``.

    The derivative that jax would derive computes the root again for each column.
    """
    scaled, root, _ = _scale(x, axes, eps)
    return scaled * root


@_over_root.defjvp
def _over_root_slope(
    axes: tuple[int, ...], eps: float, primals: tuple, tangents: tuple
) -> tuple[jax.Array, jax.Array]:
    (x,), (of_x,) = primals, tangents
    scaled, root, scale = _scale(x, axes, eps)
    out = scaled * root
    along = (out * of_x).mean(axes, keepdims=True)
    return out, (of_x - out * along) * (root / scale)


def _scale(
    x: jax.Array, axes: tuple[int, ...], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``x / scale``, one over the root of its mean square, and the scale.

    Squares above 1e38 would be infinite, and the output zero. Without an eps, small
    squares would be zero.
    """
    largest = jax.lax.stop_gradient(jnp.abs(x).max(axes, keepdims=True))
    scale = jnp.where(largest > (1e9 if eps else 0), largest, 1)
    x = x / scale
    squares = jnp.square(x).mean(axes, keepdims=True)
    if eps:  # XLA divides by the square of the scale, which may be zero without an eps.
        squares = squares + eps / scale / scale
    return x, jax.lax.rsqrt(nonzero(squares)), scale


def unit(x: jax.Array, eps: float = 0.0) -> jax.Array:
    """``x / sqrt(|x|^2 + eps)`` over the last axis; zeros stay zero."""
    width = x.shape[-1]
    return normalise(x, "rms", (x.ndim - 1,), eps / width) / math.sqrt(width)


@jax.custom_jvp
def below(logits: jax.Array, largest: jax.Array) -> jax.Array:
    """``logits - largest``, with no gradient through ``largest``.

    XLA may recompute the logits for the difference, and round them differently than for
    the maximum. From 1e9 on, this makes some exponential infinite or all of them zero.
    So logits that differ from the largest only by rounding are treated as equal to it.
    """
    excess = logits - largest
    rounding = 4 * jnp.finfo(logits.dtype).eps * jnp.abs(largest)
    same = (rounding > 1) & (excess > -rounding)
    return jnp.where(same, 0, excess)


@below.defjvp
def _below_slope(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    excess = below(*primals)
    return excess, jnp.broadcast_to(tangents[0], excess.shape)


def softmax(logits: jax.Array, axis: int) -> jax.Array:
    """``jax.nn.softmax`` of logits of any size, see `below`."""
    largest = jax.lax.stop_gradient(logits.max(axis, keepdims=True))
    shares = jnp.exp(below(logits, largest))
    return shares / shares.sum(axis, keepdims=True)


def masked_softmax(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Softmax over the visible entries of the last axis; all zeros if there are none.

    Args:
      logits: any shape, float32 or wider.
      mask: boolean, same rank as the logits, broadcastable to them; None = all visible.
    """
    if mask is None:
        return softmax(logits, -1)
    # The lowest finite number, not -inf: rows without visible entries stay finite,
    # forward and backward, and the second `where` makes them zero.
    lowest = jnp.finfo(logits.dtype).min
    weights = softmax(jnp.where(mask, logits, lowest), -1)
    return jnp.where(mask, weights, 0)
