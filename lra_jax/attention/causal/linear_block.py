"""One super-block of causal linear attention, plain, with decay, or re-weighted.

The loop over super-blocks stands in `lra_jax.attention.causal.chunks`, the whole in
`lra_jax.attention.causal.sums`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention.causal.chunks import Block, Plan, decayed, prefix, triangle


class Sums(NamedTuple):
    """The past of a position in linear attention; float32 or float64."""

    summary: jax.Array  # sum of phi(k_j) v_j^T, [B, N, M, Hv]
    total: jax.Array  # sum of phi(k_j), [B, N, M]


@dataclass(frozen=True)
class LinearBlock(Block):
    """One super-block of linear attention, plain, with decay, or re-weighted."""

    plan: Plan
    precision: jax.lax.PrecisionLike
    # The angle between neighbouring positions, if there is one for all.
    turn: float | None = None
    axis: int = 2

    def __call__(
        self,
        start: Sums,
        arrays: tuple[jax.Array, ...],
        angles: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[tuple[jax.Array, jax.Array], Sums]:
        query, key, value, *decays = self.plan.split(arrays)
        scores = self._product("bnpim,bnpjm->bnpij", query, key)
        visible = triangle(self.plan.chunk)
        if angles is not None:
            return self._turned(start, (query, key, value), scores, angles)
        decay = None
        for fade in decays:
            decay = fade[..., -1]
            scores = scores * decayed(fade[..., None] - fade[..., None, :], visible)
            query = query * jnp.exp(fade)[..., None]
            key = key * jnp.exp(decay[..., None] - fade)[..., None]
        scores = jnp.where(visible, scores, jnp.zeros((), scores.dtype))
        updates = Sums(self._product("bnpjm,bnpjv->bnpmv", key, value), _total(key))
        before, after = prefix(self.plan, start, updates, decay)
        numerator = self._product("bnpij,bnpjv->bnpiv", scores, value)
        numerator += self._product("bnpim,bnpmv->bnpiv", query, before.summary)
        denominator = _row_sums(scores)
        denominator += self._product("bnpim,bnpm->bnpi", query, before.total)
        return self.plan.join((numerator, denominator)), after

    def _turned(
        self,
        start: Sums,
        arrays: tuple[jax.Array, jax.Array, jax.Array],
        scores: jax.Array,
        angles: tuple[jax.Array, jax.Array],
    ) -> tuple[tuple[jax.Array, jax.Array], Sums]:
        """Re-weighted by ``cos(a - b) = cos a cos b + sin a sin b``.

        There are two states, one of the cosines and one of the sines; no features are
        put side by side.
        """
        query, key, value = arrays
        cos, sin = self.plan.split(angles)
        scores = scores * self._near(cos, sin)
        scores = jnp.where(triangle(self.plan.chunk), scores, jnp.zeros_like(scores))
        updates = [
            Sums(
                self._product("bnpjm,bnpjv->bnpmv", key * near[..., None], value), sum_
            )
            for near, sum_ in zip((cos, sin), _totals(key, cos, sin), strict=True)
        ]
        befores, afters = prefix(self.plan, _halves(start), updates)
        numerator = self._product("bnpij,bnpjv->bnpiv", scores, value)
        denominator = scores.sum(-1)
        # What the products return is weighted, and not the query that they take: the
        # weights then join the additions.
        for near, before in zip((cos, sin), befores, strict=True):
            past = self._product("bnpim,bnpmv->bnpiv", query, before.summary)
            numerator += near[..., None] * past
            past = self._product("bnpim,bnpm->bnpi", query, before.total)
            denominator += near * past
        after = Sums(*(jnp.concatenate(x, 2) for x in zip(*afters, strict=True)))
        return self.plan.join((numerator, denominator)), after

    def _near(self, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """The cosines of the distances in a chunk."""
        if self.turn is None:
            return _outer(cos) + _outer(sin)
        # A constant: XLA would compute the other form once for every head.
        near = np.cos(np.subtract.outer(*[np.arange(self.plan.chunk)] * 2) * self.turn)
        return jnp.asarray(near, cos.dtype)[None, None, None]

    def _product(self, terms: str, *arrays: jax.Array) -> jax.Array:
        return jnp.einsum(terms, *arrays, precision=self.precision)


def _halves(sums: Sums) -> list[Sums]:
    """The sums of the cosines and those of the sines."""
    parts = (jnp.split(x, 2, 2) for x in sums)
    return [Sums(*half) for half in zip(*parts, strict=True)]


def _total(key: jax.Array) -> jax.Array:
    """The sum over a chunk's positions, `[B, N, chunks, C, M]` -> `[.., chunks, M]`.

    Products with ones, on a CPU quicker than sums that XLA fuses with what they sum.
    """
    ones = jnp.ones_like(key[..., 0])
    return jnp.einsum("bnpjm,bnpj->bnpm", key, ones, precision="highest")


@jax.custom_vjp
def _totals(key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple:
    """The sums of a chunk's keys times their cosines, and times their sines.

    One product here. In a gradient, where the products with a state need both weighted
    keys anyway, two of them with ones are quicker, and so is a gradient of its own:
    that of the one product would be a product with two columns.
    """
    # The ones have the key's sharding.
    ones = jnp.ones_like(key[..., 0])
    both = jnp.stack([ones * cos, ones * sin], -2)
    sums = jnp.einsum("bnpcj,bnpjm->bnpcm", both, key, precision="highest")
    return sums[..., 0, :], sums[..., 1, :]


def _totals_forward(key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple:
    sums = _total(key * cos[..., None]), _total(key * sin[..., None])
    return sums, (cos, sin)


def _totals_backward(angles: tuple, slopes: tuple) -> tuple:
    pairs = zip(angles, slopes, strict=True)
    cos, sin = (near[..., None] * slope[..., None, :] for near, slope in pairs)
    # The tables have no gradient.
    return cos + sin, None, None


_totals.defvjp(_totals_forward, _totals_backward)


def _row_sums(scores: jax.Array) -> jax.Array:
    ones = jnp.ones_like(scores[..., 0])
    return jnp.einsum("bnpij,bnpj->bnpi", scores, ones, precision="highest")


def _outer(x: jax.Array) -> jax.Array:
    return x[..., :, None] * x[..., None, :]
