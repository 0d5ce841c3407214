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
(`linear.decay`); O(H Hv) memory besides inputs and output. A stream holds one sum,
whatever its position. Sums are float32 or wider, whatever the input dtype.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, packed, streams
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import decay
from lra_jax.attention.linear.linear import LinearState

__all__ = [
    "LightningState",
    "lightning_attention",
    "lightning_init",
    "lightning_prefill",
    "lightning_slopes",
    "lightning_step",
    "lightning_weights",
]


LightningState = LinearState


def lightning_slopes(num_heads: int) -> np.ndarray:
    """Returns the published slopes `[N]`: ``2^(-8 (h + 1) / N)`` for h = 0, 1, ...

    If N is not a power of two, they are, as in the authors' code, the slopes for the
    power below, then every other slope for the power above.
    """
    power = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    further = 2.0 ** (-4 * np.arange(1, 2 * power + 1, 2) / power)
    return np.concatenate([slopes, further])[:num_heads]


@masking.guarded
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
    inputs.check_keywords(lightning_attention, flax, deterministic)
    inputs.check_inputs(query, key, value, is_causal)
    inputs.refuse_decoding(deterministic, query, key, "lightning")
    feature_maps.check_norm(norm)
    feature_map = feature_map or "identity"
    rows = packed.packed(segment_ids, query, key)
    mask = packed.shown(masking.padding_mask(mask, len(query), key.shape[1]), rows)
    dtype = inputs.accumulation_dtype(query, key, value)
    rates = _slopes(slopes, query.shape[2], dtype)
    out = kernels.attended(
        implementation,
        query,
        key,
        value,
        mask,
        is_causal,
        mechanism="decay",
        refusal=decay.kernel_refusal(query, key, slopes),
        feature_map=feature_maps.for_kernels(feature_map),
        denominator="none",
        eps=0.0,
        chunking=chunking,
        precision=precision,
        slopes=rates,
        documents=packed.numbers(rows),
    )
    if out is None:
        out, _denominators = decay.sums(
            query,
            key,
            value,
            rates,
            is_causal,
            mask=mask,
            resets=packed.resets(rows),
            feature_map=feature_map,
            chunking=chunking,
            precision=precision,
        )
    return feature_maps.normalised(out, norm, (2, 3), eps).astype(query.dtype)


lightning_weights = dense.weights_of(
    lightning_attention,
    "It leaves out the norm, which acts on the output.",
    fixed={"norm": None},
)


def lightning_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    state: LightningState | None = None,
    segment_ids: jax.Array | None = None,
    slopes: decay.Slopes | None = None,
    feature_map: feature_maps.FeatureMap | None = None,
    norm: str | None = None,
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, LightningState]:
    """Processes a whole prompt, or a later part of one, in one pass.

    Options are those of `lightning_attention`; the other arguments, the result and the
    errors are those of `linear_prefill`. The next token follows each sample's last real
    position; rows after it are computed as for a query at that position.
    """
    rows = packed.packed(segment_ids, query, key)
    mask, dtype, position = streams.begun(state, query, key, value, mask, rows)
    feature_maps.check_norm(norm)
    (out, _denominators), sums = decay.prefill(
        query,
        key,
        value,
        _slopes(slopes, query.shape[2], dtype),
        mask=mask,
        resets=packed.resets(rows),
        state=None if state is None else state.sums,
        feature_map=feature_map or "identity",
        chunking=chunking,
        precision=precision,
    )
    out = feature_maps.normalised(out, norm, (2, 3), eps).astype(query.dtype)
    return out, LightningState(sums, position)


lightning_init = streams.make_init(lightning_prefill)
lightning_step = streams.make_step(lightning_prefill)


def _slopes(slopes: decay.Slopes | None, num_heads: int, dtype: jnp.dtype) -> jax.Array:
    return decay.checked_slopes(slopes, lightning_slopes(num_heads), dtype)
