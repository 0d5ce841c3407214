"""The state of linear attention: sums over keys."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, streams
from lra_jax.attention.causal import engine
from lra_jax.attention.causal.prefix import prefix


class Sums(NamedTuple):
    """The sums over past positions in linear attention; float32 or float64."""

    summary: jax.Array  # sum of phi(k_j) v_j^T, [B, N, M, Hv]
    total: jax.Array  # sum of phi(k_j), [B, N, M]

    __repr__ = streams.shapes_shown


def no_sums(arrays: engine.Arrays, width: int, dtype: jnp.dtype) -> Sums:
    """The sums before the first position, for features of this width M."""
    zeros = engine.nothing(arrays, dtype)[..., None]
    total = zeros + jnp.zeros((width,), dtype)[None, None]
    value = zeros + jnp.zeros((arrays.value.shape[-1],), dtype)[None, None]
    return Sums(total[..., None] + value[..., None, :], total)


def started(
    options: Any,
    arrays: engine.Arrays,
    state: Sums | None = None,
    *,
    mask: jax.Array | None,
    query_mask: jax.Array | None = None,
    copies: int = 1,
) -> tuple[Any, Sums, engine.Arrays]:
    """The options, the state and the arrays with which a causal form begins.

    The options have the fields of `feature_maps.Options`. They come with the caller's
    feature map, and return with the name of the one still to be applied in the loop.
    Each feature is in the state ``copies`` times.

    Raises:
      ValueError: an unknown feature map, or the state does not fit.
    """
    query, key, phi = feature_maps.given(
        arrays.query, arrays.key, options.feature_map, options.dtype, mask, query_mask
    )
    arrays = arrays._replace(query=query, key=key)
    empty = no_sums(arrays, copies * key.shape[-1], options.dtype)
    before = streams.checked(state, empty)
    return options._replace(feature_map=phi), before, arrays


def key_sums(key: jax.Array) -> jax.Array:
    """The sum over a chunk's positions, `[B, N, P, C, M]` -> `[B, N, P, M]`.

    A product with ones, faster on a CPU than a sum that XLA fuses with its input.
    """
    ones = jnp.ones_like(key[..., 0])
    return jnp.einsum("bnpjm,bnpj->bnpm", key, ones, precision="highest")


def row_sums(scores: jax.Array) -> jax.Array:
    """`[B, N, P, C, C]` -> `[B, N, P, C]`, also as a product with ones."""
    ones = jnp.ones_like(scores[..., 0])
    return jnp.einsum("bnpij,bnpj->bnpi", scores, ones, precision="highest")


def over_chunks(
    state: Sums,
    scores: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    decay: Any,
    precision: jax.lax.PrecisionLike,
) -> tuple[tuple[jax.Array, jax.Array], Sums]:
    """Numerators, denominators and the state after a segment, see `engine.Form`.

    Args:
      state: before the segment.
      scores: weights of the pairs within a chunk, `[B, N, P, C, C]`.
      query: features as they read the state before their chunk, `[B, N, P, C, M]`.
      key: features as they enter the state after their chunk.
      value: `[B, N, P, C, Hv]`.
      decay: of the state over each chunk, see `prefix`.
      precision: of the matrix products.
    """
    product = functools.partial(jnp.einsum, precision=precision)
    updates = Sums(product("bnpjm,bnpjv->bnpmv", key, value), key_sums(key))
    before, after = prefix(state, updates, decay)
    numerator = product("bnpij,bnpjv->bnpiv", scores, value)
    numerator += product("bnpim,bnpmv->bnpiv", query, before.summary)
    denominator = row_sums(scores)
    denominator += product("bnpim,bnpm->bnpi", query, before.total)
    return (numerator, denominator), after
