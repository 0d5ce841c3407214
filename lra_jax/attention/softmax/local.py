"""Local attention: every query sees a window around it, or its own block.

``out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j`` over ``|i - j| <= window`` (a
sliding band), or over the j with ``floor(j / block) = floor(i / block)`` (contiguous
blocks, the "Local Attention" of Tay et al. 2021, "Long Range Arena").
Causal forms leave out positions j > i.

Cost: O(T W (H + Hv)) time and O(T W) memory for W = 2 window + C keys per query (window
+ C if causal, W = C in blocks of C), by gathered blocks (`softmax.patterns`).

Deviations: LRA's code reshapes to `[blocks in length, blocks, ...]`, so that its
"blocks" are strided and its padding mask applies to the wrong positions; here blocks
are contiguous. A row that sees nothing is exactly zero.
"""

from typing import Any

import jax

from lra_jax.attention import dense, inputs
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.softmax import key_sets, patterns
from lra_jax.errors import expected

__all__ = ["local_attention", "local_weights"]


WINDOW = 64


@documents_in_turn
def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
    block: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes softmax attention over a window, or over the query's own block.

    Args:
      query, key, value, mask: as in `linear_attention`, of one length T.
      is_causal: position i sees no j > i.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      window: positions on each side that a query sees besides its own; 64 unless
        ``block`` is given. Padding is exact on either side.
      block: positions of a block, instead of a window. Blocks are counted from the
        first position, so padding is exact on the right.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or a size do not fit, both sizes are given,
        or query and key differ in length.
    """
    if window is not None and block is not None:
        got = f"window={window!r} and block={block!r}"
        needed = "one of them, a window around each query or blocks of positions"
        raise expected("window, block", needed, got)
    reach = inputs.check_size("window", WINDOW if window is None else window, 0)
    if block is not None:
        block = inputs.check_size("block", block)
    call = Call.of(query, key, value, mask, is_causal, precision=precision)
    length = call.query.shape[1]
    if block is not None:
        sees = key_sets.in_block(block)
        sizes = min(block, length), 0, 0
    else:
        sees = key_sets.within(reach)
        sizes = patterns.band_sizes(reach, length, is_causal)
    pattern = patterns.Pattern(
        sizes[0], lambda keys: [key_sets.band(keys, *sizes, sees)]
    )
    return patterns.attention(call, "local", pattern)


local_weights = dense.weights_of(local_attention, "Rows sum to one or zero.")
