"""Lightning attention (Qin et al. 2024, "Various Lengths, Constant Speed: Efficient
Language Modeling with Lightning Attention"), the attention of TransNormerLLM.

``out_i = sum_{j <= i} exp(-slope (i - j)) (phi(q_i) . phi(k_j)) v_j``: linear attention
with a fixed decay for each head and no denominator. By default phi is the identity, as
in the authors' function (OpenNLPLab/lightning-attention); their model applies SiLU to
queries and keys (``feature_map="silu"``) and normalises the output over all heads
together (``norm="rms"``). Without a norm the outputs grow with the length.

Slopes are the authors' ``2^(-8 (h + 1) / N)`` (`lightning_slopes`); in layer l of L
their model multiplies them by ``1 - l / (L - 1) + 1e-5``.

Without ``is_causal`` the sum runs over all j with ``exp(-slope |i - j|)``. The authors
have no such form; it is the two-sided decay of Afzal et al. 2025 ("Linear Attention for
Efficient Bidirectional Sequence Modeling").

Cost: O(T (H + C) Hv) time for chunks of C positions, twice that without ``is_causal``
(`linear.core`); O(H Hv) memory besides inputs and output. A stream holds one sum,
whatever its position. Sums are float32 or wider, whatever the input dtype.
"""

import functools
import math
from typing import Any

import jax
import numpy as np

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import core, decay

__all__ = [
    "LightningState",
    "lightning_attention",
    "lightning_init",
    "lightning_prefill",
    "lightning_slopes",
    "lightning_step",
    "lightning_weights",
]


class LightningState(core.LinearState):
    """Everything that the next position needs from the earlier ones."""


def lightning_slopes(num_heads: int) -> np.ndarray:
    """Returns the published slopes `[N]`: ``2^(-8 (h + 1) / N)`` for h = 0, 1, ...

    If N is not a power of two, they are, as in the authors' code, the slopes for the
    power below, then every other slope for the power above.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    further = 2.0 ** (-4 * np.arange(1, 2 * power + 1, 2) / power)
    return np.concatenate([slopes, further])[:num_heads]


def _run(
    call: Call,
    *,
    slopes: decay.Slopes | None,
    feature_map: feature_maps.FeatureMap | None,
    norm: str | None,
    eps: float,
) -> tuple[jax.Array, LightningState]:
    inputs.refuse_decoding(call.deterministic, call.query, call.key, "lightning")
    feature_maps.check_norm(norm)
    published = lightning_slopes(call.query.shape[2])
    kernel = core.Kernel(
        feature_map=feature_map or "identity",
        slopes=decay.check_slopes(slopes, published, call.dtype),
        refusal=decay.kernel_refusal(call, slopes),
    )
    finish = functools.partial(feature_maps.normalise, norm=norm, axes=(2, 3), eps=eps)
    return core.run(call, kernel, "lightning", LightningState, finish)


@attention_of(_run)
def lightning_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    slopes: decay.Slopes | None = None,
    feature_map: feature_maps.FeatureMap | None = None,
    norm: str | None = None,
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes linear attention with a decay of exp(-slope) per position.

    Args:
      query, key, value, mask, segment_ids: as in `linear_attention`. Hidden positions
        still count towards distances.
      is_causal: position i sees keys 0..i only; needs T == S. Otherwise it sees all
        keys, with a decay by distance.
      slopes: `[N]`, not negative; None = `lightning_slopes`.
      feature_map: None = the identity; "silu", "elu" (elu(x) + 1), "relu", "sigmoid",
        or a function of an array.
      norm: None; "rms" or "layer" normalises each position over all heads together,
        without a learned gain, which the projection that follows can absorb.
      eps: of the norm.
      implementation: as in `norm_attention`. The kernels give no gradient of the
        slopes, and run only if the slopes are known and T == S.
      deterministic: from Flax's layers; with it, ``decode=True`` is refused.
      chunking, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit.
    """
    ...


lightning_weights = dense.weights_of(
    lightning_attention,
    "It leaves out the norm, which acts on the output.",
    fixed={"norm": None},
)
lightning_prefill = streams.make_prefill(lightning_attention, _run, LightningState)
lightning_init = streams.make_init(lightning_prefill)
lightning_step = streams.make_step(lightning_prefill)
