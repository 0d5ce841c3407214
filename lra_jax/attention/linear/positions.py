"""Positions as cosFormer needs them: where each one is, and M, which exceeds all."""

import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs, masking
from lra_jax.attention.call import Call
from lra_jax.errors import expected

MaxLength = int | np.integer | jax.Array | np.ndarray | None


class Positions(NamedTuple):
    """The positions of a call, and M, which exceeds them."""

    position: np.ndarray | jax.Array  # [1 or B, T]; of queries or keys, the longer
    max_length: int | jax.Array  # M, or one per sample, [B]


def locate(call: Call, max_length: MaxLength, is_fixed: bool) -> Positions:
    """The positions of a call and its M.

    With ``is_fixed`` the default M is not that of each sample.

    Raises:
      ValueError: `max_length` does not fit, or a visible position lies beyond it.
    """
    length = max(call.query.shape[1], call.key.shape[1])
    position: Any = np.arange(length, dtype=np.int32)[None]
    if call.axis is not None:
        position = position + jax.lax.axis_index(call.axis) * length
        length = length * jax.lax.axis_size(call.axis)
    if call.rows is not None:
        position = call.rows.position
    if call.state is not None:
        return _stream_positions(call, position, max_length)
    if call.streams:
        shortest = length if call.rows is None else 1
        return Positions(position, inputs.check_max_length(max_length, shortest))
    if max_length is None:
        is_cross = call.query.shape[1] != call.key.shape[1]
        if call.mask is None or call.rows is not None or is_cross or is_fixed:
            return Positions(position, length)
        return _sample_positions(call, position)
    if not isinstance(max_length, int | np.integer):
        return Positions(position, _sample_lengths(max_length, call.query.shape[0]))
    if call.rows is not None:
        return Positions(position, inputs.check_size("max_length", max_length))
    if max_length < length:
        needed = f"at least max(T, S)={length}, so that every weight is positive"
        raise expected("max_length", needed, max_length)
    return Positions(position, int(max_length))


def _sample_positions(call: Call, position: jax.Array | np.ndarray) -> Positions:
    """Positions from each sample's first real one, and M as if it were alone."""
    mask = jnp.asarray(call.mask)
    end = jnp.where(mask, position + 1, 0).max(1)
    first = jnp.where(mask, position, np.iinfo(np.int32).max).min(1)
    if call.axis is not None:
        end, first = jax.lax.pmax(end, call.axis), jax.lax.pmin(first, call.axis)
    first = jnp.minimum(first, end)
    return Positions(position - first[:, None], end - first)


def _sample_lengths(max_length: jax.Array | np.ndarray, batch: int) -> jax.Array:
    """M of each sample, `[B]` int32: positions are compared with it."""
    lengths = jnp.asarray(max_length)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise expected(
            "max_length",
            f"an int, None or an integer array [B]={(batch,)}",
            f"{lengths.dtype} of shape {lengths.shape}",
        )
    return lengths.astype(jnp.int32)


def _stream_positions(call: Call, position: Any, max_length: MaxLength) -> Positions:
    """The positions of a later part of a stream.

    Those from M on count as the last one, M - 1, so that every weight stays positive.

    Raises:
      ValueError: a visible one reaches beyond M; checked only if they are concrete.
    """
    if max_length is not None:
        raise expected("max_length", "None with a state", max_length)
    start, limit = call.state.position, call.state.max_length
    if not isinstance(start, jax.core.Tracer):
        start = np.asarray(start)  # Under jax.jit, jnp would trace it.
    start = start[:, None]
    if call.rows is not None:
        start = jnp.where(call.rows.number <= 1, start, 0)
    position = position + start
    if not any(isinstance(x, jax.core.Tracer) for x in (position, call.mask, limit)):
        mask = True if call.mask is None else call.mask
        ends = np.where(mask, np.asarray(position) + 1, 0).max(1)
        known_limit = np.asarray(limit)
        longest = int((ends - known_limit).argmax())
        if ends[longest] > known_limit[longest]:
            needed = f"at least {ends[longest]} for a stream that goes this far"
            raise expected("max_length", needed, known_limit[longest])
    return Positions(jnp.minimum(position, limit[:, None] - 1), limit)


def hide_beyond(call: Call, places: Positions) -> Call:
    """Hides positions that are not below M, and those before a sample's first."""
    position, limit = places
    is_static = isinstance(position, np.ndarray) or call.axis is not None
    is_static &= call.rows is None and isinstance(limit, int)
    if is_static or call.state is not None:
        return call
    if not isinstance(limit, int):
        limit = limit[:, None]
    within = jnp.asarray((position >= 0) & (position < limit))
    length, keys = call.query.shape[1], call.key.shape[1]
    call = call.hide_queries(within[:, :length])
    return call.replace(mask=masking.both(call.mask, within[:, :keys]))


def on_grid(grid: tuple[int, int]) -> list[Positions]:
    """The row of every position, and its column."""
    rows, columns = np.divmod(np.arange(math.prod(grid)), grid[1])
    return [Positions(rows[None], grid[0]), Positions(columns[None], grid[1])]
