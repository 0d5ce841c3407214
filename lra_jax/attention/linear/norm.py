"""NormAttention (Qin et al. 2022, "The Devil in Linear Transformer"), TransNormer.

``out_i = norm(phi(q_i)^T sum_j phi(k_j) v_j^T)``: linear attention whose output is
normalised instead of divided by ``phi(q_i)^T sum_j phi(k_j)``, because the gradient of
that division is unbounded.

By default phi(x) = elu(x) + 1 (their T2; T1 has elu alone) and the norm is an RMS norm
over all heads of a position together, as in the authors' code (OpenNLPLab/lra), without
its learned gain, which the projection that follows can absorb. There is no 1 / sqrt(H):
the norm would cancel it, like any other scale of queries, keys or values.

Cost: O((T + S) H Hv) time, O(H Hv) memory besides inputs and output. The causal form
sums over j <= i instead. A stream holds one sum, whatever its position.

Deviations: the authors' code has no mask; here padding is exact. Sums and the norm are
float32 or wider, whatever the input dtype; rows without visible keys are exactly zero.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, packed, streams
from lra_jax.attention.causal import engine
from lra_jax.attention.linear.linear import (
    LinearState,
    causal_sums,
    document_sums,
    read,
    summed,
)

__all__ = [
    "NormState",
    "norm_attention",
    "norm_init",
    "norm_prefill",
    "norm_step",
    "norm_weights",
]


NormState = LinearState


@masking.guarded
def norm_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "elu",
    norm: str | None = "rms",
    per_head: bool = False,
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **flax: Any,
) -> jax.Array:
    """Computes ``norm(phi(q) (phi(k)^T v))`` over the visible keys.

    Args:
      query, key, value, mask, is_causal, segment_ids: as in `linear_attention`.
      feature_map: "elu" (elu(x) + 1), "relu", "sigmoid", "silu", or a function of an
        array.
      norm: "rms", or "layer", which first subtracts the mean; None returns the sum,
        which grows with the length.
      per_head: normalise each head of a position separately, not all heads together.
      eps: of the norm.
      implementation: "xla"; "native", the kernels of docs/kernels.md for CPUs; or
        "auto", the kernels where they run and are faster. They do not support second
        derivatives.
      chunking, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit.
    """
    inputs.check_keywords(norm_attention, flax)
    inputs.check_inputs(query, key, value, is_causal)
    feature_maps.check_norm(norm)
    inputs.check_flag("per_head", per_head)
    mask = masking.padding_mask(mask, query.shape[0], key.shape[1])
    rows = packed.packed(segment_ids, query, key)
    out = kernels.attended(
        implementation,
        query,
        key,
        value,
        packed.shown(mask, rows),
        is_causal,
        mechanism="norm",
        refusal=None,
        feature_map=feature_maps.for_kernels(feature_map),
        denominator="none",
        eps=0.0,
        chunking=chunking,
        precision=precision,
        documents=packed.numbers(rows),
    )
    if out is not None:
        return _finished(out, norm, per_head, eps, query.dtype)
    if is_causal:
        return norm_prefill(
            query,
            key,
            value,
            mask,
            segment_ids=segment_ids,
            feature_map=feature_map,
            norm=norm,
            per_head=per_head,
            eps=eps,
            chunking=chunking,
            precision=precision,
        )[0]
    dtype = inputs.accumulation_dtype(query, key, value)
    if rows is not None:
        options = feature_maps.Options(feature_map, dtype, precision)
        out, _denominators = document_sums(
            options, query, key, value, rows, mask=mask, chunking=chunking
        )
        return _finished(out, norm, per_head, eps, query.dtype)
    q, k = feature_maps.features(query, key, feature_map, dtype, mask)
    value = masking.by_head(value, query.shape[2], mask, dtype)
    out, _denominators = read(q, summed(k, value, precision), precision)
    return _finished(jnp.swapaxes(out, 1, 2), norm, per_head, eps, query.dtype)


norm_weights = dense.weights_of(
    norm_attention,
    "It leaves out the norm, which acts on the output.",
    fixed={"norm": None},
)


def norm_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    state: NormState | None = None,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "elu",
    norm: str | None = "rms",
    per_head: bool = False,
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, NormState]:
    """Processes a whole prompt, or a later part of one, in one pass.

    Options are those of `norm_attention`; the other arguments, the result and the
    errors are those of `linear_prefill`.
    """
    rows = packed.packed(segment_ids, query, key)
    mask, dtype, position = streams.begun(state, query, key, value, mask, rows)
    feature_maps.check_norm(norm)
    inputs.check_flag("per_head", per_head)
    (out, _denominators), sums = causal_sums(
        feature_maps.Options(feature_map, dtype, precision),
        query,
        key,
        value,
        mask=mask,
        state=None if state is None else state.sums,
        resets=packed.resets(rows),
        chunking=chunking,
    )
    out = _finished(out, norm, per_head, eps, query.dtype)
    return out, NormState(sums, position)


norm_init = streams.make_init(norm_prefill)
norm_step = streams.make_step(norm_prefill)


def _finished(
    out: jax.Array, norm: str | None, per_head: bool, eps: float, dtype: jnp.dtype
) -> jax.Array:
    """The norm of `[B, T, N, Hv]`."""
    axes = (3,) if per_head else (2, 3)
    return feature_maps.normalised(out, norm, axes, eps).astype(dtype)
