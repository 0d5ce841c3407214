"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs").

``out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j) + eps)`` with
``phi(x) = elu(x) + 1`` and no 1 / sqrt(H).

Cost: O((T + S) H Hv) time, O(H Hv) memory besides inputs and output. The causal form
sums over j <= i instead.

A stream holds the two sums, whatever its position: `linear_init` starts with empty
sums, `linear_prefill` processes a prompt in one pass, and `linear_step` one position.

The eps is added to the denominator, as in the authors' code (idiap/fast-transformers),
so rows sum to ``z / (z + eps)``; a row without visible keys is exactly zero. Features,
sums and products are float32 or wider even for half-precision inputs: with H = 64,
float16 sums overflow beyond about 760 keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, packed, streams
from lra_jax.attention.causal import documents, engine
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import hidden
from lra_jax.attention.linear.both_sides import both_sides
from lra_jax.attention.linear.sums import Sums, over_chunks, started
from lra_jax.attention.sharded import exchange
from lra_jax.attention.sharded.documents import sliced, sums_before

__all__ = [
    "LinearState",
    "linear_attention",
    "linear_init",
    "linear_prefill",
    "linear_step",
    "linear_weights",
]


class LinearState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: Sums  # [B, N, M, Hv] and [B, N, M]
    position: jax.Array  # of the next token in each sample, [B] int32

    __repr__ = streams.shapes_shown


class _Options(NamedTuple):
    """`feature_maps.Options`, and the eps of the denominator."""

    feature_map: feature_maps.FeatureMap
    dtype: Any
    precision: jax.lax.PrecisionLike
    eps: float


@masking.guarded
def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **flax: Any,
) -> jax.Array:
    """Computes ``phi(q) (phi(k)^T v)``, normalised over the visible keys.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: position i sees keys 0..i only; needs T == S.
      segment_ids: integers `[B, T]`, a run of one positive number for each document
        packed into a row, 0 = padding; documents do not see each other. Needs T == S.
      feature_map: "elu" (elu(x) + 1), "relu", "sigmoid", or a non-negative function of
        an array, of its last axis alone.
      eps: added to the denominator.
      chunking: how the sequence is cut in the causal form and for packed rows; None =
        chosen by the backend.
      precision: of the matrix products, as in ``jnp.einsum``.
      implementation: "xla"; "pallas" or "native", the kernels of docs/kernels.md for
        TPUs and Hopper GPUs or for CPUs; or "auto", the kernels where they run and are
        faster. They have no second derivatives, and take packed rows only on CPUs.
      **flax: keywords that Flax passes to an ``attention_fn``, which are ignored; any
        others raise.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, or there is no kernel
        although one is requested.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> out = linear_attention(query, key, value, is_causal=True)
      >>> first = [x[:, :9] for x in (query, key, value)]
      >>> start = linear_attention(*first, is_causal=True)
      >>> bool(jnp.allclose(out[:, :9], start, atol=1e-5))  # The future is never seen.
      True

      Two documents packed into a row, of lengths 24 and 40, do not see each other:

      >>> documents = jnp.repeat(jnp.array([[1, 2]]), jnp.array([24, 40]), 1)
      >>> row = [x[:1] for x in (query, key, value)]
      >>> out = linear_attention(*row, segment_ids=documents)
      >>> alone = linear_attention(*(x[:, :24] for x in row))
      >>> bool(jnp.allclose(out[:, :24], alone, atol=1e-5))
      True
    """
    inputs.check_keywords(linear_attention, flax)
    inputs.check_inputs(query, key, value, is_causal)
    inputs.check_eps(eps)
    mask = masking.padding_mask(mask, query.shape[0], key.shape[1])
    rows = packed.packed(segment_ids, query, key)
    out = kernels.attended(
        implementation,
        query,
        key,
        value,
        packed.shown(mask, rows),
        is_causal,
        mechanism="linear",
        refusal=None,
        feature_map=feature_maps.for_kernels(feature_map),
        denominator="add",
        eps=eps,
        chunking=chunking,
        precision=precision,
        documents=packed.numbers(rows),
    )
    if out is not None:
        return out
    if is_causal:
        return linear_prefill(
            query,
            key,
            value,
            mask,
            segment_ids=segment_ids,
            feature_map=feature_map,
            eps=eps,
            chunking=chunking,
            precision=precision,
        )[0]
    dtype = inputs.accumulation_dtype(query, key, value)
    options = _Options(feature_map, dtype, precision, eps)
    return _whole(options, query, key, value, mask, rows, chunking)


def _whole(
    options: _Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    rows: packed.Packed | None,
    chunking: engine.Chunking | None,
    axis: str | None = None,
) -> jax.Array:
    """The non-causal form `[B, T, N, Hv]`, also for packed rows or a device's slice."""
    num_heads, dtype, precision = query.shape[2], options.dtype, options.precision
    if rows is not None:
        out, total = document_sums(
            options, query, key, value, rows, mask=mask, chunking=chunking
        )
        return _divided(options, out, total).astype(query.dtype)
    phi = feature_maps.feature_map(options.feature_map)
    features = phi(masking.by_head(query, num_heads, dtype=dtype))
    sums = part_sums(options, key, value, num_heads, mask)
    out, total = read(features, exchange.total(sums, axis), precision)
    out = _divided(options, out, total)
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def read(
    features: jax.Array, sums: Sums, precision: jax.lax.PrecisionLike
) -> tuple[jax.Array, jax.Array]:
    """The sums as features `[B, N, T, M]` see them: `[B, N, T, Hv]`, `[B, N, T]`."""
    product = functools.partial(jnp.einsum, precision=precision)
    out = product("bntm,bnmv->bntv", features, sums.summary)
    return out, feature_maps.project(features, sums.total, precision)


linear_weights = dense.weights_of(
    linear_attention, "Its rows sum to one, but for the eps of the denominator."
)


def linear_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    state: LinearState | None = None,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, LinearState]:
    """Processes a whole prompt, or a later part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, mask and options as in `linear_attention`.
      state: the state so far; None = a new stream. In a packed row, the first document
        continues it.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position:
      in a packed row, that of the last document.

    Raises:
      ValueError: shapes, dtypes, the mask or the state do not fit.
    """
    inputs.check_eps(eps)
    rows = packed.packed(segment_ids, query, key)
    mask, dtype, position = streams.begun(state, query, key, value, mask, rows)
    out, sums = _causal(
        _Options(feature_map, dtype, precision, eps),
        query,
        key,
        value,
        mask,
        None if state is None else state.sums,
        packed.resets(rows),
        chunking,
    )
    return out, LinearState(sums, position)


linear_init = streams.make_init(linear_prefill)
linear_step = streams.make_step(linear_prefill)


def _causal(
    options: _Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    state: Sums | None,
    resets: jax.Array | None,
    chunking: engine.Chunking | None,
) -> tuple[jax.Array, Sums]:
    dtype = query.dtype
    arrays = engine.Arrays(query, key, value)
    options, start, arrays = started(options, arrays, state, mask=mask)
    return engine.run(
        engine.Form(feature_maps.prepared, segment, options, _scale),
        start,
        arrays,
        mask=mask,
        resets=resets,
        chunking=chunking,
        dtype=dtype,
    )


def segment(
    options: Any,
    state: Sums,
    features: tuple[jax.Array, jax.Array, jax.Array],
    _: None,
    found: Documents | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Sums]:
    """One segment of linear attention, see `engine.Form`.

    Returns:
      ``sum_{j <= i} phi(q_i) . phi(k_j) v_j`` `[B, N, P, C, Hv]`, the same without v_j
      `[B, N, P, C]`, and the state after.
    """
    query, key, value = features
    precision = options.precision
    scores = jnp.einsum("bnpim,bnpjm->bnpij", query, key, precision=precision)
    scores = hidden(scores, documents.visible(scores.shape[-1], found))
    key, query = documents.stayers(key, found), documents.readers(query, found)
    decay = documents.decay(None, found, key.dtype)
    return over_chunks(
        state, scores, query, key, value, decay=decay, precision=precision
    )


def causal_sums(
    options: feature_maps.Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None = None,
    state: Sums | None = None,
    resets: jax.Array | None = None,
    chunking: engine.Chunking | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Sums]:
    """``sum_{j <= i} phi(q_i) . phi(k_j) v_j``, and the same without v_j.

    Args:
      options: phi, the dtype of computation and result, and the products' precision.
      query: `[B, T, N, H]`.
      key: `[B, T, n, H]`.
      value: `[B, T, n, Hv]`.
      mask: the real keys, `[B, T]`; None = all.
      state: before the sequence; None = an empty state.
      resets: where documents start, `[B, T]`; None = one per row.
      chunking: how the sequence is cut.

    Returns:
      `[B, T, N, Hv]` and `[B, T, N]`, and the state after the last position.

    Raises:
      ValueError: the state does not fit.
    """
    arrays = engine.Arrays(query, key, value)
    options, start, arrays = started(options, arrays, state, mask=mask)
    return engine.run(
        engine.Form(feature_maps.prepared, segment, options),
        start,
        arrays,
        mask=mask,
        resets=resets,
        chunking=chunking,
        dtype=options.dtype,
    )


def document_sums(
    options: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: packed.Packed,
    *,
    mask: jax.Array | None,
    chunking: engine.Chunking | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``sum_j phi(q_i) . phi(k_j) v_j`` and the same without v_j, over i's document.

    Args:
      options: with the fields of `feature_maps.Options`, as in `causal_sums`.
      query: `[B, T, N, H]`.
      key: `[B, T, n, H]`.
      value: `[B, T, n, Hv]`.
      rows: where the documents are.
      mask: the real keys, `[B, T]`; None = all that are not padding.
      chunking: how the sequence is cut.

    Returns:
      `[B, T, N, Hv]` and `[B, T, N]`.
    """
    mask = packed.shown(mask, rows)
    arrays = engine.Arrays(query, key, value)
    options, nothing, arrays = started(options, arrays, mask=mask)
    # The sums that other devices hold, if the rows are sliced.
    around = rows.around(
        functools.partial(part_sums, options, arrays.key, value, query.shape[2], mask)
    )
    before, beyond = around or (nothing, nothing)
    features = feature_maps.prepared(options, arrays, mask, None)
    out, total = both_sides(
        features,
        rows.resets,
        before,
        beyond,
        chunk=(chunking or engine.Chunking()).chunk,
        precision=options.precision,
    )
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(total, 1, 2)


def part_sums(
    options: Any,
    key: jax.Array,
    value: jax.Array,
    num_heads: int,
    mask: jax.Array | None,
    part: jax.Array | None = None,
) -> Sums:
    """The sums over the real positions of a part, a mask `[B, T]`; None = all.

    ``options`` has the fields of `feature_maps.Options`.
    """
    mask = masking.both(mask, part)
    phi = feature_maps.feature_map(options.feature_map)
    features = phi(masking.by_head(key, num_heads, mask, options.dtype))
    # Hidden again after the map, because phi(0) may not be zero.
    features = masking.hide_by_head(features, mask)
    values = masking.by_head(value, num_heads, mask, options.dtype)
    return summed(features, values, options.precision)


def summed(
    features: jax.Array, values: jax.Array, precision: jax.lax.PrecisionLike
) -> Sums:
    """The sums over all positions of ``phi(k_j) v_j^T`` and ``phi(k_j)``."""
    summary = jnp.einsum("bnsm,bnsv->bnmv", features, values, precision=precision)
    return Sums(summary, features.sum(2))


def _scale(options: _Options, denominator: jax.Array) -> jax.Array:
    return feature_maps.over(jnp.ones_like(denominator), denominator + options.eps)


def _divided(options: _Options, out: jax.Array, total: jax.Array) -> jax.Array:
    return feature_maps.over(out, (total + options.eps)[..., None])


def linear_slice(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    *,
    axis: str,
    is_causal: bool,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """One device's part of `linear_attention`, see `lra_jax.attention.sharded`."""
    rows = sliced(segment_ids, axis)
    mask = packed.shown(mask, rows)
    dtype = inputs.accumulation_dtype(query, key, value)
    options = _Options(feature_map, dtype, precision, eps)
    if not is_causal:
        return _whole(options, query, key, value, mask, rows, chunking, axis)
    part = functools.partial(part_sums, options, key, value, query.shape[2], mask)
    return _causal(
        options,
        query,
        key,
        value,
        mask,
        sums_before(part, rows, axis),
        packed.resets(rows),
        chunking,
    )[0]
