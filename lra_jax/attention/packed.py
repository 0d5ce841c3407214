"""Rows that hold several documents, marked by `segment_ids`.

`segment_ids` are integers `[B, T]`: a document is a run of one positive number, and 0
is padding. Every self-attention accepts them. A packed row gives the same results as
its documents alone: no document sees another, states start afresh, and positions count
from each document's start. The output at padding has no meaning.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs, masking
from lra_jax.errors import expected


@dataclass(frozen=True)
class Packed:
    """Where the documents of each row are; arrays are `[B, T]`."""

    real: jax.Array  # not padding
    starts: jax.Array  # the first position of each document

    @property
    def number(self) -> jax.Array:
        """The document that a position belongs to or comes after, counted from 1."""
        return jnp.cumsum(self.starts, 1, dtype=jnp.int32)

    @property
    def label(self) -> jax.Array:
        """`number`, but 0 at padding."""
        return jnp.where(self.real, self.number, 0)

    @property
    def position(self) -> jax.Array:
        """The position, counted from the document's start."""
        places = jnp.arange(self.starts.shape[1], dtype=jnp.int32)[None]
        first = jnp.where(self.starts, places, jnp.zeros_like(places))
        return places - jax.lax.cummax(first, 1)

    def ends(self, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """The first and the last visible position of each position's document."""
        real, length = self.real if mask is None else mask, self.real.shape[1]
        places = jnp.arange(length, dtype=jnp.int32)[None]
        first, last = jnp.where(real, places, length), jnp.where(real, places, -1)
        return (
            self.over(jax.ops.segment_min, first, 1),
            self.over(jax.ops.segment_max, last, 1),
        )

    def over(
        self, reduce: Callable[..., jax.Array], x: jax.Array, axis: int
    ) -> jax.Array:
        """Reduces `[B, ..., T, ...]` over each document, for each of its positions.

        ``reduce`` is ``jax.ops.segment_sum`` or a similar function, ``axis`` that of T.
        """
        length = x.shape[axis]

        def one(x: jax.Array, number: jax.Array) -> jax.Array:
            x = jnp.moveaxis(x, axis - 1, 0)
            reduced = reduce(x, number, length + 1, indices_are_sorted=True)
            return jnp.moveaxis(reduced[number], 0, axis - 1)

        return jax.vmap(one)(x, self.number)

    def at_start(self, x: jax.Array) -> jax.Array:
        """`[B, T]`: every position gets the value at its document's start."""
        places = jnp.arange(self.starts.shape[1], dtype=jnp.int32)[None]
        return jnp.take_along_axis(x, places - self.position, 1)

    def around(self, sums: Callable[[jax.Array], Any]) -> tuple[Any, Any] | None:
        """The sums of the first and the last document that other devices hold.

        ``sums`` maps a mask `[B, T]` to a tree of sums over its positions. Returned are
        those before the first position and after the last; None = there are none.
        """
        return None

    @property
    def resets(self) -> jax.Array:
        """All starts except each row's first document, which may continue a state."""
        return self.starts & (self.number > 1)


def documents(
    segment_ids: jax.Array | None, query: jax.Array, key: jax.Array
) -> Packed | None:
    """The documents of the rows of a self-attention; None = one per row.

    Raises:
      ValueError: the ids are not integers `[B, T]`, or query and key differ in length.
    """
    if segment_ids is None:
        return None
    batch, length = query.shape[:2]
    ids = jnp.asarray(segment_ids)
    inputs.check_shape("segment_ids", ids, "B T", batch, length)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise expected("segment_ids", "an integer dtype", ids.dtype)
    if key.shape[1] != length:
        needed = "None where query and key differ in length"
        raise expected("segment_ids", needed, f"T={length} and S={key.shape[1]}")
    before = jnp.pad(ids[:, :-1], [(0, 0), (1, 0)])
    real = ids > 0
    return Packed(real, real & (ids != before))


def real_positions(
    mask: jax.Array | None, documents: Packed | None
) -> jax.Array | None:
    """The positions of a mask `[B, T]` that are in a document; None = all."""
    return mask if documents is None else masking.both(mask, documents.real)


def share(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Which pairs are in one document, `[B, 1, T, S]`, from labels `[B, T]`, `[B, S]`.

    Pairs with a key in the padding are excluded. Labels are those of `Packed.label`.
    """
    rows, columns = rows[:, None, :, None], columns[:, None, None]
    return (rows == columns) & (columns > 0)


def next_position(
    mask: jax.Array | None,
    documents: Packed | None,
    batch: int,
    length: int,
    before: jax.Array | None = None,
) -> jax.Array:
    """`[B]` int32: one past the last visible position, counted in its document.

    ``before`` counts earlier positions of each row's first document, `[B]`.

    Raises:
      ValueError: ``before``, from a state, is of another batch size.
    """
    if before is not None:
        inputs.check_shape("state", before, "B", batch)
    ends = masking.next_position(mask, batch, length)
    if documents is None:
        return ends if before is None else ends + before
    last = jnp.maximum(ends - 1, 0)[:, None]
    position, number = (
        jnp.take_along_axis(x, last, 1)[:, 0]
        for x in (documents.position, documents.number)
    )
    position = jnp.where(ends > 0, position + 1, 0)
    return position if before is None else position + jnp.where(number <= 1, before, 0)
