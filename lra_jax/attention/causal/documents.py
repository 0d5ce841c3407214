"""Documents packed into one row: each is computed as if it were alone.

A state that enters a document's first position counts as nothing. In chunks this means:
within a chunk only pairs of one document meet; the state before a chunk is read by the
document that was open there; a chunk adds to the state what its last document holds,
and forgets what came before if a document starts in it.

Every function here takes None in place of documents, and then changes nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention.causal.prefix import triangle


class Documents(NamedTuple):
    """The documents in the chunks of a segment."""

    number: jax.Array  # of starts in the chunk up to a position, [1 or B, 1, P, C]

    @property
    def reads(self) -> jax.Array:
        """The positions of the document that was open before the chunk."""
        return self.number == 0

    @property
    def stays(self) -> jax.Array:
        """The positions of the document that is open after the chunk."""
        return self.number == self.number[..., -1:]

    @property
    def passes(self) -> jax.Array:
        """`[1 or B, 1, P]`: the chunks in which no document starts."""
        return self.number[..., -1] == 0


def numbered(starts: jax.Array) -> Documents:
    """The documents of chunks, whose first positions are `[1 or B, 1, P, C]`."""
    return Documents(jnp.cumsum(starts, -1, dtype=jnp.int32))


def visible(size: int, documents: Documents | None) -> jax.Array | np.ndarray:
    """Pairs of a chunk that meet: `triangle`, `[1 or B, 1, P or 1, C, C]`."""
    if documents is None:
        return triangle(size)
    number = documents.number
    return (number[..., :, None] == number[..., None, :]) & triangle(size)


def readers(x: jax.Array, documents: Documents | None) -> jax.Array:
    """`[B, N, P, C, ...]`, zero where the state before the chunk is not seen."""
    return x if documents is None else _kept(x, documents.reads)


def stayers(x: jax.Array, documents: Documents | None) -> jax.Array:
    """`[B, N, P, C, ...]`, zero where the state after the chunk does not hold it."""
    return x if documents is None else _kept(x, documents.stays)


def decay(
    fade: jax.Array | None, documents: Documents | None, dtype: jnp.dtype
) -> jax.Array | None:
    """The decay of states over chunks for `prefix`: all of it where documents start.

    Args:
      fade: that of the mechanism, `[B, N, P]` or `[B, N, P, M]`; None = it has none.
      documents: in the chunks.
      dtype: of the states.
    """
    if documents is None:
        return fade
    passes = documents.passes
    fade = jnp.zeros((1, 1, 1), dtype) if fade is None else fade
    passes = passes.reshape(*passes.shape, *[1] * (fade.ndim - 3))
    return jnp.where(passes, fade, jnp.asarray(-jnp.inf, dtype))


def _kept(x: jax.Array, where: jax.Array) -> jax.Array:
    where = where.reshape(*where.shape, *[1] * (x.ndim - where.ndim))
    return jnp.where(where, x, jnp.zeros((), x.dtype))
