"""Performer (Choromanski et al. 2021, "Rethinking Attention with Performers", FAVOR+).

``out_i = phi(q_i)^T sum_j phi(k_j) v_j^T / (phi(q_i)^T sum_j phi(k_j))``. With
x' = x / H^(1/4) and the rows w_r of a random projection W `[M, H]`, the features
``phi_r(x) = exp(w_r . x' - |x'|^2 / 2) / sqrt(M)`` make this an unbiased estimate of
softmax attention's sums, whose error falls as 1 / sqrt(M). Other kernels are defined by
their features, ``f(W x') + eps``.

Cost: O((T + S) M (H + Hv)) time. The causal form (`performer_causal`) sums over j <= i.

The projection is drawn once (`performer_projection`, `performer_parameters`) and passed
to each call; it is not trained. To redraw it during training, pass another.

Deviations from the published code. Its exponents have one reference for all keys, the
largest over positions and features, and an eps is added to the features: for queries
and keys of large norm all features are below eps, and later keys change earlier
outputs. Here the references are exact (`random_features`), there is no eps, and in the
causal form later keys do not change a single bit of earlier outputs. Its masks zero
only the values (pass zeroed values without a mask to get the same); here hidden keys
are left out of the denominator too. Its projections are biased; here they are not.
The features f of Google's code (google-research, long-range-arena) are those of
``scale=1``.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import core, performer_causal, random_features
from lra_jax.attention.linear.performer_causal import PerformerSums
from lra_jax.attention.linear.random_features import (
    Options,
    performer_parameters,
    performer_projection,
)
from lra_jax.attention.linear.sums import Sums

__all__ = [
    "PerformerState",
    "PerformerSums",
    "performer_attention",
    "performer_init",
    "performer_parameters",
    "performer_prefill",
    "performer_projection",
    "performer_step",
    "performer_weights",
]


class PerformerState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: PerformerSums  # [B, N, M, Hv], [B, N, M] and [B, N, M]
    position: jax.Array  # of the next token in each sample, [B] int32

    __repr__ = streams.show_shapes


def _run(
    call: Call, *, projection: jax.Array | None, **features: Any
) -> tuple[jax.Array, PerformerState]:
    options = Options(**features, precision=call.precision, dtype=call.dtype)
    matrix = options.matrix(projection, call.query.shape[-1])
    if options.softmax and matrix is not None and call.is_causal:
        refusal = "is_causal", "False for kernel='softmax'", "True"
        call.choose("performer", refusal=refusal)  # Raises if a kernel is requested.
        out, sums = performer_causal.attend(call, options, matrix)
    else:
        out, sums = _attend(call, options, matrix)
    state: Any = PerformerState(sums, call.next_position) if call.streams else None
    return call.finish(out), state


@attention_of(_run)
def performer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    projection: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    kernel: feature_maps.FeatureMap = "softmax",
    hyperbolic: bool = False,
    feature_eps: float = 1e-3,
    scale: float | None = None,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **flax: Any,
) -> jax.Array:
    """Computes attention with random features.

    Args:
      query, key, value: as in `linear_attention`.
      projection: W, `[M, H]`, as drawn by `performer_projection`. None, for kernels
        other than "softmax" only, computes features of x itself.
      mask: as in `linear_attention`.
      is_causal: position i sees keys 0..i only; needs T == S.
      segment_ids: as in `linear_attention`.
      kernel: "softmax" (FAVOR+), or the f of ``f(W x') + eps``: "relu" (the paper's
        second choice), "exp", "elu" (elu(x) + 1), "sigmoid", or a non-negative function
        of an array.
      hyperbolic: softmax features in pairs ``exp(+-w_r . x' - |x'|^2 / 2)``: 2M
        features, with a lower variance.
      feature_eps: added to every feature of a kernel other than "softmax".
      scale: of query and key before the projection; None = H^(-1/4).
      implementation: as in `norm_attention`. There are no kernels for the causal form
        of softmax features.
      chunking, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; zero in rows without visible keys.

    Raises:
      ValueError: shapes, dtypes, the mask, the projection or an option do not fit.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> from lra_jax.attention import performer_parameters, softmax_attention
      >>> arrays = performer_parameters(jax.random.key(1), head_dim=16, features=1024)
      >>> out = performer_attention(query / 2, key / 2, value, **arrays)
      >>> exact = softmax_attention(query / 2, key / 2, value)
      >>> bool(jnp.abs(out - exact).mean() < 0.02)  # It estimates softmax attention.
      True
    """
    ...


def _attend(
    call: Call, options: Options, matrix: jax.Array | None
) -> tuple[jax.Array, Any]:
    """Linear attention with features that are computed first."""
    key = inputs.match_heads(masking.hide(call.key, call.mask), call.query.shape[2])
    query, key = random_features.features(
        call.query.astype(call.dtype),
        key.astype(call.dtype),
        matrix,
        call.mask,
        options,
        call.rows,
    )
    call = call.replace(query=query, key=key)
    if call.state is not None:
        call = call.replace(state=core.LinearState(Sums(*call.sums[:2]), call.state[1]))
    out, sums = core.attend(call, core.Kernel(denominator="add"), "performer")
    if sums is None:
        return out, None
    peak = jnp.zeros_like(sums.total) + random_features.lowest(sums.total.dtype)
    return out, PerformerSums(sums.summary, sums.total, peak)


performer_weights = dense.weights_of(
    performer_attention, "Rows sum to one, or to zero where no key is visible."
)
# The projection comes before the mask, which the type of other prefills does not say.
performer_prefill: streams.Prefill[..., PerformerState] = streams.make_prefill(
    cast(Any, performer_attention), _run, PerformerState
)
performer_init = streams.make_init(performer_prefill)
performer_step = streams.make_step(performer_prefill)
