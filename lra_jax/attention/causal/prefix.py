"""Sums of states over the chunks of a segment, and the masks within a chunk.

States are trees of arrays `[B, N, ...]`; what chunks add to them has an additional
chunk axis P, `[B, N, P, ...]`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs

Tree = Any

# Up to this many chunks, states are added one by one, which is faster.
_FEW = 16


def prefix(
    start: Tree, updates: Tree, decay: jax.Array | None = None
) -> tuple[Tree, Tree]:
    """Prefix sums over the chunks of a segment.

    Args:
      start: the state before the segment, `[B, N, ...]`.
      updates: what each chunk adds, `[B, N, P, ...]`.
      decay: logarithm of the factor by which a state shrinks over each chunk, at most
        0: `[B, N, P]`, or `[B, N, P, M]` with one for each feature if the states are
        `[B, N, M, ...]`; None = no decay.

    Returns:
      The state before each chunk, `[B, N, P, ...]`, and the one after the last.
    """
    chunks = jax.tree.leaves(updates)[0].shape[2]
    if chunks == 1:
        before = jax.tree.map(lambda x: x[:, :, None], start)
        kept = before if decay is None else _scale(before, jnp.exp(decay))
        after = jax.tree.map(lambda x, update: (x + update).squeeze(2), kept, updates)
        return before, after
    # Row p is the state before chunk p; the last row is the final state.
    if chunks > _FEW:
        rows = _scan(start, updates, decay)
        before = jax.tree.map(lambda x: x[:, :, :-1], rows)
        return before, jax.tree.map(lambda x: x[:, :, -1], rows)
    rows = [start]
    for chunk in range(chunks):
        kept = rows[-1]
        if decay is not None:
            kept = _scale(kept, jnp.exp(decay[:, :, chunk]))
        update = jax.tree.map(lambda x, place=chunk: x[:, :, place], updates)
        rows.append(_add(kept, update))
    before = jax.tree.map(lambda *each: jnp.stack(each, 2), *rows[:-1])
    return before, rows[-1]


def _scale(tree: Tree, factors: jax.Array) -> Tree:
    """Multiplies `[B, N, ...]` by factors for its leading axes."""
    return jax.tree.map(lambda x: x * inputs.align(factors, x.ndim), tree)


def _scan(start: Tree, updates: Tree, decay: jax.Array | None) -> Tree:
    rows = jax.tree.map(
        lambda first, x: jnp.concatenate([first[:, :, None], x], 2), start, updates
    )
    if decay is None:
        return jax.lax.associative_scan(_add, rows, axis=2)

    def combine(earlier: tuple, later: tuple) -> tuple:
        (early, past), (late, present) = earlier, later
        return early + late, _add(_scale(past, jnp.exp(late)), present)

    decay = jnp.concatenate([jnp.zeros_like(decay[:, :, :1]), decay], 2)
    return jax.lax.associative_scan(combine, (decay, rows), axis=2)[1]


def _add(one: Tree, two: Tree) -> Tree:
    return jax.tree.map(jnp.add, one, two)


def exp_visible(exponent: jax.Array, visible: jax.Array | np.ndarray) -> jax.Array:
    """``exp(exponent)`` where visible, else 0; hidden exponents may be large."""
    return jnp.where(visible, jnp.exp(jnp.where(visible, exponent, 0)), 0)


def triangle(size: int) -> np.ndarray:
    """`[1, 1, 1, C, C]`, True where the column does not come after the row."""
    return np.tri(size, dtype=bool)[None, None, None]


def hide_pairs(pairs: jax.Array, visible: np.ndarray | jax.Array) -> jax.Array:
    """Pairs `[B, N, P, C, C]` where visible, else 0."""
    return jnp.where(visible, pairs, 0)


def so_far(x: jax.Array) -> jax.Array:
    """Sums along a chunk up to each position, as a product: faster than a scan."""
    earlier = jnp.asarray(np.tri(x.shape[-1]), x.dtype)
    return jnp.einsum("bnpj,ij->bnpi", x, earlier, precision=jax.lax.Precision.HIGHEST)
