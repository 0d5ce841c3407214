"""Sums over positions, exchanged between devices that each hold part of a sequence.

The sums are trees of float arrays of one dtype, and their size must not depend on the
length. Each takes one all-gather, and one reduce-scatter in the gradient.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs


def total(own: Any, axis: str | None) -> Any:
    """The sum of all devices' trees; without an axis, this device's tree."""
    if axis is None:
        return own
    return _unpacked(_gathered(own, axis).sum(0), own)


def before(own: Any, axis: str) -> Any:
    """The sum of the trees of the devices before this one."""
    states = _gathered(own, axis)
    places = np.arange(states.shape[0], dtype=np.int32)[:, None]
    earlier = places < jax.lax.axis_index(axis)
    states = jnp.where(earlier, states, 0)
    return _unpacked(states.sum(0), own)


def chosen(own: Any, which: jax.Array, axis: str) -> Any:
    """The sum of some devices' trees, chosen for each sample.

    Args:
      own: arrays `[B, ...]`.
      which: the devices, boolean `[devices, B]`.
      axis: the mesh axis.
    """
    every = jax.vmap(lambda row: _unpacked(row, own))(_gathered(own, axis))

    def one(x: jax.Array) -> jax.Array:
        return jnp.where(inputs.aligned(which, x.ndim), x, 0).sum(0)

    return jax.tree.map(one, every)


def _gathered(own: Any, axis: str) -> jax.Array:
    """Every device's tree as a row, `[devices, size]`."""
    leaves = [leaf.reshape(-1) for leaf in jax.tree.leaves(own)]
    return jax.lax.all_gather(jnp.concatenate(leaves), axis)


def _unpacked(row: jax.Array, like: Any) -> Any:
    leaves, structure = jax.tree.flatten(like)
    parts = jnp.split(row, np.cumsum([leaf.size for leaf in leaves])[:-1])
    pairs = zip(parts, leaves, strict=True)
    return jax.tree.unflatten(structure, [x.reshape(leaf.shape) for x, leaf in pairs])
