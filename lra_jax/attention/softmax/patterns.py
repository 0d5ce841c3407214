"""Exact softmax attention over the few keys that a pattern makes visible to each query.

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j`` with a set A(i) that
depends on positions alone: windows, global tokens, strides, random blocks. The
sequence is cut into P blocks of C positions. A `Pattern` gives the sets of keys that
the queries of each block may see (`softmax.key_sets`): gathered blocks, not an n-by-n
mask. `attention` computes the scores of every set, leaves out the pairs that the set's
rule excludes, and normalises over all sets together. Sets must not overlap: a pair in
two of them would count twice.

Cost: O(T K (H + Hv)) time and O(T K) memory for K gathered keys per query. The backward
pass keeps only the inputs and gathers again.

Positions count from 0 in the padded batch, so padding on the right is exact; hidden
keys have position -1 wherever they are gathered. Scores, softmax and sums are float32
or wider, and a row that sees nothing is exactly zero.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.call import Call
from lra_jax.attention.softmax import key_sets
from lra_jax.attention.softmax.key_sets import Keys, Sequence

# For each layout: queries `[B, N, P, C, H]` times keys, and weights times values.
_PRODUCTS = {
    "block": ("bnpch,bnpkh->bnpck", "bnpck,bnpkv->bnpcv"),
    "shared": ("bnpch,bnkh->bnpck", "bnpck,bnkv->bnpcv"),
    "column": ("bnpch,bnkch->bnpck", "bnpck,bnkcv->bnpcv"),
}

# Block sizes for patterns that do not fix them: small enough that few gathered keys lie
# outside a query's window, large enough for the matrix products.
_SMALLEST, _LARGEST = 32, 64

# The first position of each sample, `[1 or B]`, and how many there are.
Run = tuple[jax.Array, int]


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees; causal forms leave out the later ones of these.

    Attributes:
      size: C, positions of a block of queries.
      sets: from keys and values to the sets of keys that each block sees.
      global_runs: from keys and values to runs of positions, the same for all heads,
        whose queries see every position instead.
    """

    size: int
    sets: Callable[[Sequence], list[Keys]]
    global_runs: Callable[[Sequence], list[Run]] = lambda _: []


def attention(call: Call, name: str, pattern: Pattern) -> jax.Array:
    """Softmax attention over a pattern's keys, `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: query and key differ in length.
    """

    def visible(keys: Keys) -> Keys:
        if not call.is_causal:
            return keys
        return replace(keys, rule=lambda i, j: keys.rule(i, j) & (j <= i))

    def compute(queries: jax.Array, place: jax.Array, sequence: Sequence) -> jax.Array:
        sets = [visible(keys) for keys in pattern.sets(sequence)]
        out, _ = attend(queries, place, sets, call.precision)
        for start, count in pattern.global_runs(sequence):
            everything = [visible(key_sets.all_keys(sequence, key_sets.always))]
            run, at = (key_sets.take_run(x, start, count) for x in (queries, place))
            run, _ = attend(run, at, everything, call.precision)
            out = key_sets.put_run(out, run, start)
        return out

    return in_blocks(call, name, pattern.size, compute)


def prepare(call: Call, name: str) -> tuple[jax.Array, Sequence]:
    """The query `[B, N, T, H]`, and keys and values, of an attention of this name.

    Raises:
      ValueError: query and key differ in length.
    """
    inputs.check_self(call.query, call.key, name)
    mixed = len({x.dtype for x in (call.query, call.key, call.value)}) > 1
    query, key, value = call.by_head(call.dtype if mixed else None)
    number = jnp.arange(1, query.shape[2] + 1, dtype=jnp.int32)[None]
    if call.mask is not None:
        number = jnp.where(call.mask, number, jnp.int32(0))
    return query, Sequence(key, value, number[:, None, :, None])


def in_blocks(
    call: Call,
    name: str,
    size: int,
    compute: Callable[[jax.Array, jax.Array, Sequence], jax.Array],
) -> jax.Array:
    """Computes blocks of C = ``size`` positions: `[B, T, N, Hv]`, in the query's dtype.

    ``compute`` maps queries `[B, N, P, C, H]`, their positions `[1, 1, P, C, 1]`, and
    the keys and values to `[B, N, P, C, Hv]`; the backward pass calls it again.

    Raises:
      ValueError: query and key differ in length.
    """
    query, sequence = prepare(call, name)

    @jax.checkpoint
    def run(query: jax.Array, sequence: Sequence) -> jax.Array:
        queries = key_sets.cut(query, size)
        place = key_sets.places(queries.shape[2], size)
        return compute(queries, place, sequence)

    return call.finish(key_sets.paste(run(query, sequence), query.shape[2]))


def band_sizes(window: int, length: int, is_causal: bool) -> tuple[int, int, int]:
    """The block size for a window, and the number of keys before and after a block."""
    reach = min(window, length - 1)
    size = min(max(_SMALLEST, min(reach, _LARGEST)), length)
    return size, reach, 0 if is_causal else reach


def attend(
    query: jax.Array,
    position: jax.Array,
    sets: list[Keys],
    precision: jax.lax.PrecisionLike,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention over the union of sets without a pair in common.

    Args:
      query: `[B, N, P, C, H]`.
      position: of the queries, broadcastable to `[B, N, P, C, 1]`.
      sets: the keys.
      precision: of the matrix products.

    Returns:
      `[B, N, P, C, Hv]`, float32 or wider, zero for queries that see nothing; and the
      logarithm of each query's sum of ``exp(score)``, `[B, N, P, C, 1]`, for those the
      lowest finite number.
    """
    dtype = inputs.accumulation_dtype(query)
    product = functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=dtype
    )
    lowest = jnp.finfo(dtype).min
    scale = 1 / math.sqrt(query.shape[-1])
    seen = [(s.position >= 0) & s.rule(position, s.position) for s in sets]
    scores = []
    for s, visible in zip(sets, seen, strict=True):
        score = product(_PRODUCTS[s.layout][0], query, s.key) * scale
        score = score if s.discount is None else score - s.discount
        scores.append(jnp.where(visible, score, lowest))
    peaks = [score.max(-1, keepdims=True) for score in scores]
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, peaks))
    total, out = jnp.zeros((), dtype), jnp.zeros((), dtype)
    for s, visible, score in zip(sets, seen, scores, strict=True):
        weights = jnp.where(visible, jnp.exp(feature_maps.below(score, peak)), 0)
        total = total + weights.sum(-1, keepdims=True)
        weights = weights.astype(s.value.dtype)
        out = out + product(_PRODUCTS[s.layout][1], weights, s.value)
    # The largest visible weight is 1, so a total of 0 means that there is none.
    any_seen = total > 0
    total = jnp.where(any_seen, total, 1)
    return out / total, jnp.where(any_seen, jnp.log(total) + peak, lowest)
