"""Packed documents in rows that are split over devices.

A document may begin on one device and end on another. The data that a device needs from
the others do not grow with the length: whether a document starts in their slices, and
sums over the documents that cross the edges of its slice.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs
from lra_jax.attention.packed import Packed
from lra_jax.attention.sharded import exchange

# How partial results for a document are combined, and the neutral element.
_TOGETHER = {
    jax.ops.segment_sum: (operator.add, jnp.sum, 0),
    jax.ops.segment_max: (jnp.maximum, jnp.max, None),
}


@dataclass(frozen=True)
class Slice(Packed):
    """One device's part of `Packed` rows."""

    axis: str  # the mesh axis that the other parts are on
    carried: jax.Array  # positions of the first document on earlier devices, [B]
    earlier: jax.Array  # earlier devices that hold some of the first, [devices, B]
    later: jax.Array  # later devices that hold some of the last, [devices, B]

    @property
    def position(self) -> jax.Array:
        """The position from the document's start, on whichever device that is."""
        places = jnp.arange(self.starts.shape[1], dtype=jnp.int32)[None]
        first = jnp.where(self.starts, places, -self.carried[:, None])
        return places - jax.lax.cummax(first, 1)

    @property
    def resets(self) -> jax.Array:
        """All starts: earlier parts of a document enter through `around`."""
        return self.starts

    def over(
        self, reduce: Callable[..., jax.Array], x: jax.Array, axis: int
    ) -> jax.Array:
        """See the base class; covers whole documents, across all devices."""
        result = super().over(reduce, x, axis)
        join, total, nothing = _TOGETHER[reduce]
        if nothing is None:
            nothing = jnp.finfo(x.dtype).min
        nothing = jnp.asarray(nothing, x.dtype)
        goes_on = self.number == 0, self.number == self.number[:, -1:]
        ends = (jnp.take(result, place, axis) for place in (0, -1))
        first, last = (
            jnp.where(inputs.align(here[:, place], end.ndim), end, nothing)
            for here, end, place in zip(goes_on, ends, (0, -1), strict=True)
        )
        # A device sends its last part to later devices, its first to earlier ones.
        for part, which, here in (
            (last, self.earlier, goes_on[0]),
            (first, self.later, goes_on[1]),
        ):
            others = jax.lax.all_gather(part, self.axis)
            which = inputs.align(which, others.ndim)
            beyond = total(jnp.where(which, others, nothing), axis=0)
            here = here.reshape(
                here.shape[0], *[1] * (axis - 1), -1, *[1] * (x.ndim - axis - 1)
            )
            beyond = jnp.where(here, jnp.expand_dims(beyond, axis), nothing)
            result = join(result, beyond)
        return result

    def around(self, sums: Callable[[jax.Array], Any]) -> tuple[Any, Any]:
        """See the base class."""
        first, last = self.number == 0, self.number == self.number[:, -1:]
        return (
            exchange.sum_of_chosen(sums(last & self.real), self.earlier, self.axis),
            exchange.sum_of_chosen(sums(first & self.real), self.later, self.axis),
        )


def sums_before(
    sums: Callable[[jax.Array | None], Any], rows: Packed | None, axis: str
) -> Any:
    """The sums on earlier devices that a device's first document continues.

    ``sums`` maps a mask `[B, T]`, None = all, to a tree of sums over its positions.
    """
    if rows is None:
        return exchange.before(sums(None), axis)
    around: Any = rows.around(sums)
    return around[0]


def slice_documents(segment_ids: jax.Array | None, axis: str) -> Slice | None:
    """The documents of this device's slice `[B, T / devices]`; None = one per row."""
    if segment_ids is None:
        return None
    devices, length = jax.lax.axis_size(axis), segment_ids.shape[1]
    onward = [(place, place + 1) for place in range(devices - 1)]
    before = jax.lax.ppermute(segment_ids[:, -1:], axis, onward)
    real = segment_ids > 0
    before = jnp.concatenate([before, segment_ids[:, :-1]], 1)
    starts = real & (segment_ids != before)
    places = jnp.arange(length, dtype=jnp.int32)[None]
    tail = length - jnp.where(starts, places, jnp.zeros_like(places)).max(1)
    passes, tails = jax.lax.all_gather((~starts.any(1), tail), axis)
    here, each = jax.lax.axis_index(axis), np.arange(devices)
    earlier, later = each < here, each > here
    # No document may start on a device between that one and this one.
    one, other = each[:, None], each[None]
    open_before = passes[None] | ~((one < other) & (other < here))[..., None]
    open_after = passes[None] | ~((here < other) & (other < one))[..., None]
    earlier = earlier[:, None] & open_before.all(1)
    later = later[:, None] & open_after.all(1)
    carried = jnp.where(earlier, tails, 0).sum(0, dtype=jnp.int32)
    return Slice(real, starts, axis, carried, earlier, later)
