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

The competition is the paper's softmax. ``clip`` limits O' to [-clip, clip] before it:
at 30, the default, it only keeps the exponential finite, since O' has a mean of T / S.
The authors' code (thuml/Flowformer) has other limits: 1 in its core file, which cuts
off every source above that mean, 5 for language and 10 for reinforcement learning.
Their LRA code has ``clip=None``, ``competition_axis="heads"`` and
``feature_map=lambda x: jax.nn.relu(x) + 1e-6``. From the core file comes eps, which is
added to both factors of every inner product.

``competition=False`` and ``allocation=False`` are the two ablations of the paper's
tables, ``c = 1`` and ``a = 1``.

Deviation: the authors' code has no working mask. Here padded sources and sinks leave
every sum, the real counts stand for T and S, and padded sources take no part in the
competition, so a padded batch equals each of its samples run alone. Both sides enter
the sums: padded queries matter too, so give ``query_mask`` (in self-attention, the same
mask) unless all queries are real.

The causal form is a definition of its own: `lra_jax.attention.flow.causal_form`. It is
self-attention, so there ``query_mask`` is ``mask`` unless given. A stream (`flow_init`,
`flow_prefill`, `flow_step`) holds its sums, whatever the position.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import chunks
from lra_jax.attention.causal.raw import Inputs
from lra_jax.attention.flow import causal_form as flow_causal
from lra_jax.attention.flow import parts as flow_parts
from lra_jax.attention.flow.causal_form import FlowState
from lra_jax.attention.flow.parts import FlowTerms, Options
from lra_jax.attention.registry import Mechanism
from lra_jax.attention.sharded.flow_slice import flow_slice as flow_slice

__all__ = [
    "FlowState",
    "FlowTerms",
    "flow_attention",
    "flow_init",
    "flow_prefill",
    "flow_step",
    "flow_terms",
    "flow_weights",
]

MECHANISM = Mechanism(
    name="flow",
    causal=True,
    cross=True,
    stream=True,
    kernels=True,
    sharded="flow_slice",
    cost="(T + S) H^2",
    summary="conserved flows: sources compete, sinks allocate (Flowformer)",
    source="Wu et al. 2022",
    # thuml/Flowformer, folder Flowformer_LRA; the retrieval file has LRA's sizes.
    presets={
        "official": {
            "*": {
                "model.attention_options": "clip=None,competition_axis=heads,"
                "feature_map=relu+1e-6"
            },
            "listops": {
                "model.num_layers": 1,
                "model.num_heads": 2,
                "train.learning_rate": 0.005,
            },
            "text": {"model.num_layers": 1, "train.learning_rate": 0.005},
            "image": {"model.num_heads": 4},
            "pathfinder": {
                "model.num_layers": 1,
                "model.num_heads": 8,
                "model.embed_dim": 256,
                "model.qkv_dim": 128,
                "model.mlp_dim": 256,
                "train.learning_rate": 0.0001,
            },
        }
    },
)


def flow_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_mask: jax.Array | None = None,
    clip: float | None = 30.0,
    *,
    feature_map: feature_maps.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    competition: bool = True,
    allocation: bool = True,
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    chunking: chunks.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **_: Any,
) -> jax.Array:
    """Computes Flow-Attention.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = a real source: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: the causal definition; needs T == S.
      query_mask: boolean, True = a real sink: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`; None = all, if causal as `mask`. Other rows come out zero.
      clip: bound on the conserved outgoing flow before the competition; None = none.
      feature_map: "sigmoid", "relu", "relu+1e-6" (the published LRA code), "elu"
        (elu(x) + 1), or a non-negative function.
      competition_axis: "source" (the paper), or "heads": the softmax runs over the
        heads of each source (the published LRA code; not causal).
      competition: False = without: ``c = 1``, every source counts alike.
      allocation: False = without: ``a = 1``, every sink takes all of its flow.
      eps: added to both factors of every inner product.
      extra_eps: added to every inner product itself; the authors' vision code has 1e-6.
      chunking: how the causal form cuts the sequence; None = by the backend.
      precision: of the matrix products, as in ``jnp.einsum``.
      implementation: "xla", "pallas", or "auto": the kernels of docs/kernels.md where
        they run and know the options.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, a mask or an option do not fit, or there is no
        kernel where one is wanted.
    """
    inputs.check_inputs(query, key, value, is_causal)
    options = Options(
        clip=clip,
        competition_axis=competition_axis,
        competition=competition,
        allocation=allocation,
        eps=eps,
        extra_eps=extra_eps,
        precision=precision,
    )
    masks = _masks(mask, query_mask, is_causal, query, key)
    refusal = flow_parts.refusal(options, is_causal)
    arrays = query, key, value
    target = kernels.choose(implementation, *arrays, feature_map, chunking, refusal)
    if target is not None:
        asked = (masks, is_causal, options, feature_map, chunking)
        return kernels.attend_flow(target, *arrays, *asked)
    if is_causal:
        arguments = (Inputs(query, key, value), *masks, options, feature_map)
        return flow_causal.causal_flow(*arguments, chunking=chunking)[0]
    dtype = inputs.accumulation_dtype(query, key, value)
    features = feature_maps.features(query, key, feature_map, dtype, *masks)
    value = inputs.by_head(value, query.shape[2], masks[0], dtype)
    terms = flow_parts.terms(*features, *masks, options)
    value = value * terms.competition[..., None]
    out = feature_maps.contract(*features, value, precision)
    # Scaling the output instead of phi(q) is the same and saves a pass over it.
    out = out * (terms.allocation / terms.incoming)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def flow_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    query_mask: jax.Array | None = None,
    clip: float | None = 30.0,
    *,
    feature_map: feature_maps.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    competition: bool = True,
    allocation: bool = True,
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the matrix `[B, N, T, S]` with ``out = weights @ value``.

    float32 or wider, never negative; rows do not sum to one. Arguments and errors are
    those of `flow_attention`.
    """
    inputs.check_inputs(query, key, None, is_causal)
    options = Options(
        clip=clip,
        competition_axis=competition_axis,
        competition=competition,
        allocation=allocation,
        eps=eps,
        extra_eps=extra_eps,
        precision=precision,
    )
    masks = _masks(mask, query_mask, is_causal, query, key)
    dtype = inputs.accumulation_dtype(query, key)
    features = feature_maps.features(query, key, feature_map, dtype, *masks)
    given = Inputs(query, key, key), feature_map
    terms = _terms(features, masks, options, given if is_causal else None)
    scores = feature_maps.products(*features, precision)
    if is_causal:
        scores = feature_maps.hide_future(scores)
    rows = (terms.allocation / terms.incoming)[..., None]
    return scores * rows * terms.competition[:, :, None, :]


def flow_terms(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
    clip: float | None = 30.0,
    *,
    is_causal: bool = False,
    feature_map: feature_maps.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    competition: bool = True,
    allocation: bool = True,
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
) -> FlowTerms:
    """Returns the flows, the competition and the allocation behind `flow_attention`.

    Arguments and errors are those of `flow_attention`.
    """
    inputs.check_inputs(query, key, None, is_causal)
    options = Options(
        clip=clip,
        competition_axis=competition_axis,
        competition=competition,
        allocation=allocation,
        eps=eps,
        extra_eps=extra_eps,
        precision=precision,
    )
    masks = _masks(mask, query_mask, is_causal, query, key)
    dtype = inputs.accumulation_dtype(query, key)
    features = feature_maps.features(query, key, feature_map, dtype, *masks)
    given = Inputs(query, key, key), feature_map
    terms = _terms(features, masks, options, given if is_causal else None)
    return FlowTerms(*(jnp.swapaxes(term, 1, 2) for term in terms))


def flow_init(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    feature_map: feature_maps.FeatureMap = "sigmoid",
) -> FlowState:
    """Returns the state of a stream before its first position.

    Args:
      batch_size: B.
      num_heads: N, those of the query.
      head_dim: H.
      value_dim: Hv; None = H.
      dtype: of the sums, float32 or float64.
      feature_map: as in `flow_attention`; it decides the width M.

    Raises:
      ValueError: another dtype, or an unknown feature map.
    """
    dtype = inputs.state_dtype(dtype)
    width = feature_maps.feature_width(feature_map, head_dim)
    sizes = (batch_size, num_heads, width, value_dim or head_dim)
    return flow_causal.no_flow(*sizes, dtype)


def flow_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
    clip: float | None = 30.0,
    *,
    state: FlowState | None = None,
    feature_map: feature_maps.FeatureMap = "sigmoid",
    competition: bool = True,
    allocation: bool = True,
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    chunking: chunks.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, FlowState]:
    """Takes a whole prompt, or a further part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, masks and options as in `flow_attention`.
      state: what came before; None = nothing.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position.

    Raises:
      ValueError: shapes, dtypes, a mask, an option or the state do not fit.
    """
    inputs.check_inputs(query, key, value, True)
    options = Options(
        clip=clip,
        competition_axis="source",
        competition=competition,
        allocation=allocation,
        eps=eps,
        extra_eps=extra_eps,
        precision=precision,
    )
    masks = _masks(mask, query_mask, True, query, key)
    arguments = (Inputs(query, key, value), *masks, options, feature_map)
    return flow_causal.causal_flow(*arguments, state=state, chunking=chunking)


def flow_step(
    state: FlowState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    clip: float | None = 30.0,
    *,
    feature_map: feature_maps.FeatureMap = "sigmoid",
    competition: bool = True,
    allocation: bool = True,
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, FlowState]:
    """Takes one position of each sample; arrays `[B, N, H]` -> `[B, N, Hv]`.

    Options and errors are those of `flow_prefill`.
    """
    arrays = inputs.one_position(query, key, value)
    out, state = flow_prefill(
        *arrays,
        state=state,
        clip=clip,
        feature_map=feature_map,
        competition=competition,
        allocation=allocation,
        eps=eps,
        extra_eps=extra_eps,
        precision=precision,
    )
    return out[:, 0], state


Masks = tuple[jax.Array | None, jax.Array | None]


def _masks(
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    is_causal: bool,
    query: jax.Array,
    key: jax.Array,
) -> Masks:
    """Boolean masks of the sources `[B, S]` and of the sinks `[B, T]`; None = all."""
    batch = query.shape[0]
    sources = inputs.padding_mask(mask, batch, key.shape[1])
    if query_mask is None and is_causal:
        return sources, sources
    length = query.shape[1]
    return sources, inputs.padding_mask(query_mask, batch, length, "query_mask")


def _terms(
    features: tuple[jax.Array, jax.Array],
    masks: Masks,
    options: Options,
    causal: tuple[Inputs, feature_maps.FeatureMap] | None,
) -> FlowTerms:
    """The terms with the heads first, `[B, N, T]`; of the causal form if given."""
    if causal is None:
        return flow_parts.terms(*features, *masks, options)
    arrays, spec = causal
    call = flow_causal.causal_flow
    return call(arrays, *masks, options, spec, as_terms=True)[0]
