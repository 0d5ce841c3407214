"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs").

``out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j) + eps)`` with
``phi(x) = elu(x) + 1`` and no 1 / sqrt(H).

Cost: O((T + S) H Hv) time, O(H Hv) beside the inputs and the output. The causal form
sums over j <= i instead (`lra_jax.attention.causal.sums`).

A stream holds the two sums, whatever its position: `linear_init` makes them empty,
`linear_prefill` takes a prompt in one pass, `linear_step` takes one position.

The denominator's eps is added, as in the authors' code (idiap/fast-transformers), so
rows sum to ``z / (z + eps)``; a row without visible keys is exactly zero. Features,
sums and products are float32 or wider even for half-precision inputs: with H = 64,
float16 sums overflow beyond some 760 keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import sums as causal
from lra_jax.attention.registry import Mechanism

__all__ = [
    "LinearState",
    "linear_attention",
    "linear_init",
    "linear_prefill",
    "linear_step",
    "linear_weights",
]

MECHANISM = Mechanism(
    name="linear",
    causal=True,
    cross=True,
    stream=True,
    kernels=True,
    cost="(T + S) H^2",
    summary="elu(x) + 1 features, normalised (Linear Transformer)",
    source="Katharopoulos et al. 2020",
    presets={
        "official": {
            "pathfinder": {
                "model.num_layers": 1,
                "model.num_heads": 2,
                "model.embed_dim": 128,
                "model.qkv_dim": 64,
                "model.mlp_dim": 128,
            }
        }
    },
)


class LinearState(NamedTuple):
    """Everything that the next position needs of the earlier ones."""

    sums: causal.Sums  # [B, N, M, Hv] and [B, N, M]
    position: jax.Array  # of the next token in each sample, [B] int32


def linear_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **_: Any,
) -> jax.Array:
    """Computes ``phi(q) (phi(k)^T v)``, normalised over the visible keys.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: position i sees keys 0..i only; needs T == S.
      feature_map: "elu" (elu(x) + 1), "relu", "sigmoid", or a non-negative function of
        an array.
      eps: added to the denominator.
      chunking: how the causal form cuts the sequence; None = by the backend.
      precision: of the matrix products, as in ``jnp.einsum``.
      implementation: "xla", "pallas", or "auto": the kernels of docs/kernels.md where
        they run.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, or there is no kernel where
        one is wanted.
    """
    inputs.check_inputs(query, key, value, is_causal)
    target = kernels.choose(implementation, query, key, value, feature_map, chunking)
    if target is not None:
        mask = inputs.padding_mask(mask, query.shape[0], key.shape[1])
        arrays, sizes = (query, key, value, mask, is_causal), (chunking, precision)
        return kernels.attend(target, *arrays, feature_map, "add", eps, None, *sizes)
    if is_causal:
        options = (feature_map, eps, chunking, precision)
        return _causal(query, key, value, mask, None, *options)[0]
    mask = inputs.padding_mask(mask, query.shape[0], key.shape[1])
    dtype = inputs.accumulation_dtype(query, key, value)
    features = feature_maps.features(query, key, feature_map, dtype, mask)
    value = inputs.by_head(value, query.shape[2], mask, dtype)
    sums = feature_maps.project(features[0], features[1].sum(2), precision)
    out = feature_maps.contract(*features, value, precision)
    out = jnp.swapaxes(out / (sums + eps)[..., None], 1, 2)
    return out.astype(query.dtype)


def linear_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, S]` that `linear_attention` never builds.

    float32 or wider; arguments and errors are those of `linear_attention`.
    """
    inputs.check_inputs(query, key, None, is_causal)
    mask = inputs.padding_mask(mask, query.shape[0], key.shape[1])
    dtype = inputs.accumulation_dtype(query, key)
    features = feature_maps.features(query, key, feature_map, dtype, mask)
    scores = feature_maps.products(*features, precision)
    if is_causal:
        scores = feature_maps.hide_future(scores)
    return scores / (scores.sum(-1, keepdims=True) + eps)


def linear_init(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    feature_map: feature_maps.FeatureMap = "elu",
) -> LinearState:
    """Returns the state of a stream before its first position.

    Args:
      batch_size: B.
      num_heads: N, those of the query.
      head_dim: H.
      value_dim: Hv; None = H.
      dtype: of the sums, float32 or float64.
      feature_map: as in `linear_attention`; it decides the width M.

    Raises:
      ValueError: another dtype, or an unknown feature map.
    """
    dtype = inputs.state_dtype(dtype)
    width = feature_maps.feature_width(feature_map, head_dim)
    sums = causal.no_sums(batch_size, num_heads, width, value_dim or head_dim, dtype)
    return LinearState(sums, jnp.zeros((batch_size,), jnp.int32))


def linear_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    state: LinearState | None = None,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, LinearState]:
    """Takes a whole prompt, or a further part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, mask and options as in `linear_attention`.
      state: what came before; None = nothing.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position.

    Raises:
      ValueError: shapes, dtypes, the mask or the state do not fit.
    """
    inputs.check_inputs(query, key, value, True)
    options = (feature_map, eps, chunking, precision)
    return _causal(query, key, value, mask, state, *options)


def linear_step(
    state: LinearState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    feature_map: feature_maps.FeatureMap = "elu",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, LinearState]:
    """Takes one position of each sample; arrays `[B, N, H]` -> `[B, N, Hv]`.

    Options and errors are those of `linear_prefill`.
    """
    arrays = inputs.one_position(query, key, value)
    out, state = linear_prefill(
        *arrays, state=state, feature_map=feature_map, eps=eps, precision=precision
    )
    return out[:, 0], state


def _causal(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    state: LinearState | None,
    feature_map: feature_maps.FeatureMap,
    eps: float,
    chunking: causal.Chunking | None,
    precision: jax.lax.PrecisionLike,
) -> tuple[jax.Array, LinearState]:
    mask = inputs.padding_mask(mask, query.shape[0], key.shape[1])
    out, sums = causal.attend(
        *(query, key, value, mask),
        feature_map,
        causal.Divided("add", eps),
        start=None if state is None else state.sums,
        chunking=chunking,
        precision=precision,
    )
    position = inputs.next_position(mask, *query.shape[:2])
    if state is not None:
        position = position + state.position
    return out, LinearState(sums, position)
