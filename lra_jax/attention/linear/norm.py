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

import functools
from typing import Any

import jax

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import core

__all__ = [
    "NormState",
    "norm_attention",
    "norm_init",
    "norm_prefill",
    "norm_step",
    "norm_weights",
]


class NormState(core.LinearState):
    """Everything that the next position needs from the earlier ones."""


def _run(
    call: Call,
    *,
    feature_map: feature_maps.FeatureMap,
    norm: str | None,
    per_head: bool,
    eps: float,
) -> tuple[jax.Array, NormState]:
    feature_maps.check_norm(norm)
    inputs.check_flag("per_head", per_head)
    axes = (3,) if per_head else (2, 3)
    return core.run(
        call,
        core.Kernel(feature_map=feature_map),
        "norm",
        NormState,
        functools.partial(feature_maps.normalise, norm=norm, axes=axes, eps=eps),
    )


@attention_of(_run)
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
    ...


norm_weights = dense.weights_of(
    norm_attention,
    "It leaves out the norm, which acts on the output.",
    fixed={"norm": None},
)
norm_prefill = streams.make_prefill(norm_attention, _run, NormState)
norm_init = streams.make_init(norm_prefill)
norm_step = streams.make_step(norm_prefill)
