"""DeltaNet (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule
over Sequence Length").

``S_t = (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T`` and ``out_t = norm(S_t^T q_t)``:
a share b_t in (0, 1) of the value stored under k_t is replaced by v_t. It is
`lra_jax.attention.recurrent.gated_delta` without decay and gate, with the same
activations, norm, cost and deviations. In a model ``b_t = sigmoid(w x_t + c)``.
"""

import functools
from typing import Any

import jax

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, streams
from lra_jax.attention.call import attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.recurrent import gated_delta, recurrence

__all__ = [
    "DeltaState",
    "delta_attention",
    "delta_init",
    "delta_prefill",
    "delta_step",
    "delta_weights",
]


class DeltaState(recurrence.RecurrentState):
    """Everything that the next position needs from the earlier ones."""


_run = functools.partial(gated_delta.run, mechanism="delta", kind=DeltaState)


@attention_of(_run)
def delta_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    beta: jax.Array | None = None,
    beta_range: float = 1.0,
    feature_map: feature_maps.FeatureMap = "silu",
    norm: str | None = "rms",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes the delta rule.

    This is `gated_delta.gated_delta_attention` without decay and gate, and has the same
    arguments, result and errors.
    """
    ...


delta_weights = dense.weights_of(
    delta_attention,
    "It leaves out the norm; entries may be negative.",
    fixed={"norm": None},
)
delta_prefill = streams.make_prefill(delta_attention, _run, DeltaState)
delta_init = streams.make_init(delta_prefill)
delta_step = streams.make_step(delta_prefill, "beta")
