"""A causal form run from both ends of a sequence, for use without ``is_causal``.

A query reads the state of the recurrence up to its own position, and that of the
reversed recurrence over the positions after it. Each pair of positions counts once, the
cost is linear in the length, and nothing is subtracted.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import masking
from lra_jax.attention.causal.engine import Arrays, Chunking, Form, run


def from_both_ends(
    form: Form,
    state: Any,
    arrays: Arrays,
    *,
    beyond: Any = None,
    mask: jax.Array | None = None,
    resets: jax.Array | None = None,
    chunking: Chunking | None = None,
    dtype: Any,
) -> tuple[Any, Any]:
    """The outputs of a causal form up to each position, and over the positions after.

    In the second, the decay between two positions is that of the positions strictly
    between them.

    Args:
      form: a form whose outputs are sums, without a scale.
      state: before the sequence.
      arrays: positions on axis 1.
      beyond: the initial state of the reversed recurrence, at the end of the sequence;
        None = ``state``.
      mask: the real keys, `[B, T]`; None = all.
      resets: where documents start, `[B, T]`; None = one per row.
      chunking: how the sequence is cut.
      dtype: of the outputs.

    Returns:
      Two trees of outputs `[B, T, N, ...]`.
    """
    options = {"chunking": chunking, "dtype": dtype}
    until, _ = run(form, state, arrays, mask=mask, resets=resets, **options)
    backward = jax.tree.map(_reversed, arrays)
    # Keys are shifted by one step, so that a query does not see its own key.
    later = jax.tree.map(_later, backward)._replace(query=backward.query)
    if mask is not None:
        mask = _later(_reversed(mask))
    if resets is not None:
        # In reverse a document starts at its end, where the shifted key belongs to the
        # document that follows in the row.
        resets = _reversed(jnp.roll(resets, -1, 1).at[:, -1].set(False))
        mask = masking.both(mask, ~resets)
    beyond = state if beyond is None else beyond
    after, _ = run(form, beyond, later, mask=mask, resets=resets, **options)
    return until, jax.tree.map(_reversed, after)


def _reversed(x: jax.Array) -> jax.Array:
    return jnp.flip(x, 1)


def _later(x: jax.Array) -> jax.Array:
    """Shifts `[B, T, ...]` one position later: zeros first, the last is dropped."""
    return jnp.pad(x[:, :-1], [(0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 2))
