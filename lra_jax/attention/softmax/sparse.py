"""Sparse Transformer (Child et al. 2019, "Generating Long Sequences with Sparse
Transformers").

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j`` with a stride l of about
sqrt(T) and one of two patterns:

- "strided": ``|i - j| <= l``, or l divides ``i - j``;
- "fixed": j in the same block of l positions as i, or among the last c positions, the
  summary, of any block.

Causal forms, as in the paper, leave out positions j > i.

Cost: O(T W (H + Hv)) time and O(T W) memory, with W = 3 l + T / l for "strided" and
l + c T / l for "fixed": T^1.5 where l = sqrt(T).

Deviations: every head sees the union of the paper's two parts (its "merged" head); in
the paper they may also alternate between layers or heads. LRA's code masks a dense
n-by-n matrix.
"""

import math
from typing import Any

import jax

from lra_jax.attention import dense, inputs
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.softmax import key_sets, patterns
from lra_jax.errors import expected, known

__all__ = ["sparse_attention", "sparse_weights"]


SUMMARY = 8


@documents_in_turn
def sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: int | None = None,
    *,
    segment_ids: jax.Array | None = None,
    pattern: str = "strided",
    stride: int | None = None,
    summary: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes softmax attention over a strided or a fixed pattern.

    Args:
      query, key, value, mask, is_causal, segment_ids: as in `local_attention`. Padding
        on the right and packed documents are exact if `stride` or `max_length` is set.
      max_length: determines the stride if that is None; None = T.
      pattern: "strided" or "fixed".
      stride: l; None = sqrt(max_length), rounded up.
      summary: c, positions at the end of each block that all may see; for "fixed" only.
        None = 8, or the stride if that is less.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, or query and key
        differ in length.
    """
    known("pattern", pattern, ("strided", "fixed"))
    call = Call.of(query, key, value, mask, is_causal, precision=precision)
    length = call.query.shape[1]
    longest = length
    if max_length is not None:
        longest = inputs.check_size("max_length", max_length)
    stride = math.isqrt(longest - 1) + 1 if stride is None else stride
    distance = inputs.check_size("stride", stride)
    count = min(SUMMARY, distance) if summary is None else summary
    if inputs.check_size("summary", count) > distance:
        raise expected("summary", f"at most the stride {distance}", count)
    size = min(distance, length)
    after = 0 if is_causal else size
    near, same = key_sets.within(distance), key_sets.in_block(distance)

    def in_step(query: jax.Array, key: jax.Array) -> jax.Array:
        return ~near(query, key) & ((query - key) % distance == 0)

    def in_summary(query: jax.Array, key: jax.Array) -> jax.Array:
        return ~same(query, key) & (key % distance >= distance - count)

    def strided(sequence: key_sets.Sequence) -> list[key_sets.Keys]:
        return [
            key_sets.band(sequence, size, size, after, near),
            key_sets.columns(sequence, size, in_step),
        ]

    def fixed(sequence: key_sets.Sequence) -> list[key_sets.Keys]:
        ends = key_sets.ends(sequence, size, min(count, size))
        return [
            key_sets.band(sequence, size, 0, 0, same),
            key_sets.all_keys(ends, in_summary),
        ]

    sets = strided if pattern == "strided" else fixed
    return patterns.attention(call, "sparse", patterns.Pattern(size, sets))


sparse_weights = dense.weights_of(sparse_attention, "Rows sum to one or zero.")
