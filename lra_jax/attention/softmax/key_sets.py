"""The sets of keys that a pattern lets a block of queries see, gathered by blocks.

A sequence is cut into P blocks of C positions. A set (`Keys`) gives the queries of a
block the keys of their neighbourhood (`band`), of a part of the sequence or all of it
(`shared`), of their own column (`columns`), or of the blocks that a table lists
(`listed`). Positions count from 0; a hidden key has the position -1 wherever it lies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

Rule = Callable[[jax.Array, jax.Array], jax.Array]


class Sequence(NamedTuple):
    """Keys and values with the heads first, their padding zeroed."""

    key: jax.Array  # [B, N, S, H]
    value: jax.Array  # [B, N, S, Hv]
    position: jax.Array  # [1 or B, S] int32, -1 where hidden


@dataclass(frozen=True)
class Keys:
    """A set of keys for the queries of each block.

    Attributes:
      layout: "block", every block of queries has K keys of its own, `[B, N, P, K, H]`;
        "shared", all have the same, `[B, N, K, H]`; "column", query c of every block
        has key c of every block, `[B, N, P, C, H]`.
      key: as the layout says.
      value: likewise.
      position: of the keys, broadcastable to the scores `[B, N, P, C, K]`.
      rule: which pairs of positions (query, key) belong to the set.
      discount: subtracted from the scores `[B, N, P, C, K]`; None = nothing.
    """

    layout: str
    key: jax.Array
    value: jax.Array
    position: jax.Array
    rule: Rule
    discount: jax.Array | None = None


def always(query: jax.Array, key: jax.Array) -> jax.Array:
    """The rule that excludes no pair."""
    return jnp.ones((1,) * query.ndim, bool)


def not_later(query: jax.Array, key: jax.Array) -> jax.Array:
    """The rule of causal attention."""
    return key <= query


def cut(x: jax.Array, size: int) -> jax.Array:
    """`[B, N, T, H]` -> `[B, N, P, C, H]`, the last block filled with zeros."""
    missing = -x.shape[2] % size
    x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def cut_positions(position: jax.Array, size: int) -> jax.Array:
    """`[B, S]` -> `[B, P, C]`, the last block filled with -1."""
    missing = -position.shape[1] % size
    position = jnp.pad(position, [(0, 0), (0, missing)], constant_values=-1)
    return position.reshape(position.shape[0], -1, size)


def paste(x: jax.Array, length: int) -> jax.Array:
    """The inverse of `cut`, with the heads back behind: `[B, T, N, Hv]`."""
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :length]
    return jnp.swapaxes(x, 1, 2)


def places(blocks: int, size: int) -> jax.Array:
    """Positions of the queries in their blocks, `[1, 1, P, C, 1]`."""
    return jnp.arange(blocks * size, dtype=jnp.int32).reshape(1, 1, blocks, size, 1)


def pairs(length: int) -> tuple[jax.Array, jax.Array]:
    """Positions of queries `[1, 1, T, 1]` and of keys `[1, 1, 1, T]`."""
    position = jnp.arange(length, dtype=jnp.int32)
    return position[None, None, :, None], position[None, None, None]


def part(sequence: Sequence, start: int, stop: int) -> Sequence:
    """The keys of some positions."""
    key, value, position = sequence
    return Sequence(
        key[:, :, start:stop], value[:, :, start:stop], position[:, start:stop]
    )


def take_block(x: jax.Array, index: jax.Array) -> jax.Array:
    """One block of each sample: `[B, N, P, C, H]`, `[1 or B]` -> `[B, N, C, H]`."""
    index = jnp.broadcast_to(index, x.shape[:1])
    return jax.vmap(lambda x, i: x[:, i])(x, index)


def take_part(sequence: Sequence, size: int, index: jax.Array) -> Sequence:
    """The keys of one block of each sample, which `[1 or B]` names."""
    position = cut_positions(sequence.position, size)
    position = jnp.broadcast_to(position, (sequence.key.shape[0], *position.shape[1:]))
    return Sequence(
        take_block(cut(sequence.key, size), index),
        take_block(cut(sequence.value, size), index),
        take_block(position[:, None, :, :, None], index)[:, 0, :, 0],
    )


def ends(sequence: Sequence, size: int, count: int) -> Sequence:
    """The last ``count`` keys of every block, one after the other."""

    def pick(x: jax.Array) -> jax.Array:
        x = cut(x, size)[:, :, :, size - count :]
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    position = cut_positions(sequence.position, size)[:, :, size - count :]
    return Sequence(
        pick(sequence.key), pick(sequence.value), position.reshape(len(position), -1)
    )


def windows(x: jax.Array, size: int, before: int, after: int) -> jax.Array:
    """`[B, N, S, H]` -> `[B, N, P, before + C + after, H]`, zeros beyond the ends."""
    blocks, wide = -(-x.shape[2] // size), before + size + after
    views = -(-wide // size)
    behind = (blocks + views - 1) * size - before - x.shape[2]
    x = jnp.pad(x, [(0, 0), (0, 0), (before, behind), (0, 0)])
    x = x.reshape(*x.shape[:2], -1, size, x.shape[-1])
    return jnp.concatenate(
        [x[:, :, view : view + blocks] for view in range(views)], axis=3
    )[:, :, :, :wide]


def band(sequence: Sequence, size: int, before: int, after: int, rule: Rule) -> Keys:
    """Each block's own keys, ``before`` ones in front of it and ``after`` behind."""
    key, value, position = (
        windows(x, size, before, after)
        for x in (sequence.key, sequence.value, sequence.position[:, None, :, None] + 1)
    )
    return Keys("block", key, value, position[..., 0][:, :, :, None] - 1, rule)


def shared(sequence: Sequence, rule: Rule) -> Keys:
    """All of a sequence, for every query."""
    position = sequence.position[:, None, None, None]
    return Keys("shared", sequence.key, sequence.value, position, rule)


def columns(sequence: Sequence, size: int, rule: Rule) -> Keys:
    """For the query at place c of a block, the keys at place c of all blocks."""
    position = jnp.swapaxes(cut_positions(sequence.position, size), 1, 2)
    return Keys(
        "column",
        cut(sequence.key, size),
        cut(sequence.value, size),
        position[:, None, None],
        rule,
    )


def listed(sequence: Sequence, size: int, table: jax.Array, rule: Rule) -> Keys:
    """The blocks that a table lists for each block of queries.

    Args:
      sequence: of P blocks.
      size: C.
      table: `[1 or B, N, P, R]`, indices of blocks; -1 = none. No block twice in a row.
      rule: as in `Keys`.
    """
    batch, heads = sequence.key.shape[:2]
    rows = jnp.broadcast_to(table, (batch, heads, *table.shape[2:]))
    take = jax.vmap(jax.vmap(lambda x, row: x[row]))

    def gather(x: jax.Array) -> jax.Array:
        return take(x, rows).reshape(*rows.shape[:3], -1, x.shape[-1])

    blocks = cut_positions(sequence.position, size)
    blocks = jnp.broadcast_to(blocks, (batch, *blocks.shape[1:]))
    position = jax.vmap(lambda x, row: x[row])(blocks, rows)
    position = jnp.where(rows[..., None] < 0, jnp.int32(-1), position)
    return Keys(
        "block",
        gather(cut(sequence.key, size)),
        gather(cut(sequence.value, size)),
        position.reshape(*rows.shape[:3], 1, -1),
        rule,
    )
