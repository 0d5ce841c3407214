"""Longformer (Beltagy et al. 2020, "Longformer: The Long-Document Transformer").

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j``: a query sees the window
``|i - j| <= window`` and the global positions ``j < global_tokens``; a global query
sees every position. Causal forms leave out positions j > i.

Cost: O(T W (H + Hv)) time and O(T W) memory for W = 2 window + C + 2 global_tokens, by
gathered blocks (`lra_jax.attention.softmax.patterns`).

Deviations: global positions are the first ones, where a class vector is, not chosen by
the caller; global queries use the same projections as all others (the paper gives
them a second set); no dilated windows. LRA's code masks a dense n-by-n matrix, and with
even windows sees one more position on the right than on the left.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, inputs
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.softmax import key_sets, patterns

__all__ = ["longformer_attention", "longformer_weights"]


@documents_in_turn
def longformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    window: int = 64,
    global_tokens: int = 1,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes softmax attention over a window and the global tokens.

    Args:
      query, key, value, mask, is_causal, segment_ids: as in `local_attention`. Padding
        is exact on the right.
      window: positions on each side that a query sees besides its own (half of the
        paper's window size).
      global_tokens: number of global positions at the start; 0 for none.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or a size do not fit, or query and key differ
        in length.
    """
    window = inputs.check_size("window", window, 0)
    count = inputs.check_size("global_tokens", global_tokens, 0)
    call = Call.of(query, key, value, mask, is_causal, precision=precision)
    near = key_sets.within(window)
    length = call.query.shape[1]
    size, before, after = patterns.band_sizes(window, length, is_causal)

    def is_far_global(query: jax.Array, key: jax.Array) -> jax.Array:
        return ~near(query, key) & (key < count)

    def sets(sequence: key_sets.Sequence) -> list[key_sets.Keys]:
        band = key_sets.band(sequence, size, before, after, near)
        if not count:
            return [band]
        first = key_sets.part(sequence, 0, count)
        return [band, key_sets.all_keys(first, is_far_global)]

    runs = [(jnp.zeros((1,), jnp.int32), min(count, length))] if count else []
    pattern = patterns.Pattern(size, sets, lambda _: runs)
    return patterns.attention(call, "longformer", pattern)


longformer_weights = dense.weights_of(longformer_attention, "Rows sum to one or zero.")
