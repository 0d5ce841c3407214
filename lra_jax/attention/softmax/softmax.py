"""Softmax attention, the quadratic baseline.

``out_i = sum_j softmax_j(q_i . k_j / sqrt(H)) v_j``
(Vaswani et al. 2017, "Attention Is All You Need").

Cost: O(T S (H + Hv)) time. Short sequences are computed from the matrix of weights,
O(T S) memory; longer ones in blocks that never form it, O(T + S) memory
(`lra_jax.attention.softmax.blockwise`). The choice changes results only by rounding.

A stream holds the keys and values of up to ``max_length`` positions: its state has a
constant but large size, and each step costs O(max_length).

Deviations from common code: a row that may attend to nothing is exactly zero, with zero
gradients; an additive -inf would give NaN and an additive -1e9 the mean of the hidden
values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, feature_maps, inputs, masking, packed, streams
from lra_jax.attention.softmax import blockwise, cache
from lra_jax.attention.softmax.blockwise import Visible
from lra_jax.attention.softmax.cache import SoftmaxState
from lra_jax.errors import expected

__all__ = [
    "SoftmaxState",
    "softmax_attention",
    "softmax_init",
    "softmax_prefill",
    "softmax_step",
    "softmax_weights",
]


# The longest dense form, and the allowed block sizes: measured on a CPU, a guess
# elsewhere.
_ON_CPU, _ELSEWHERE = (256, range(96, 209, 8)), (2048, (1024,))
# Up to this many queries the dense form is used, whatever the number of keys.
_FEW = 16


def softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
    block: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes ``softmax(q k^T / sqrt(H)) v``.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N (grouped queries).
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, N, T, S]`. Only mechanisms that form scores support a query axis.
      is_causal: position i sees keys 0..i only; needs T == S.
      segment_ids: integers `[B, T]`, a run of one positive number for each document
        packed into a row, 0 = padding; documents do not see each other. Needs T == S.
      implementation: "dense" forms the matrix of weights, "blocks" never does and has
        no forward-mode derivative (``jax.jvp``); None = blocks for more than 16 queries
        with T S beyond 256^2 on a CPU, 2048^2 elsewhere.
      block: positions of a block; None = on a CPU the size from 96 to 208 that divides
        T and S most evenly, 1024 elsewhere.
      precision: of the matrix products, as in ``jnp.einsum``.
      **flax: keywords that Flax passes to an ``attention_fn``, which are ignored; any
        others raise.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; logits and softmax are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> lengths = jnp.array([64, 40])
      >>> mask = jnp.arange(64)[None] < lengths[:, None]  # Real positions.
      >>> softmax_attention(query, key, value, mask[:, None, None]).shape
      (2, 64, 4, 16)
    """
    inputs.check_keywords(softmax_attention, flax)
    inputs.check_inputs(query, key, value, is_causal)
    form = _Form(implementation, block, precision)
    rows = packed.documents(segment_ids, query, key)
    arrays, visible = _prepare(query, key, value, mask, rows)
    return jnp.swapaxes(form.attend(*arrays, visible, is_causal), 1, 2)


@dense.precise
def softmax_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, S]`, float32 or wider; rows sum to one or zero.

    Arguments and errors are those of `softmax_attention`.
    """
    inputs.check_keywords(softmax_weights, flax)
    inputs.check_inputs(query, key, None, is_causal)
    rows = packed.documents(segment_ids, query, key)
    (query, key, _), visible = _prepare(query, key, key, mask, rows)
    return _weights(query, key, visible, is_causal, precision)


def softmax_init(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    max_length: int,
) -> SoftmaxState:
    """Returns the state of a stream before its first position.

    Args:
      batch_size: B.
      num_heads: the key's heads, or any multiple of them up to the query's.
      head_dim: H.
      value_dim: Hv; None = H.
      dtype: floating dtype in which keys and values are kept.
      max_length: number of positions that the stream can hold.

    Raises:
      ValueError: the dtype is not floating, or a size is not a positive int.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise expected("dtype", "a floating dtype", jnp.dtype(dtype))
    batch = inputs.check_size("batch_size", batch_size)
    heads = inputs.check_size("num_heads", num_heads)
    width = inputs.check_size("head_dim", head_dim)
    key = (batch, heads, inputs.check_max_length(max_length, 1), width)
    value_width = width if value_dim is None else value_dim
    value = (*key[:3], inputs.check_size("value_dim", value_width))
    return cache.empty(key, value, dtype, dtype)


def softmax_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    max_length: int | None = None,
    state: SoftmaxState | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
    block: int | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, SoftmaxState]:
    """Processes a whole prompt, or a later part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value and options as in `softmax_attention`. The next
        token comes after each sample's last real position.
      mask: True = a real position, `[B, T]` or anything that broadcasts to
        `[B, 1, 1, T]`.
      max_length: positions that the stream can hold; pass either this or a state, which
        contains it.
      state: the state so far; None = a new stream, whose state keeps keys and values in
        their own dtypes and heads.
      segment_ids: as in `softmax_attention`, for a new stream only: ``state`` must be
        None.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position:
      in a packed row, that of the last document.

    Raises:
      ValueError: shapes, dtypes, the mask or the state do not fit, or the prompt
        reaches beyond `max_length`. Under ``jax.jit`` a state's position is unknown, so
        this is not checked: keys from `max_length` on are then neither kept nor seen.
    """
    inputs.check_inputs(query, key, value, True)
    batch, length = query.shape[:2]
    mask = masking.padding_mask(mask, batch, length)
    form = _Form(implementation, block, precision)
    if state is None:
        size = inputs.check_max_length(max_length, length)
        rows = packed.documents(segment_ids, query, key)
        state = cache.empty_for(key, value, size)
        if rows is None:
            after = cache.extend(state, key, value, mask)
        else:
            after = cache.last_documents(state, key, value, mask, rows)
        arrays, visible = _prepare(query, key, value, mask, rows)
        return jnp.swapaxes(form.attend(*arrays, visible, True), 1, 2), after
    if segment_ids is not None:
        needed = "None with a state: a stream under way has one document per row"
        raise expected("segment_ids", needed, "an array")
    if max_length is not None:
        raise expected("max_length", "None with a state", f"{max_length!r}")
    cache.check(state, query, key, value, mask)
    after = cache.extend(state, key, value, mask)
    return _read_cache(form, query, state, after), after


# A step beyond `max_length` raises outside ``jax.jit``; inside, its key is neither kept
# nor seen.
softmax_step = streams.make_step(softmax_prefill)


@dataclass(frozen=True)
class _Form:
    """How to compute the attention; see `softmax_attention`."""

    implementation: str | None
    block: int | None
    precision: jax.lax.PrecisionLike

    def __post_init__(self) -> None:
        if self.implementation not in (None, "dense", "blocks"):
            needed = "'dense', 'blocks' or None"
            raise expected("implementation", needed, f"{self.implementation!r}")
        if self.block is not None:
            inputs.check_size("block", self.block)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        visible: Visible,
        is_causal: bool = False,
    ) -> jax.Array:
        """`[B, N, T, H]`, and key and value with N heads -> `[B, N, T, Hv]`."""
        on_cpu = jax.default_backend() == "cpu"
        longest, sizes = _ON_CPU if on_cpu else _ELSEWHERE
        form, out_dtype = self.implementation, query.dtype
        padded = visible.document if visible.pairs is None else visible.pairs
        query, finite = masking.hide_broken(query, padded)
        length, keys = query.shape[2], key.shape[2]
        if form is None:
            # For a few queries the weights are smaller than the keys.
            dense = length <= _FEW or length * keys <= longest**2
            form = "dense" if dense else "blocks"
        if form == "dense":
            weights = _weights(query, key, visible, is_causal, self.precision)
            if value.dtype != query.dtype:  # which would round the weights
                value = value.astype(weights.dtype)
            # XLA on a CPU reads the values for one row up to five times slower than
            # for two.
            twice = length == 1 and on_cpu
            rows = jnp.repeat(weights, 2, axis=2) if twice else weights
            out = jnp.einsum(
                "bnts,bnsv->bntv",
                rows.astype(value.dtype),
                value,
                precision=self.precision,
                preferred_element_type=weights.dtype,
            )[:, :, :length]
        else:
            out = blockwise.attend(
                query,
                key,
                value,
                visible,
                is_causal,
                block=self.block or _best_block(length, keys, sizes),
                precision=self.precision,
            )
        return masking.broken_again(out, finite).astype(out_dtype)


def _best_block(length: int, keys: int, sizes: Sequence[int]) -> int:
    """The block size with the fewest pairs in whole blocks; in a tie, about 128."""

    def costs(size: int) -> tuple[int, int]:
        pairs = -(-length // size) * -(-keys // size) * size**2
        return pairs, abs(size - 128)

    return min(sizes, key=costs)


def _read_cache(
    form: _Form, query: jax.Array, before: SoftmaxState, after: SoftmaxState
) -> jax.Array:
    """The attention of the next positions, `[B, T, N, H]` to `[B, T, N, Hv]`.

    Keys and values stay in place: a copy would cost more than reading them. Query heads
    that share a key head become additional rows.
    """
    batch, length, num_heads, width = query.shape
    heads = math.lcm(after.key.shape[1], after.value.shape[1])
    shared = num_heads // heads
    rows = jnp.swapaxes(query, 1, 2).reshape(batch, heads, shared * length, width)
    key, value = (
        jnp.repeat(x, heads // x.shape[1], axis=1) for x in (after.key, after.value)
    )
    last = jnp.tile(cache.places(before, length), (1, shared))
    visible = Visible(after.visible[:, None, None], last)
    out = form.attend(rows, key, value, visible)
    return jnp.swapaxes(out.reshape(batch, num_heads, length, -1), 1, 2)


def _prepare(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    rows: packed.Packed | None,
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], Visible]:
    """Query, key and value, N heads first, zero where hidden; the visible pairs."""
    batch, length, num_heads, _ = query.shape
    pairs = masking.pair_mask(mask, batch, num_heads, length, key.shape[1])
    real, label = (None, None) if rows is None else (rows.real, rows.label)
    keys = (
        inputs.match_heads(masking.hide_unseen(x, pairs), num_heads)
        for x in (key, value)
    )
    arrays = query, *(masking.hide(x, real) for x in keys)
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in arrays)
    return (query, key, value), Visible(pairs, document=label)


def _weights(
    query: jax.Array,
    key: jax.Array,
    visible: Visible,
    is_causal: bool,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    """The weights `[B, N, T, S]` of queries `[B, N, T, H]` and keys `[B, N, S, H]`."""
    pairs, last, document = visible
    dtype = inputs.accumulation_dtype(query, key)
    if query.dtype != key.dtype:
        query, key = query.astype(dtype), key.astype(dtype)
    logits = jnp.einsum(
        "bnth,bnsh->bnts",
        query,
        key,
        precision=precision,
        preferred_element_type=dtype,
    )
    if is_causal:
        pairs = masking.both(pairs, jnp.tri(query.shape[2], dtype=bool)[None, None])
    elif last is not None:
        columns = jnp.arange(key.shape[2], dtype=jnp.int32)[None, None, None]
        pairs = masking.both(pairs, columns <= last[:, None, :, None])
    if document is not None:
        pairs = masking.both(pairs, packed.share(document, document))
    logits = logits / math.sqrt(query.shape[-1])
    return feature_maps.masked_softmax(logits, pairs)
