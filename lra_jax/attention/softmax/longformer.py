"""Longformer (Beltagy et al. 2020, "Longformer: The Long-Document Transformer").

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j``: a query sees the window
``|i - j| <= window`` and the global positions ``j < global_tokens``; a global query
sees every position. Causal forms leave out the j > i.

Cost: O(T W (H + Hv)) time and O(T W) memory for W = 2 window + C + 2 global_tokens, by
gathered blocks (`lra_jax.attention.softmax.blocks`).

Deviations: global positions are the first ones, where a class vector stands, not chosen
by the caller; global queries use the same projections as all others (the paper gives
them a second set); no dilated windows. The arena's code masks a dense n-by-n matrix,
and for even windows sees one position more on the right than on the left.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs
from lra_jax.attention.registry import Mechanism
from lra_jax.attention.softmax import blocks, key_sets

__all__ = ["longformer_attention", "longformer_weights"]

MECHANISM = Mechanism(
    name="longformer",
    causal=True,
    cross=False,
    stream=False,
    rotary=True,
    cost="3 T w H",
    summary="softmax over a window and the first tokens, which see everything",
    source="Beltagy et al. 2020",
)


def longformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    window: int = 64,
    global_tokens: int = 1,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes softmax attention over a window and the global tokens.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, N, H]`; its heads may be a divisor of N.
      value: `[B, T, N, Hv]`.
      mask: boolean, True = may be attended: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`. Padding is exact on the right.
      is_causal: position i sees no j > i.
      window: positions on each side that a query sees beside its own (half of the
        paper's window size).
      global_tokens: how many of the first positions are global; 0 for none.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or a size do not fit, or query and key differ
        in length.
    """
    pattern = _Pattern(window, global_tokens, is_causal)
    dtype, length = query.dtype, query.shape[1]
    arrays = (query, key, value, mask, is_causal)
    query, sequence, _unused = blocks.prepare(*arrays, "longformer")
    size, before, after = blocks.band_sizes(pattern.window, length, is_causal)

    @jax.checkpoint
    def compute(query: jax.Array, sequence: key_sets.Sequence) -> jax.Array:
        queries = key_sets.cut(query, size)
        place = key_sets.places(queries.shape[2], size)
        sets = [key_sets.band(sequence, size, before, after, pattern.is_near)]
        if global_tokens:
            first = key_sets.part(sequence, 0, global_tokens)
            sets.append(key_sets.shared(first, pattern.is_far_global))
        out = key_sets.paste(blocks.attend(queries, place, sets, precision), length)
        if not global_tokens:
            return out
        # The rows of the global tokens again, over everything.
        queries = query[:, :, None, :global_tokens]
        place = key_sets.places(1, queries.shape[3])
        everything = [key_sets.shared(sequence, pattern.sees)]
        rows = blocks.attend(queries, place, everything, precision)
        rows = key_sets.paste(rows, global_tokens)
        return jnp.concatenate([rows, out[:, rows.shape[1] :]], axis=1)

    return compute(query, sequence).astype(dtype)


def longformer_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    window: int = 64,
    global_tokens: int = 1,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, T]` that `longformer_attention` never builds.

    float32 or wider; rows sum to one or zero. Arguments and errors are those of
    `longformer_attention`.
    """
    pattern = _Pattern(window, global_tokens, is_causal)
    arrays = (query, key, key, mask, is_causal)
    query, sequence, _unused = blocks.prepare(*arrays, "longformer")
    visible = pattern.sees(*key_sets.pairs(query.shape[2]))
    return blocks.dense_weights(query, sequence, visible, precision)


class _Pattern:
    """The pairs of positions that may meet."""

    def __init__(self, window: int, global_tokens: int, is_causal: bool):
        self.window = inputs.check_size("window", window, 0)
        self.global_tokens = inputs.check_size("global_tokens", global_tokens, 0)
        self.is_causal = is_causal

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """The whole pattern."""
        seen = self.is_near(query, key)
        seen |= self.is_far_global(query, key)
        return seen | self._visible(query < self.global_tokens, query, key)

    def is_near(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """The window."""
        return self._visible(jnp.abs(query - key) <= self.window, query, key)

    def is_far_global(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """A global key that is not in the window."""
        far = jnp.abs(query - key) > self.window
        return self._visible(far & (key < self.global_tokens), query, key)

    def _visible(self, seen: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        return seen & (key <= query) if self.is_causal else seen
