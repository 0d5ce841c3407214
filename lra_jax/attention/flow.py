"""Flow-Attention (Wu et al. 2022, "Flowformer: Linearizing Transformers with
Conservation Flows").

With non-negative features, queries are sinks and keys are sources of a flow:

- incoming ``I_i = phi(q_i) . sum_j phi(k_j)``,
  outgoing ``O_j = phi(k_j) . sum_i phi(q_i)``;
- conserved: ``I'_i = phi(q_i) . sum_j phi(k_j) / O_j``,
  ``O'_j = phi(k_j) . sum_i phi(q_i) / I_i``;
- competition ``c_j = S softmax_j(O')``, allocation ``a_i = sigmoid(I'_i T / S)``;
- ``out_i = a_i (phi(q_i) / I_i)^T sum_j phi(k_j) c_j v_j^T``.

Cost: O((T + S) H Hv) time. Rows do not sum to one: that is the mechanism's design.

Where the authors' code (thuml/Flowformer) and the paper differ, the core file is
followed: eps is added to both factors of every inner product, and O' is limited to
[-clip, clip] before the softmax. ``clip=None`` is the paper; 10 is their code for
reinforcement learning. As published, their LRA code has ``clip=None``,
``competition_axis="heads"`` and ``feature_map=lambda x: jax.nn.relu(x) + 1e-6``.

Deviation: the authors' code has no working mask. Here padded sources and sinks leave
every sum, the real counts stand for T and S, and padded sources take no part in the
competition, so a padded batch equals each of its samples run alone. Both sides enter
the sums: padded queries matter too, so give ``query_mask`` (in self-attention, the same
mask) unless all queries are real.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import kernels, shapes

__all__ = ["FlowTerms", "flow_attention", "flow_terms", "flow_weights"]


class FlowTerms(NamedTuple):
    """What decides how much flows where; float32 or wider."""

    incoming: jax.Array  # I, [B, T, N]
    outgoing: jax.Array  # O, [B, S, N]
    conserved_sink: jax.Array  # I', [B, T, N]
    conserved_source: jax.Array  # O' before clipping, [B, S, N]
    competition: jax.Array  # c, [B, S, N]
    allocation: jax.Array  # a, [B, T, N]


def flow_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_mask: jax.Array | None = None,
    clip: float | None = 1.0,
    *,
    feature_map: kernels.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes Flow-Attention.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = a real source: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: must be False in this version.
      query_mask: boolean, True = a real sink: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`; None = all real. Rows that are not real come out zero.
      clip: bound on the conserved outgoing flow before the competition; None = none.
      feature_map: "sigmoid", "relu", "elu" (elu(x) + 1), or a non-negative function.
      competition_axis: "source" (the paper), or "heads": the softmax runs over the
        heads of each source, which is what the published LRA code computes.
      eps: added to both factors of every inner product.
      extra_eps: added to every inner product itself; the authors' vision code has 1e-6.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes or a mask do not fit, or `is_causal` is True.
    """
    shapes.check_inputs(query, key, value, is_causal)
    _check_options(is_causal, clip, competition_axis)
    mask, query_mask = _masks(mask, query_mask, query, key)
    dtype = shapes.accumulation_dtype(query, key, value)
    features = _features(query, key, mask, query_mask, feature_map, dtype)
    terms = _terms(
        *features, mask, query_mask, clip, competition_axis, eps, extra_eps, precision
    )
    value = shapes.by_head(value, query.shape[2], mask, dtype)
    out = kernels.contract(*features, value * terms.competition[..., None], precision)
    # Scaling the output instead of phi(q) is the same and saves a pass over it.
    out = out * (terms.allocation / terms.incoming)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def flow_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_mask: jax.Array | None = None,
    clip: float | None = 1.0,
    *,
    feature_map: kernels.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the matrix `[B, N, T, S]` with ``out = weights @ value``.

    float32 or wider, never negative; rows do not sum to one. Arguments and errors are
    those of `flow_attention`.
    """
    shapes.check_inputs(query, key, None, is_causal)
    _check_options(is_causal, clip, competition_axis)
    mask, query_mask = _masks(mask, query_mask, query, key)
    dtype = shapes.accumulation_dtype(query, key)
    features = _features(query, key, mask, query_mask, feature_map, dtype)
    terms = _terms(
        *features, mask, query_mask, clip, competition_axis, eps, extra_eps, precision
    )
    scores = kernels.products(*features, precision)
    rows = (terms.allocation / terms.incoming)[..., None]
    return scores * rows * terms.competition[:, :, None, :]


def flow_terms(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
    clip: float | None = 1.0,
    *,
    feature_map: kernels.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
) -> FlowTerms:
    """Returns the flows, the competition and the allocation behind `flow_attention`.

    Arguments and errors are those of `flow_attention`.
    """
    shapes.check_inputs(query, key)
    _check_options(False, clip, competition_axis)
    mask, query_mask = _masks(mask, query_mask, query, key)
    dtype = shapes.accumulation_dtype(query, key)
    features = _features(query, key, mask, query_mask, feature_map, dtype)
    terms = _terms(
        *features, mask, query_mask, clip, competition_axis, eps, extra_eps, precision
    )
    return FlowTerms(*(jnp.swapaxes(term, 1, 2) for term in terms))


def _check_options(is_causal: bool, clip: float | None, competition_axis: str) -> None:
    shapes.refuse_causal("flow", is_causal)
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"clip: expected a positive number or None, got {clip!r}")
    if competition_axis not in ("source", "heads"):
        raise ValueError(
            f"competition_axis: expected 'source' or 'heads', got {competition_axis!r}"
        )


def _masks(
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
) -> tuple[jax.Array | None, jax.Array | None]:
    batch, length = query.shape[:2]
    sources = shapes.padding_mask(mask, batch, key.shape[1])
    return sources, shapes.padding_mask(query_mask, batch, length, "query_mask")


def _features(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    feature_map: kernels.FeatureMap,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    phi = kernels.feature_map(feature_map)
    num_heads = query.shape[2]
    query_features = phi(shapes.by_head(query, num_heads, query_mask, dtype))
    key_features = phi(shapes.by_head(key, num_heads, mask, dtype))
    # Hidden again after the map, because phi(0) is not zero.
    return (
        shapes.hide_by_head(query_features, query_mask),
        shapes.hide_by_head(key_features, mask),
    )


def _terms(
    query_features: jax.Array,
    key_features: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    clip: float | None,
    competition_axis: str,
    eps: float,
    extra_eps: float,
    precision: jax.lax.PrecisionLike,
) -> FlowTerms:
    """The terms with the heads first, `[B, N, T]`."""

    def inner(features: jax.Array, others: jax.Array, weights: jax.Array | None = None):
        if weights is None:
            total = others.sum(2) + eps
        else:
            total = jnp.einsum("bntm,bnt->bnm", others, weights, precision=precision)
            total = total + eps
        # (features + eps) . total, without a pass that adds eps to the features.
        constant = eps * total.sum(-1)[..., None] + extra_eps
        return kernels.project(features, total, precision) + constant

    incoming = inner(query_features, key_features)
    outgoing = inner(key_features, query_features)
    conserved_sink = inner(query_features, key_features, 1 / outgoing)
    conserved_source = inner(key_features, query_features, 1 / incoming)

    sinks = _count(query_mask, query_features)
    sources = _count(mask, key_features)
    logits = conserved_source if clip is None else kernels.clamp(conserved_source, clip)
    if competition_axis == "heads":
        shares = jax.nn.softmax(logits, axis=1)
    else:
        visible = None if mask is None else mask[:, None, :]
        shares = kernels.masked_softmax(logits, visible, axis=2)
    return FlowTerms(
        incoming=incoming,
        outgoing=outgoing,
        conserved_sink=conserved_sink,
        conserved_source=conserved_source,
        competition=shares * sources,
        allocation=jax.nn.sigmoid(conserved_sink * (sinks / sources)),
    )


def _count(mask: jax.Array | None, features: jax.Array) -> jax.Array:
    """`[B, 1, 1]` real positions, at least 1 so that it can be divided by."""
    if mask is None:
        return jnp.full((1, 1, 1), features.shape[2], features.dtype)
    counts = jnp.maximum(mask.sum(1), 1).astype(features.dtype)
    return counts[:, None, None]
