"""Local attention: every query sees a window around it, or its own block.

``out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j`` over ``|i - j| <= window`` (a
sliding band), or over the j with ``floor(j / block) = floor(i / block)`` (contiguous
blocks, the "Local Attention" of Tay et al. 2021, "Long Range Arena").
Causal forms leave out the j > i.

Cost: O(T W (H + Hv)) time and O(T W) memory for W = 2 window + C keys a query (window +
C if causal, W = C in blocks of C), by gathered blocks (`softmax.blocks`).

Deviations: the arena's code reshapes to `[blocks in length, blocks, ...]`, so that its
"blocks" are strided and its padding mask belongs to other positions; here blocks are
contiguous. A row that may see nothing is exactly zero.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs
from lra_jax.attention.registry import Mechanism
from lra_jax.attention.softmax import blocks, key_sets

__all__ = ["local_attention", "local_weights"]

MECHANISM = Mechanism(
    name="local",
    causal=True,
    cross=False,
    stream=False,
    rotary=True,
    cost="3 T w H",
    summary="softmax over a window of w positions a side, or over blocks",
    source="Tay et al. 2021",
)

WINDOW = 64


def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    window: int | None = None,
    block: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes softmax attention over a window, or over the query's own block.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, N, H]`; its heads may be a divisor of N.
      value: `[B, T, N, Hv]`.
      mask: boolean, True = may be attended: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`.
      is_causal: position i sees no j > i.
      window: positions on each side that a query sees beside its own; 64 unless
        ``block`` is given. Padding is exact on either side.
      block: positions of a block, instead of a window. Blocks are counted from the
        first position, so padding is exact on the right.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or a size do not fit, both sizes are given,
        or query and key differ in length.
    """
    pattern = _Pattern(window, block, is_causal)
    dtype, length = query.dtype, query.shape[1]
    query, sequence, _unused = blocks.prepare(
        query, key, value, mask, is_causal, "local"
    )
    size, before, after = pattern.cut(length)

    @jax.checkpoint
    def compute(query: jax.Array, sequence: key_sets.Sequence) -> jax.Array:
        queries = key_sets.cut(query, size)
        near = key_sets.band(sequence, size, before, after, pattern.sees)
        place = key_sets.places(queries.shape[2], size)
        return blocks.attend(queries, place, [near], precision)

    return key_sets.paste(compute(query, sequence), length).astype(dtype)


def local_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    window: int | None = None,
    block: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, T]` that `local_attention` never builds.

    float32 or wider; rows sum to one or zero. Arguments and errors are those of
    `local_attention`.
    """
    pattern = _Pattern(window, block, is_causal)
    query, sequence, _unused = blocks.prepare(query, key, key, mask, is_causal, "local")
    visible = pattern.sees(*key_sets.pairs(query.shape[2]))
    return blocks.dense_weights(query, sequence, visible, precision)


class _Pattern:
    """The pairs of positions that may meet, and how the sequence is cut."""

    def __init__(self, window: int | None, block: int | None, is_causal: bool):
        if window is not None and block is not None:
            raise ValueError(
                "window, block: expected one of them, a window around each query or "
                f"blocks of positions, got window={window!r} and block={block!r}"
            )
        self.in_blocks, self.is_causal = block is not None, is_causal
        if self.in_blocks:
            self.size = inputs.check_size("block", block)
        else:
            window = WINDOW if window is None else window
            self.size = inputs.check_size("window", window, 0)

    def sees(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Whether the query at one position sees the key at another."""
        if self.in_blocks:
            seen = query // self.size == key // self.size
        else:
            seen = jnp.abs(query - key) <= self.size
        return seen & (key <= query) if self.is_causal else seen

    def cut(self, length: int) -> tuple[int, int, int]:
        """Positions of a block, and of its keys in front of it and behind."""
        if self.in_blocks:
            return min(self.size, length), 0, 0
        return blocks.band_sizes(self.size, length, self.is_causal)
