"""Nystromformer's landmarks: means over m segments of the queries and of the keys.

A *plan* says, for one batch, how queries and keys are averaged to m landmarks and which
entries of the three softmax matrices count. There are three ways:

- "exact": the real positions of a sample are divided, in order, into m segments whose
  lengths differ by at most one. Hidden positions are ignored, so a sample gives the
  same result in any batch. With fewer than m positions some segments are empty, and
  are left out.
- "published" (mlpen/Nystromformer): segments of T / m positions, padding included as
  zeros; only the keys of the third matrix are masked. With m = T = S it is softmax
  attention itself.
- "front" (lucidrains/nystrom-attention): zeros are prepended until m divides the
  length; means run over the real positions; hidden rows become uniform, not zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps
from lra_jax.errors import expected

PADDINGS = ("exact", "published", "front")


class Plan(NamedTuple):
    """How to average, `[1 or B, m, T]` and `[1 or B, m, S]`, and what counts.

    The masks are broadcastable to `[B, N, T, m]`, `[B, N, m, m]` and `[B, N, m, S]`;
    None = everything.
    """

    query_means: jax.Array
    key_means: jax.Array
    of_queries: jax.Array | None
    of_landmarks: jax.Array | None
    of_keys: jax.Array | None
    zero_hidden: bool

    def softmax(self, scores: jax.Array, mask: jax.Array | None) -> jax.Array:
        """Softmax over the last axis; hidden rows follow the kind of padding."""
        if mask is None or self.zero_hidden:
            return feature_maps.masked_softmax(scores, mask)
        lowest = jnp.finfo(scores.dtype).min
        return feature_maps.softmax(jnp.where(mask, scores, lowest), -1)


def plan(
    padding: str,
    count: int,
    lengths: tuple[int, int],
    query_mask: jax.Array | None,
    key_mask: jax.Array | None,
    dtype: jnp.dtype,
) -> Plan:
    """The plan for m = ``count`` landmarks of queries and keys of ``lengths`` T and S.

    The masks are of real positions, `[B, T]` and `[B, S]`; None = all.

    Raises:
      ValueError: "published" and m does not divide a length.
    """
    masks = query_mask, key_mask
    masked = query_mask is not None or key_mask is not None
    if padding == "published":
        for length in lengths:
            if length % count:
                needed = f"a divisor of the length {length} for padding='published'"
                raise expected("num_landmarks", needed, count)
        rows, columns = (_means(_fixed_segments(count, x), dtype)[0] for x in lengths)
        seen = None if key_mask is None else key_mask[:, None, None]
        return Plan(rows, columns, None, None, seen, zero_hidden=True)
    queries, keys = (
        jnp.ones((1, length), bool) if mask is None else mask
        for length, mask in zip(lengths, masks, strict=True)
    )
    eps = 1e-8 if padding == "front" and masked else 0.0
    (query_means, query_live), (key_means, key_live) = (
        _means(_members(padding, count, real), dtype, eps) for real in (queries, keys)
    )
    if padding == "front" and not masked:
        return Plan(query_means, key_means, None, None, None, zero_hidden=False)
    return Plan(
        query_means,
        key_means,
        _outer(queries, key_live),
        _outer(query_live, key_live),
        _outer(query_live, keys),
        zero_hidden=padding == "exact",
    )


def _means(
    members: jax.Array, dtype: jnp.dtype, eps: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """The averaging matrix `[B, m, T]`, and which segments have members."""
    sizes = members.sum(-1, keepdims=True).astype(dtype)
    live = sizes > 0
    sizes = jnp.where(live, sizes + eps, 1)
    return members.astype(dtype) / sizes, live[..., 0]


def _members(padding: str, count: int, real: jax.Array) -> jax.Array:
    """`[1 or B, m, T]`: which real positions each segment has."""
    if padding == "front":
        return _fixed_segments(count, real.shape[1]) & real[:, None]
    # By rank among the real positions.
    ranks = jnp.cumsum(real, 1, dtype=jnp.uint32) - real.astype(jnp.uint32)
    total = jnp.maximum(real.sum(1, keepdims=True, dtype=jnp.uint32), 1)
    segments = ranks * jnp.uint32(count) // total
    number = jnp.arange(count, dtype=jnp.uint32)[None, :, None]
    return (segments[:, None] == number) & real[:, None]


def _fixed_segments(count: int, length: int) -> jax.Array:
    """`[1, m, T]`: segments of T / m positions."""
    segments = jnp.arange(length)[None, None] // (length // count)
    return segments == jnp.arange(count)[None, :, None]


def _outer(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """`[B, T]`, `[B, S]` -> `[B, 1, T, S]`."""
    return (rows[:, :, None] & columns[:, None])[:, None]
