"""Causal softmax features: exact for every norm, and independent of the future.

``out_i`` needs ``sum_{j <= i} sum_r exp(a_ir + g_jr)``, with exponents a of the queries
and g of the keys. To split this into two factors, exp(a_ir + c_r) exp(g_jr - c_r),
takes a reference c_r. With one reference for all keys, a large later key would round
the earlier ones to zero. So the keys before a position are divided into groups that lie
entirely in its past, each with its own reference:

- all chunks before its own, as one running sum whose reference is a running maximum;
- within the chunk, for each block of 8, 16, 32, ... positions that holds the position
  in its right half, the left half of the block;
- its own group of 4, pair by pair, which is faster than smaller blocks.

A group yields a numerator, a denominator and the exponent factored out of both; these
are combined as in a blockwise softmax. Every factor is at most 1, every denominator at
least 1, and none depends on later keys, which do not change a single bit of an output.

The projection to M features happens inside a segment, so no T x M array is ever stored.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, masking, streams
from lra_jax.attention.call import Call
from lra_jax.attention.causal import documents, engine
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import exp_visible, prefix, triangle
from lra_jax.attention.linear.core import no_sums
from lra_jax.attention.linear.random_features import (
    Options,
    half_square,
    lift,
    lowest,
)

_GROUP = 4


class PerformerSums(NamedTuple):
    """The sums over past positions; float32 or float64.

    With softmax features both sums are in units of ``exp(peak)``.
    """

    summary: jax.Array  # sum of phi(k_j) v_j^T, [B, N, M, Hv]
    total: jax.Array  # sum of phi(k_j), [B, N, M]
    peak: jax.Array  # largest exponent of each feature so far, [B, N, M]

    __repr__ = streams.show_shapes


class _Carry(NamedTuple):
    sums: PerformerSums
    # Constant; carried because only carries and arrays have gradients. One copy per
    # head, [B, N, M, H], so that it is sharded like the heads.
    matrix: jax.Array


class _Chunks(NamedTuple):
    """A segment in chunks, `[B, N, P, C, ...]`."""

    queries: jax.Array  # exponents, less each query's largest
    keys: jax.Array  # exponents, the lowest where hidden
    value: jax.Array
    visible: jax.Array
    rows: Documents | None


class _Part(NamedTuple):
    """The contribution of one group of keys to the positions of each chunk."""

    peak: jax.Array  # [B, N, P, C]
    numerator: jax.Array  # in units of exp(peak), [B, N, P, C, Hv]
    denominator: jax.Array  # likewise, [B, N, P, C]


Product = Callable[..., jax.Array]


def _prepare(
    options: Options, arrays: engine.Arrays, tables: engine.Tables
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scaled queries and keys, and values, heads first, zero where hidden."""
    query, key, value = arrays[:3]
    heads, dtype, mask = query.shape[2], options.dtype, tables.mask
    return (
        options.rescale(masking.by_head(query, heads, dtype=dtype)),
        options.rescale(masking.by_head(key, heads, mask, dtype)),
        masking.by_head(value, heads, mask, dtype),
    )


def _segment(
    options: Options,
    state: _Carry,
    features: tuple[jax.Array, jax.Array, jax.Array],
    visible: jax.Array,
    rows: Documents | None,
) -> tuple[jax.Array, _Carry]:
    """One segment, see `engine.Form`; chunk sizes are powers of two."""
    query, key, value = features
    product = functools.partial(jnp.einsum, precision=options.precision)
    queries, keys = (
        product("bnpih,bnmh->bnpim", x, state.matrix) for x in (query, key)
    )
    # A factor shared by all weights of a query, which would round the keys off.
    queries = queries - jax.lax.stop_gradient(queries.max(-1, keepdims=True))
    keys = keys - half_square(key)
    keys = jnp.where(visible[..., None], keys, lowest(keys.dtype))
    chunks = _Chunks(queries, keys, value, visible, rows)
    far, after = _far(product, state.sums, chunks)
    parts = [far, _nearest(product, chunks)]
    size = _GROUP
    while size < keys.shape[3]:
        parts.append(_left_halves(product, chunks, size))
        size *= 2
    return _add_up(parts), _Carry(after, state.matrix)


def _far(
    product: Product, start: PerformerSums, chunks: _Chunks
) -> tuple[_Part, PerformerSums]:
    """The part of the keys before each chunk, and the sums after the last chunk."""
    queries, keys, value, visible, rows = chunks
    if rows is not None:
        visible = visible & rows.stays
        keys = jnp.where(visible[..., None], keys, lowest(keys.dtype))
    tops = jnp.concatenate([start.peak[:, :, None], keys.max(3)], 2)
    largest = functools.partial(jax.tree.map, jnp.maximum)
    (tops,) = documents.scan(largest, (jax.lax.stop_gradient(tops),), rows)
    before, after = tops[:, :, :-1], tops[:, :, 1:]
    keys = exp_visible(keys - after[:, :, :, None], visible[..., None])
    updates = product("bnpjm,bnpjv->bnpmv", keys, value), keys.sum(3)
    # Before the first visible key there is nothing to scale down.
    decay = jnp.where(before > lowest(before.dtype), before - after, 0)
    decay = documents.decay(decay, rows, decay.dtype)
    (summary, total), sums = prefix((start.summary, start.total), updates, decay)
    queries, peak = lift(queries, before[:, :, :, None])
    if rows is not None:
        queries = documents.readers(queries, rows)
        peak = jnp.where(rows.reads, peak, lowest(peak.dtype))
    part = _Part(
        peak,
        product("bnpim,bnpmv->bnpiv", queries, summary),
        product("bnpim,bnpm->bnpi", queries, total),
    )
    return part, PerformerSums(sums[0], sums[1], after[:, :, -1])


def _nearest(product: Product, chunks: _Chunks) -> _Part:
    """The part of each position's own group."""
    queries, keys, value, visible, rows = chunks
    size = min(_GROUP, queries.shape[3])

    def group(x: jax.Array) -> jax.Array:
        """`[B, N, P, C, ...]` -> `[B, N, P, C / size, size, ...]`."""
        return x.reshape(*x.shape[:3], -1, size, *x.shape[4:])

    seen = triangle(size)[None] & group(visible)[..., None, :]
    if rows is not None:
        number = group(rows.number)
        seen &= number[..., :, None] == number[..., None, :]
    exponents = group(queries)[..., :, None, :] + group(keys)[..., None, :, :]
    highest = jnp.where(seen[..., None], exponents, lowest(exponents.dtype))
    peak = jax.lax.stop_gradient(highest.max((-1, -2)))
    exponents = exponents - peak[..., None, None]
    scores = exp_visible(exponents, seen[..., None]).sum(-1)
    numerator = product("bnpgij,bnpgjv->bnpgiv", scores, group(value))
    part = _Part(peak, numerator, scores.sum(-1))
    return _Part(*(x.reshape(*x.shape[:3], -1, *x.shape[5:]) for x in part))


def _left_halves(product: Product, chunks: _Chunks, size: int) -> _Part:
    """The part of the left halves of blocks in their right halves of this size."""

    def halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`[B, N, P, C, ...]` -> twice `[B, N, P, C / 2 / size, size, ...]`."""
        x = x.reshape(*x.shape[:3], -1, 2, size, *x.shape[4:])
        return x[:, :, :, :, 0], x[:, :, :, :, 1]

    def at_right(x: jax.Array, left: jax.Array | float) -> jax.Array:
        """The inverse, for right halves only."""
        both = jnp.stack([jnp.full_like(x, left), x], 4)
        return both.reshape(*x.shape[:3], -1, *x.shape[5:])

    (keys, _), (value, _), (seen, _) = map(halves, chunks[1:4])
    queries = halves(chunks.queries)[1]
    reads = None
    if chunks.rows is not None:
        # Only the document that is open between the halves.
        left, right = halves(chunks.rows.number)
        seen, reads = seen & (left == left[..., -1:]), right == left[..., -1:]
        keys = jnp.where(seen[..., None], keys, lowest(keys.dtype))
    top = jax.lax.stop_gradient(keys.max(4, keepdims=True))
    keys = exp_visible(keys - top, seen[..., None])
    queries, peak = lift(queries, top)
    if reads is not None:
        queries = jnp.where(reads[..., None], queries, 0)
        peak = jnp.where(reads, peak, lowest(peak.dtype))
    scores = product("bnpgim,bnpgjm->bnpgij", queries, keys)
    return _Part(
        at_right(peak, lowest(peak.dtype)),
        at_right(product("bnpgij,bnpgjv->bnpgiv", scores, value), 0),
        at_right(scores.sum(-1), 0),
    )


def _add_up(parts: list[_Part]) -> jax.Array:
    """The quotient of all numerators and all denominators."""
    peak = functools.reduce(jnp.maximum, [part.peak for part in parts])
    # The references need no gradient: the quotient does not depend on them.
    weights = [jnp.exp(part.peak - peak) for part in parts]
    pairs = list(zip(parts, weights, strict=True))
    numerator = sum(part.numerator * weight[..., None] for part, weight in pairs)
    denominator = sum(part.denominator * weight for part, weight in pairs)
    numerator, denominator = jnp.asarray(numerator), jnp.asarray(denominator)
    return feature_maps.over(numerator, denominator[..., None])


def attend(
    call: Call, options: Options, matrix: jax.Array
) -> tuple[jax.Array, PerformerSums]:
    """Causal attention with softmax features, and the sums after the last position.

    ``matrix`` is W, `[M, H]`. Sequences are cut into at least two chunks, of a power of
    two positions each.
    """
    length, dtype = call.query.shape[1], call.dtype
    chunking = call.chunking or engine.Chunking()
    # At least two chunks. With one, the right side of its product with the empty state
    # is one number everywhere. Where XLA's library for CPUs (jax 0.10 to 0.12) fuses
    # such a product with a sum or a maximum, it reads memory that it has not written:
    # now and then, the output is NaN.
    longest = min(chunking.chunk, max(1, (length + 1) // 2))
    chunk = 1 << (longest - 1).bit_length()
    sums = no_sums(call.arrays, matrix.shape[0], dtype)
    empty = PerformerSums(*sums, sums.total + lowest(dtype))
    # Added to the state's zeros, which have the arrays' sharding.
    matrix = matrix.astype(dtype)[None, None] + jnp.zeros_like(sums.total)[..., None]
    visible = jnp.ones((1, length), bool) if call.mask is None else call.mask
    out, carry = engine.run(
        engine.Form(_prepare, _segment, options),
        _Carry(streams.check_sums(call.sums, empty), matrix),
        call.arrays,
        call.tables(visible),
        chunking=dataclasses.replace(chunking, chunk=chunk),
        dtype=call.query.dtype,
    )
    return out, carry.sums
