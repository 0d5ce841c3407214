"""A causal form run from both ends of a sequence, for use without ``is_causal``.

A query reads the state of the recurrence up to its own position, and that of the
reversed recurrence over the positions after it. Each pair of positions counts once, the
cost is linear in the length, and nothing is subtracted.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import masking
from lra_jax.attention.causal.engine import Arrays, Chunking, Form, Tables, run


def from_both_ends(
    form: Form,
    state: Any,
    arrays: Arrays,
    tables: Tables,
    *,
    chunking: Chunking | None = None,
    dtype: Any,
) -> tuple[Any, Any]:
    """The outputs of a causal form up to each position, and over the positions after.

    Arguments are those of `engine.run`, for a form whose outputs are sums, without a
    scale or tables of its own; the state is that before either recurrence. In the
    second outputs, the decay between two positions is that of the positions strictly
    between them.
    """
    options = {"chunking": chunking, "dtype": dtype}
    until, _ = run(form, state, arrays, tables, **options)
    backward = jax.tree.map(_reverse, arrays)
    # Keys are shifted by one step, so that a query does not see its own key.
    later = jax.tree.map(_shift_later, backward)._replace(query=backward.query)
    mask, resets = tables.mask, tables.resets
    if mask is not None:
        mask = _shift_later(_reverse(mask))
    if resets is not None:
        # In reverse a document starts at its end, where the shifted key belongs to the
        # document that follows in the row.
        resets = _reverse(jnp.roll(resets, -1, 1).at[:, -1].set(False))
        mask = masking.both(mask, ~resets)
    after, _ = run(form, state, later, Tables(mask, None, resets), **options)
    return until, jax.tree.map(_reverse, after)


def _reverse(x: jax.Array) -> jax.Array:
    return jnp.flip(x, 1)


def _shift_later(x: jax.Array) -> jax.Array:
    """Shifts `[B, T, ...]` one position later: zeros first, the last is dropped."""
    return jnp.pad(x[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))
