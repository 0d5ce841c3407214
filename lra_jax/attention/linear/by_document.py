"""Sums over the documents of packed rows, with keys on both sides of a query.

An array with one sum per document would have no fixed size. So a row is cut into
chunks: within a chunk, a query meets the keys of its document as pairs; if the document
extends beyond the chunk, it reads the sums over the chunks before and after.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention.causal.prefix import hide_pairs, prefix
from lra_jax.attention.linear.sums import Sums, key_sums, row_sums
from lra_jax.attention.softmax.key_sets import cut


class _Side(NamedTuple):
    """Which positions belong to the document that is open at one edge of a chunk."""

    reads: jax.Array  # the edge through which sums come, `[B, 1, P, C]`
    gives: jax.Array  # the other edge


def sum_by_document(
    features: tuple[jax.Array, jax.Array, jax.Array],
    resets: jax.Array,
    before: Sums,
    after: Sums,
    *,
    chunk: int,
    precision: jax.lax.PrecisionLike,
) -> tuple[jax.Array, jax.Array]:
    """``sum_j q_i . k_j v_j`` and the same without v_j, over i's document.

    Args:
      features: q and k `[B, N, T, M]` and v `[B, N, T, Hv]`; zero where hidden.
      resets: where documents other than the row's first start, `[B, T]`.
      before: sums over the first document's positions before the row.
      after: sums over the last document's positions after the row.
      chunk: C.
      precision: of the products.
    """
    length = resets.shape[1]
    size = min(chunk, length)
    more = -length % size
    query, key, value = (cut(x, size) for x in features)
    number = jnp.cumsum(jnp.pad(resets, [(0, 0), (0, more)]), 1, dtype=jnp.int32)
    number = number.reshape(number.shape[0], 1, -1, size)

    product = functools.partial(jnp.einsum, precision=precision)
    scores = product("bnpim,bnpjm->bnpij", query, key)
    scores = hide_pairs(scores, number[..., :, None] == number[..., None, :])
    out, total = product("bnpij,bnpjv->bnpiv", scores, value), row_sums(scores)
    for side, start, backward in (
        (_from_the_left(number), before, False),
        (_from_the_right(number), after, True),
    ):
        visible = jnp.where(side.gives[..., None], key, 0)
        sums = Sums(product("bnpjm,bnpjv->bnpmv", visible, value), key_sums(visible))
        # A chunk passes on its incoming sum if one document is open at both edges.
        passes = (side.reads & side.gives).any(-1)
        fade = jnp.where(passes, 0.0, -jnp.inf).astype(key.dtype)
        if backward:
            sums, fade = jax.tree.map(lambda x: jnp.flip(x, 2), (sums, fade))
        incoming, _ = prefix(start, sums, fade)
        if backward:
            incoming = jax.tree.map(lambda x: jnp.flip(x, 2), incoming)
        reader = jnp.where(side.reads[..., None], query, 0)
        out += product("bnpim,bnpmv->bnpiv", reader, incoming.summary)
        total += product("bnpim,bnpm->bnpi", reader, incoming.total)
    out = out.reshape(*out.shape[:2], -1, out.shape[-1])
    return out[:, :, :length], total.reshape(*total.shape[:2], -1)[:, :, :length]


def _from_the_left(number: jax.Array) -> _Side:
    """The side of sums from the left, from document numbers `[B, 1, P, C]`."""
    last = number[..., -1:]
    open_before = jnp.pad(last[:, :, :-1], [(0, 0), (0, 0), (1, 0), (0, 0)])
    return _Side(number == open_before, number == last)


def _from_the_right(number: jax.Array) -> _Side:
    first = number[..., :1]
    open_after = jnp.concatenate([first[:, :, 1:], number[:, :, -1:, -1:]], 2)
    return _Side(number == open_after, number == first)
