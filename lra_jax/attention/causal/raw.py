"""Causal mechanisms on query, key and value as they come, `[B, T, N, H]`.

A pass over a long array costs as much as a product with it. So nothing is made of whole
arrays: features, masks, the transposition that puts heads first, and the division at
the end happen on one super-block at a time, inside the loop of
`lra_jax.attention.causal.chunks`, in the caches; forward and backward alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import chunks

Tree = Any


class Inputs(NamedTuple):
    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, T, n, H]
    value: jax.Array  # [B, T, n, Hv]


class Tables(NamedTuple):
    mask: jax.Array | None  # real keys, [1 or B, T]
    query_mask: jax.Array | None  # real queries, [1 or B, T]
    inner: Tree  # [1 or B, T] each


@dataclass(frozen=True)
class RawBlock(chunks.Block):
    """A block around one that takes features with the heads first.

    Attributes:
      plan: that of the inner block.
      inner: makes of phi(q), phi(k) and v, `[B, N, L, ...]`, and of tables
        `[1 or B, 1, L]` the numerators `[B, N, L, Hv]` and something `[B, N, L]`.
      feature_map: phi.
      scale: makes of the latter what the numerators are multiplied by.
      dtype: of all that is computed.
      out_dtype: of the output.
      keeps_outputs: unless they are rounded.
    """

    plan: chunks.Plan
    inner: chunks.Block
    feature_map: Callable[[jax.Array], jax.Array]
    scale: Callable[[jax.Array], jax.Array]
    dtype: Any
    out_dtype: Any
    keeps_outputs: bool
    axis: int = 1

    def __call__(
        self, start: Tree, arrays: Inputs, tables: Tables
    ) -> tuple[jax.Array, Tree]:
        features, inner = self._features(arrays, tables)
        (numerator, other), after = self.inner(start, features, inner)
        out = jnp.swapaxes(numerator * self.scale(other)[..., None], 1, 2)
        return out.astype(self.out_dtype), after

    def pullback(
        self,
        state: Tree,
        arrays: Inputs,
        tables: Tables,
        outputs: Tree,
        cotangents: Tree,
    ) -> tuple[Tree, Inputs]:
        """Spares the numerators: the output is all that is needed of them."""
        if outputs is None:
            return super().pullback(state, arrays, tables, None, cotangents)

        def features(arrays: Inputs) -> tuple[tuple[jax.Array, ...], Tree]:
            return self._features(arrays, tables)

        given, pull, inner = jax.vjp(features, arrays, has_aux=True)
        of_out, of_state = cotangents
        heads_first = jnp.swapaxes(outputs, 1, 2), jnp.swapaxes(of_out, 1, 2)
        of_state, of_given = self.inner.scaled_pullback(
            state, given, inner, heads_first[0], (heads_first[1], of_state), self.scale
        )
        return of_state, pull(of_given)[0]

    def _features(
        self, arrays: Inputs, tables: Tables
    ) -> tuple[tuple[jax.Array, ...], Tree]:
        """phi(q), phi(k) and v, `[B, N, L, ...]`, and the tables of the inner block."""
        query, key, value = arrays
        masks = tables.mask, tables.query_mask
        features = feature_maps.features(
            query, key, self.feature_map, self.dtype, *masks
        )
        value = inputs.by_head(value, query.shape[2], tables.mask, self.dtype)
        inner = jax.tree.map(lambda x: x[:, None], tables.inner)
        return (*features, value), inner


@dataclass(frozen=True)
class Divided:
    """One by the denominator, "clamp"ed to eps or with it "add"ed."""

    denominator: str
    eps: float

    def __call__(self, sums: jax.Array) -> jax.Array:
        return 1 / bounded(sums, self.denominator, self.eps)


def bounded(sums: jax.Array, denominator: str, eps: float) -> jax.Array:
    """What to divide by."""
    return feature_maps.at_least(sums, eps) if denominator == "clamp" else sums + eps


def identity(x: jax.Array) -> jax.Array:
    """A feature map that does nothing."""
    return x


def given(
    arrays: Inputs,
    masks: tuple[jax.Array | None, jax.Array | None],
    feature_map: feature_maps.FeatureMap,
    dtype: jnp.dtype,
) -> tuple[Inputs, Callable[[jax.Array], jax.Array]]:
    """The arrays, and the feature map that is left to do inside the loop.

    A function from outside is applied here: it may have closed over an array, for which
    the loop's own derivative would have no gradient.
    """
    if isinstance(feature_map, str) or feature_map is identity:
        return arrays, feature_maps.feature_map(feature_map)
    query, key = (
        feature_map(inputs.hide(x, mask).astype(dtype))
        for x, mask in zip(arrays[:2], masks[::-1], strict=True)
    )
    return Inputs(query, key, arrays.value), identity


def run(
    inner: chunks.Block,
    start: Tree,
    arrays: Inputs,
    tables: Tables,
    *,
    feature_map: Callable[[jax.Array], jax.Array],
    scale: Callable[[jax.Array], jax.Array],
    dtype: Any,
    out_dtype: Any,
) -> tuple[jax.Array, Tree]:
    """The output `[B, T, N, Hv]`, and the state after the last position.

    Arguments are those of `RawBlock`.
    """
    rounded = dtype != out_dtype
    block = RawBlock(
        inner.plan, inner, feature_map, scale, dtype, out_dtype, not rounded
    )
    length = arrays.query.shape[1]
    if block.plan.length > length:
        # What is appended to the arrays must not enter any sum.
        real = jnp.ones((1, length), bool)
        mask, rows = (
            real if x is None else x for x in (tables.mask, tables.query_mask)
        )
        tables = Tables(mask, rows, tables.inner)
    return chunks.run(block, start, arrays, tables)


def first(arrays: Inputs, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Zeros like phi(k) `[B, N, M]` and v `[B, N, Hv]` of one position.

    Made of a first update and not of a shape: a loop's carry then has the sharding and
    the varying axes of what is added to it.
    """
    heads = arrays.query.shape[2]
    query = jnp.zeros_like(arrays.query[:, 0], dtype)
    key, value = (
        jnp.zeros_like(inputs.match_heads(x[:, :1], heads)[:, 0], dtype)
        for x in arrays[1:]
    )
    # Sums: of what varies along an axis in any of them, a state varies along it.
    return query + key + value[..., :1], value + query[..., :1] + key[..., :1]
