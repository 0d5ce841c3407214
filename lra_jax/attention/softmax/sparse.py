"""Sparse Transformer (Child et al. 2019, "Generating Long Sequences with Sparse
Transformers").

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j`` with a stride l of about
sqrt(T) and one of two patterns:

- "strided": ``|i - j| <= l``, or l divides ``i - j``;
- "fixed": j in the same block of l positions as i, or among the last c positions, the
  summary, of any block.

Causal forms, the paper's, leave out the j > i.

Cost: O(T W (H + Hv)) time and O(T W) memory, with W = 3 l + T / l for "strided" and
l + c T / l for "fixed": T^1.5 where l = sqrt(T).

Deviations: every head sees the union of the paper's two parts (its "merged" head); the
paper also has parts that alternate between layers or heads. The arena's code masks a
dense n-by-n matrix.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs
from lra_jax.attention.registry import Mechanism
from lra_jax.attention.softmax import blocks, key_sets

__all__ = ["sparse_attention", "sparse_weights"]

MECHANISM = Mechanism(
    name="sparse",
    causal=True,
    cross=False,
    stream=False,
    rotary=True,
    cost="4 T^1.5 H",
    summary="softmax over strided or fixed positions (Sparse Transformer)",
    source="Child et al. 2019",
)

SUMMARY = 8


def sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: int | None = None,
    *,
    pattern: str = "strided",
    stride: int | None = None,
    summary: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes softmax attention over a strided or a fixed pattern.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, N, H]`; its heads may be a divisor of N.
      value: `[B, T, N, Hv]`.
      mask: boolean, True = may be attended: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`. Padding is exact on the right, where the stride is fixed by
        itself or by `max_length`.
      is_causal: position i sees no j > i.
      max_length: decides the stride where none is given; None = T.
      pattern: "strided" or "fixed".
      stride: l; None = sqrt(max_length), rounded up.
      summary: c, positions at the end of each block that all may see; for "fixed" only.
        None = 8, or the stride if that is less.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, or query and key
        differ in length.
    """
    dtype, length = query.dtype, query.shape[1]
    arrays = (query, key, value, mask, is_causal)
    query, sequence, _unused = blocks.prepare(*arrays, "sparse")
    longest = length if max_length is None else max_length
    chosen = _Pattern(pattern, stride, summary, longest, is_causal)
    size = min(chosen.stride, length)

    @jax.checkpoint
    def compute(query: jax.Array, sequence: key_sets.Sequence) -> jax.Array:
        queries = key_sets.cut(query, size)
        place = key_sets.places(queries.shape[2], size)
        return blocks.attend(queries, place, chosen.sets(sequence, size), precision)

    return key_sets.paste(compute(query, sequence), length).astype(dtype)


def sparse_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: int | None = None,
    *,
    pattern: str = "strided",
    stride: int | None = None,
    summary: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, T]` that `sparse_attention` never builds.

    float32 or wider; rows sum to one or zero. Arguments and errors are those of
    `sparse_attention`.
    """
    arrays = (query, key, key, mask, is_causal)
    query, sequence, _unused = blocks.prepare(*arrays, "sparse")
    length = query.shape[2]
    longest = length if max_length is None else max_length
    chosen = _Pattern(pattern, stride, summary, longest, is_causal)
    places = key_sets.pairs(length)
    visible = chosen.is_near(*places) | chosen.is_far(*places)
    return blocks.dense_weights(query, sequence, visible, precision)


class _Pattern:
    """The pairs of positions that may meet, near ones and far ones."""

    def __init__(
        self,
        pattern: str,
        stride: int | None,
        summary: int | None,
        longest: int,
        is_causal: bool,
    ):
        if pattern not in ("strided", "fixed"):
            raise ValueError(f"pattern: expected 'strided' or 'fixed', got {pattern!r}")
        if stride is None:
            longest = inputs.check_size("max_length", longest)
            stride = math.isqrt(longest - 1) + 1
        self.stride = inputs.check_size("stride", stride)
        if pattern == "strided" and summary is not None:
            raise ValueError(
                "summary: expected None, since only the pattern 'fixed' has one, "
                f"got {summary!r}"
            )
        summary = min(SUMMARY, self.stride) if summary is None else summary
        self.summary = inputs.check_size("summary", summary)
        if self.summary > self.stride:
            raise ValueError(
                f"summary: expected at most the stride {self.stride}, got {summary}"
            )
        self.is_strided, self.is_causal = pattern == "strided", is_causal

    def is_near(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """The window, or the query's own block."""
        if self.is_strided:
            near = jnp.abs(query - key) <= self.stride
        else:
            near = query // self.stride == key // self.stride
        return self._visible(near, query, key)

    def is_far(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Beyond that: whole strides away, or in the summary of a block."""
        if self.is_strided:
            far = jnp.abs(query - key) > self.stride
            far &= (query - key) % self.stride == 0
        else:
            far = query // self.stride != key // self.stride
            far &= key % self.stride >= self.stride - self.summary
        return self._visible(far, query, key)

    def sets(self, sequence: key_sets.Sequence, size: int) -> list[key_sets.Keys]:
        """The keys of each block, no pair twice; ``size`` is min(l, T)."""
        reach = size if self.is_strided else 0
        behind = 0 if self.is_causal else reach
        sets = [key_sets.band(sequence, size, reach, behind, self.is_near)]
        if self.is_strided:
            sets.append(key_sets.columns(sequence, size, self.is_far))
        else:
            ends = key_sets.ends(sequence, size, min(self.summary, size))
            sets.append(key_sets.shared(ends, self.is_far))
        return sets

    def _visible(self, seen: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        return seen & (key <= query) if self.is_causal else seen
