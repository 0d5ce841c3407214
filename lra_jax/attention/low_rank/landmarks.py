"""Nystromformer's landmarks: which positions they are means of, and who sees whom.

A *segment plan* says, for one batch, how queries and keys are averaged to m landmarks
and which entries of the three softmax matrices count. There are three ways:

- "exact": the real positions of a sample, in their order, are dealt to m segments that
  differ by at most one in length. What is hidden takes no part, so a sample means the
  same in any batch. With fewer than m positions some segments stay empty and are left
  out.
- "published" (mlpen/Nystromformer): segments of T / m positions, padding included as
  zeros; only the keys of the third matrix are masked.
- "front" (lucidrains/nystrom-attention): zeros are put in front until m divides the
  length; means over the real positions; hidden rows become uniform, not zero.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps

PADDINGS = ("exact", "published", "front")

Masks = tuple[jax.Array | None, jax.Array | None]


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
        """Softmax over the last axis; hidden rows as the way of padding has them."""
        if mask is None or self.zero_hidden:
            mask = None if mask is None else jnp.broadcast_to(mask, scores.shape)
            return feature_maps.masked_softmax(scores, mask, axis=-1)
        lowest = jnp.asarray(jnp.finfo(scores.dtype).min, scores.dtype)
        return jax.nn.softmax(jnp.where(mask, scores, lowest), axis=-1)


def plan(
    padding: str, count: int, lengths: tuple[int, int], masks: Masks, dtype: jnp.dtype
) -> Plan:
    """The plan for ``count`` landmarks.

    Args:
      padding: one of PADDINGS.
      count: m.
      lengths: T and S.
      masks: of the queries `[B, T]` and of the keys `[B, S]`; None = all real.
      dtype: of the means.

    Raises:
      ValueError: "published" and m does not divide a length.
    """
    make = {"exact": _exact, "published": _published, "front": _front}[padding]
    return make(count, lengths, masks, dtype)


def _exact(
    count: int, lengths: tuple[int, int], masks: Masks, dtype: jnp.dtype
) -> Plan:
    queries, keys = _real(lengths, masks)
    query_means, query_live = _means(_dealt(count, queries), dtype)
    key_means, key_live = _means(_dealt(count, keys), dtype)
    return Plan(
        query_means,
        key_means,
        _outer(queries, key_live),
        _outer(query_live, key_live),
        _outer(query_live, keys),
        zero_hidden=True,
    )


def _published(
    count: int, lengths: tuple[int, int], masks: Masks, dtype: jnp.dtype
) -> Plan:
    for length in lengths:
        if length % count:
            raise ValueError(
                f"num_landmarks: expected a divisor of the length {length} for "
                f"padding='published', got {count}"
            )
    query_means, key_means = (
        _means(_fixed(count, length), dtype)[0] for length in lengths
    )
    keys = None if masks[1] is None else masks[1][:, None, None]
    return Plan(query_means, key_means, None, None, keys, zero_hidden=True)


def _front(
    count: int, lengths: tuple[int, int], masks: Masks, dtype: jnp.dtype
) -> Plan:
    queries, keys = _real(lengths, masks)
    eps = 0.0 if masks == (None, None) else 1e-8
    (query_means, query_live), (key_means, key_live) = (
        _means(_fixed(count, length) & real[:, None], dtype, eps)
        for length, real in zip(lengths, (queries, keys), strict=True)
    )
    if masks == (None, None):
        return Plan(query_means, key_means, None, None, None, zero_hidden=False)
    return Plan(
        query_means,
        key_means,
        _outer(queries, key_live),
        _outer(query_live, key_live),
        _outer(query_live, keys),
        zero_hidden=False,
    )


def _means(
    members: jax.Array, dtype: jnp.dtype, eps: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """The averaging matrix `[B, m, T]` of the members, and which segments have any."""
    sizes = members.sum(-1, keepdims=True).astype(dtype)
    live = sizes > 0
    sizes = jnp.where(live, sizes + eps, jnp.ones((), dtype))
    return members.astype(dtype) / sizes, live[..., 0]


def _real(lengths: tuple[int, int], masks: Masks) -> list[jax.Array]:
    """The masks, `[1 or B, T]` and `[1 or B, S]`."""
    return [
        jnp.ones((1, length), bool) if mask is None else mask
        for length, mask in zip(lengths, masks, strict=True)
    ]


def _dealt(count: int, real: jax.Array) -> jax.Array:
    """`[1 or B, m, T]`: the members of each segment, by their rank among the real."""
    ranks = jnp.cumsum(real, 1, dtype=jnp.uint32) - real.astype(jnp.uint32)
    total = jnp.maximum(real.sum(1, keepdims=True, dtype=jnp.uint32), 1)
    segments = ranks * jnp.uint32(count) // total
    number = jnp.arange(count, dtype=jnp.uint32)[None, :, None]
    return (segments[:, None] == number) & real[:, None]


def _fixed(count: int, length: int) -> jax.Array:
    """`[1, m, T]`: segments of T / m positions."""
    segments = jnp.arange(length)[None, None] // (length // count)
    return segments == jnp.arange(count)[None, :, None]


def _outer(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """`[B, T]`, `[B, S]` -> `[B, 1, T, S]`."""
    return (rows[:, :, None] & columns[:, None])[:, None]
