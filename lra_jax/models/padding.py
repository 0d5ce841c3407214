"""Padding anywhere in a row: real tokens move to the front of it, and back.

In between, a row is what it would be alone with padding after it, so padding in front
changes nothing, whether a model uses positions in a table, a window or a learned
projection.
"""

import jax
import jax.numpy as jnp


def order_real_first(mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The indices `[B, T]` that move real tokens, where the mask is True, to the front
    in the same order, and those that undo it."""
    count = mask.sum(1, keepdims=True)
    after = count + jnp.cumsum(~mask, 1)
    back = jnp.where(mask, jnp.cumsum(mask, 1), after) - 1
    return jnp.argsort(~mask, axis=1, stable=True), back


def reorder(x: jax.Array, order: jax.Array) -> jax.Array:
    """The entries of `[B, T, ...]` at the indices `[B, T]`."""
    order = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, order, axis=1)
