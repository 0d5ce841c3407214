"""Documents packed into one row: each is computed as if it were alone.

The state before a document's first position counts as zero. For chunks this means:
within a chunk, only pairs from the same document interact; the state before a chunk is
read only by the document that continues into it; a chunk adds only its last document to
the state, and clears the earlier state if a document starts in the chunk.

Every function here accepts None in place of documents, and then changes nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs
from lra_jax.attention.causal.prefix import triangle


class Documents(NamedTuple):
    """The documents in the chunks of a segment."""

    number: jax.Array  # starts in the chunk up to each position, [1 or B, 1, P, C]

    @property
    def reads(self) -> jax.Array:
        """The positions of the document that continues from before the chunk."""
        return self.number == 0

    @property
    def stays(self) -> jax.Array:
        """The positions of the document that is still open at the end of the chunk."""
        return self.number == self.number[..., -1:]

    @property
    def passes(self) -> jax.Array:
        """`[1 or B, 1, P]`: the chunks in which no document starts."""
        return self.number[..., -1] == 0


def number_starts(starts: jax.Array) -> Documents:
    """The documents of chunks; ``starts`` marks their starts, `[1 or B, 1, P, C]`."""
    return Documents(jnp.cumsum(starts, -1, dtype=jnp.int32))


def visible(size: int, documents: Documents | None) -> jax.Array | np.ndarray:
    """The visible pairs of a chunk: `triangle`, `[1 or B, 1, P or 1, C, C]`."""
    if documents is None:
        return triangle(size)
    number = documents.number
    return (number[..., :, None] == number[..., None, :]) & triangle(size)


def readers(x: jax.Array, documents: Documents | None) -> jax.Array:
    """`[B, N, P, C, ...]`, zero at positions that do not see the state before."""
    return x if documents is None else _keep(x, documents.reads)


def stayers(x: jax.Array, documents: Documents | None) -> jax.Array:
    """`[B, N, P, C, ...]`, zero at positions that do not enter the state after."""
    return x if documents is None else _keep(x, documents.stays)


def decay(
    fade: jax.Array | None, documents: Documents | None, dtype: jnp.dtype
) -> jax.Array | None:
    """The decay of states over chunks for `prefix`: complete where a document starts.

    ``fade`` is the mechanism's own decay, and ``dtype`` that of the states.
    """
    if documents is None:
        return fade
    fade = jnp.zeros((1, 1, 1), dtype) if fade is None else fade
    return jnp.where(inputs.align(documents.passes, fade.ndim), fade, -jnp.inf)


def scan(
    join: Callable[[tuple, tuple], tuple],
    ends: tuple[jax.Array, ...],
    documents: Documents | None,
) -> tuple[jax.Array, ...]:
    """``join`` of all earlier entries and each, `[B, N, 1 + P, ...]`, along the chunks.

    The first entry is before the first chunk. Each document begins afresh.
    """
    if documents is None:
        return jax.lax.associative_scan(join, ends, axis=2)
    new = jnp.pad(~documents.passes, [(0, 0), (0, 0), (1, 0)])

    def join_within(one: tuple, two: tuple) -> tuple:
        joined = join(one[1:], two[1:])
        starts = (inputs.align(two[0], x.ndim) for x in joined)
        parts = zip(starts, two[1:], joined, strict=True)
        return one[0] | two[0], *(jnp.where(start, x, y) for start, x, y in parts)

    new = jnp.broadcast_to(new, ends[0].shape[:3])
    return jax.lax.associative_scan(join_within, (new, *ends), axis=2)[1:]


def _keep(x: jax.Array, where: jax.Array) -> jax.Array:
    return jnp.where(inputs.align(where, x.ndim), x, 0)
