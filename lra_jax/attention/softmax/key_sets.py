"""The sets of keys that a pattern makes visible to a block of queries.

A sequence is cut into P blocks of C positions. A set (`Keys`) gives the queries of a
block the keys of their neighbourhood (`band`), of all or part of the sequence
(`all_keys`), of their own column (`columns`), or of the blocks listed in a table
(`blocks_of_table`). Positions count from 0; a hidden key has position -1 wherever it
lies.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs

Rule = Callable[[jax.Array, jax.Array], jax.Array]


class Sequence(NamedTuple):
    """Keys and values with the heads first, their padding zeroed."""

    key: jax.Array  # [B, N, S, H]
    value: jax.Array  # [B, N, S, Hv]
    number: jax.Array  # position + 1, or 0 where hidden, [1 or B, 1, S, 1] int32

    @property
    def position(self) -> jax.Array:
        """`[1 or B, S]`; -1 where hidden."""
        return self.number[:, 0, :, 0] - 1


@dataclass(frozen=True)
class Keys:
    """A set of keys for the queries of each block.

    Attributes:
      layout: "block", every block of queries has its own K keys, `[B, N, P, K, H]`;
        "shared", all blocks have the same, `[B, N, K, H]`; "column", query c of a block
        has key c of every block, `[B, N, P, C, H]`.
      key: shaped according to the layout.
      value: shaped according to the layout.
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


def within(window: int) -> Rule:
    """The rule of a window on each side."""
    return lambda query, key: jnp.abs(query - key) <= window


def in_block(size: int) -> Rule:
    """The rule of blocks that see only themselves."""
    return lambda query, key: query // size == key // size


def cut(x: jax.Array, size: int) -> jax.Array:
    """`[B, N, T, H]` -> `[B, N, P, C, H]`; the last block is padded with zeros."""
    missing = -x.shape[2] % size
    x = jnp.pad(x, [(0, 0), (0, 0), (0, missing), (0, 0)])
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1])


def paste(x: jax.Array, length: int) -> jax.Array:
    """The inverse of `cut`, with the heads after the length: `[B, T, N, Hv]`."""
    x = x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :length]
    return jnp.swapaxes(x, 1, 2)


def places(blocks: int, size: int) -> jax.Array:
    """Positions of the queries in their blocks, `[1, 1, P, C, 1]`."""
    return jnp.arange(blocks * size, dtype=jnp.int32).reshape(1, 1, blocks, size, 1)


def part(sequence: Sequence, start: int, stop: int) -> Sequence:
    """The keys from one position up to another."""
    return jax.tree.map(lambda x: x[:, :, start:stop], sequence)


def take_run(x: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """Positions from ``start`` on, `[1 or B]`, as one block, `[B, N, 1, count, H]`."""
    flat = x.reshape(*x.shape[:2], 1, -1, x.shape[-1])
    take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=count, axis=-2)
    if start.shape[0] == 1:
        return take(flat, start[0])
    return jax.vmap(take)(_for_each(flat, start), start)


def _for_each(x: jax.Array, samples: jax.Array) -> jax.Array:
    """`[1 or B, ...]` with the batch, and the sharding, of integers `[B]`."""
    return x + inputs.align(jnp.zeros_like(samples), x.ndim).astype(x.dtype)


def put_run(x: jax.Array, run: jax.Array, start: jax.Array) -> jax.Array:
    """Replaces the positions of `take_run` in blocks `[B, N, P, C, H]`."""
    flat = x.reshape(*x.shape[:2], 1, -1, x.shape[-1])
    put = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=-2)
    if start.shape[0] == 1:
        return put(flat, run, start[0]).reshape(x.shape)
    return jax.vmap(put)(flat, run, start).reshape(x.shape)


def take_part(sequence: Sequence, size: int, index: jax.Array) -> Sequence:
    """The keys of one block of each sample, given by ``index`` `[1 or B]`."""
    return jax.tree.map(
        lambda x: take_run(cut(x, size), index * size, size)[:, :, 0], sequence
    )


def ends(sequence: Sequence, size: int, count: int) -> Sequence:
    """The last ``count`` keys of every block, concatenated."""

    def pick(x: jax.Array) -> jax.Array:
        x = cut(x, size)[:, :, :, size - count :]
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    return jax.tree.map(pick, sequence)


def windows(x: jax.Array, size: int, before: int, after: int) -> jax.Array:
    """`[B, N, S, H]` -> `[B, N, P, before + C + after, H]`, zeros beyond the ends."""
    blocks, wide = -(-x.shape[2] // size), before + size + after
    views = -(-wide // size)
    end = (blocks + views - 1) * size - before - x.shape[2]
    x = jnp.pad(x, [(0, 0), (0, 0), (before, end), (0, 0)])
    x = x.reshape(*x.shape[:2], -1, size, x.shape[-1])
    return jnp.concatenate(
        [x[:, :, view : view + blocks] for view in range(views)], axis=3
    )[:, :, :, :wide]


def _own(sequence: Sequence, rule: Rule) -> Keys:
    """A set with different keys for each block, `[B, N, P, K, ...]`."""
    number = sequence.number[..., None, :, 0]
    return Keys("block", sequence.key, sequence.value, number - 1, rule)


def band(sequence: Sequence, size: int, before: int, after: int, rule: Rule) -> Keys:
    """Each block's own keys, ``before`` keys preceding it and ``after`` following."""
    return _own(jax.tree.map(lambda x: windows(x, size, before, after), sequence), rule)


def all_keys(sequence: Sequence, rule: Rule) -> Keys:
    """The whole sequence, for every query."""
    position = sequence.position[:, None, None, None]
    return Keys("shared", sequence.key, sequence.value, position, rule)


def columns(sequence: Sequence, size: int, rule: Rule) -> Keys:
    """For the query at place c of a block, the keys at place c of all blocks."""
    key, value, number = (cut(x, size) for x in sequence)
    position = jnp.swapaxes(number[..., 0], 2, 3)[:, :, None] - 1
    return Keys("column", key, value, position, rule)


def blocks_of_table(
    sequence: Sequence, size: int, table: jax.Array, rule: Rule
) -> Keys:
    """The blocks of C = ``size`` keys listed in a table for each block of queries.

    The table is `[1 or B, N, P, R]`; it holds indices of blocks without duplicates in a
    row, or -1 for none.
    """
    num_heads = table.shape[1]
    by_head = jax.vmap(lambda x, row: x[row])

    def gather(x: jax.Array) -> jax.Array:
        x = cut(x, size)
        x = jnp.broadcast_to(x, (x.shape[0], num_heads, *x.shape[2:]))
        if table.shape[0] == 1:  # One table for all samples.
            return jax.vmap(by_head, (0, None))(x, table[0])
        return jax.vmap(by_head)(_for_each(x, table[:, 0, 0, 0]), table)

    taken = Sequence(*(gather(x) for x in sequence))
    hidden = (table < 0)[..., None, None]
    taken = taken._replace(number=jnp.where(hidden, jnp.int32(0), taken.number))
    flat = (x.reshape(*x.shape[:3], -1, x.shape[-1]) for x in taken)
    return _own(Sequence(*flat), rule)
