"""Sums over positions, exchanged between devices that each hold part of a sequence.

The sums are trees of float arrays of one dtype, and their size must not depend on the
length. `total` takes one all-reduce, and one in the gradient; the others an all-gather,
and a reduce-scatter in the gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from lra_jax.attention import inputs


def total(tree: Any, axis: str | None) -> Any:
    """The sum of all devices' trees; without an axis, this device's tree."""
    if axis is None:
        return tree
    row, tree_of = ravel_pytree(tree)
    return tree_of(jax.lax.psum(row, axis))


def before(tree: Any, axis: str) -> Any:
    """The sum of the trees of the devices before this one."""
    row, tree_of = ravel_pytree(tree)
    states = jax.lax.all_gather(row, axis)
    places = np.arange(states.shape[0], dtype=np.int32)[:, None]
    earlier = places < jax.lax.axis_index(axis)
    return tree_of(jnp.where(earlier, states, 0).sum(0))


def sum_of_chosen(tree: Any, which: jax.Array, axis: str) -> Any:
    """The sum of some devices' trees of `[B, ...]`; ``which`` is `[devices, B]`."""
    row, tree_of = ravel_pytree(tree)
    every = jax.vmap(tree_of)(jax.lax.all_gather(row, axis))

    def one(x: jax.Array) -> jax.Array:
        return jnp.where(inputs.align(which, x.ndim), x, 0).sum(0)

    return jax.tree.map(one, every)
