"""FLASH (Hua et al. 2022, "Transformer Quality in Linear Time"), mixed chunk attention.

Not FlashAttention, which is a way to compute softmax attention. The sequence is cut
into chunks of C positions. A position attends to its own chunk as in a gated attention
unit (`lra_jax.attention.gated_units.gau`) and, linearly, to all chunks:

``out_i = g_i * (sum_(j in chunk) a(q_i . k_j / C + b_(j - i)) v_j + q'_i^T S / m)``

with ``S = sum_j k'_j v_j^T``. Without ``is_causal`` S runs over all positions, the
query's own chunk included; with it, over the chunks before. m is the number of real
positions in S. The four heads q, k, q' and k' share one projection z of the input, here
``query``; each has its own scale and offset, and is rotated by position. ``key`` is not
read. Weights are not normalised, and those of the linear part may be negative.

Cost: O(T (C + H) (H + Hv)) time and O(T C) memory.

Deviations. Chunks start at position 0, and an incomplete chunk is padded internally;
padding on the right is exact, since m counts real positions. The public code
(lucidrains/FLASH-pytorch) divides by the padded length, and in the causal form by C, so
that the linear part grows with the length; to reproduce this, set m by ``length``. It
multiplies the bias by sqrt(H): pass a table scaled by that factor. It rotates only on
request, and then at most 32 columns; ours are all rotated, at retention's rates
(`lra_jax.attention.linear.rotary`) and not RoPE's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, feature_maps, inputs, masking
from lra_jax.attention.call import Call
from lra_jax.attention.gated_units import gated
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.softmax import key_sets

__all__ = ["flash_attention", "flash_layout", "flash_parameters", "flash_weights"]


CHUNK = 256


@documents_in_turn
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    gate: jax.Array | None = None,
    scale: jax.Array | None = None,
    offset: jax.Array | None = None,
    relative_bias: jax.Array | None = None,
    chunk: int = CHUNK,
    activation: str = "relu2",
    rotate: bool = True,
    length: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes mixed chunk attention, gated.

    Args:
      query: z, `[B, T, N, H]`.
      key: `[B, T, N, H]`; not read.
      value: `[B, T, N, Hv]`; its heads may be a divisor of N.
      mask: as in `linear_attention`. Padding is exact on the right.
      is_causal: position i sees keys 0..i only.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      gate: g, `[B, T, N, Hv]`; None = 1.
      scale: `[4, N, H]`, for q, q', k and k'; None = 1.
      offset: `[4, N, H]`; None = 0.
      relative_bias: `[32, N]`, one bias per bucket of distances; None = 0.
      chunk: C.
      activation: "relu2" or "laplace".
      rotate: rotate all four heads by position; needs an even H.
      length: m; None = the number of real positions in S.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; sums are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the mask, an array or an option do not fit, or query
        and key differ in length.
    """
    call = Call.of(query, key, value, mask, is_causal, precision=precision)
    inputs.check_self(query, key, "flash")
    activate = gated.activation(activation)
    length = length if length is None else inputs.check_size("length", length)
    rows, num_heads = query.shape[1:3]
    size = min(inputs.check_size("chunk", chunk), rows)
    heads = gated.shared_heads(
        call, query, 4, scale=scale, offset=offset, rotate=rotate
    )
    heads.append(masking.by_head(call.value, num_heads, call.mask, call.dtype))
    near, far, near_key, far_key, value = (key_sets.cut(x, size) for x in heads)
    real = jnp.ones((1, rows), bool) if call.mask is None else call.mask
    real = jnp.pad(real, [(0, 0), (0, -rows % size)]).reshape(real.shape[0], -1, size)
    product = functools.partial(jnp.einsum, precision=precision)
    scores = product("bnpch,bnpdh->bnpcd", near, near_key) / chunk
    if relative_bias is not None:
        scores = scores + gated.bias(call, relative_bias, size)[None, :, None]
    visible = real[:, None, :, None]
    if is_causal:
        visible = visible & jnp.tri(size, dtype=bool)[None, None, None]
    weights = jnp.where(visible, activate(scores), 0)
    out = product("bnpcd,bnpdv->bnpcv", weights, value)
    summary = product("bnpch,bnpcv->bnphv", far_key, value)
    summary = _gather(summary, real, is_causal, length)
    out = out + product("bnpch,bnphv->bnpcv", far, summary)
    return gated.apply_gate(call, key_sets.paste(out, rows), gate)


flash_weights = dense.weights_of(
    flash_attention,
    "It covers both parts and leaves out the gate; entries may be negative.",
    without=("gate",),
)


def flash_parameters(
    rng_key: jax.Array,
    *,
    num_heads: int,
    head_dim: int,
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `flash_attention` takes as keywords.

    The arguments are those of `gau.gau_parameters`.

    Returns:
      ``scale`` and ``offset`` `[4, N, H]`, ``relative_bias`` `[32, N]`.
    """
    inputs.check_sizes(flash_parameters, sizes)
    return gated.parameters(rng_key, 4, num_heads, head_dim, dtype)


flash_layout = gated.layout


def _gather(
    summary: jax.Array, real: jax.Array, is_causal: bool, divisor: int | None
) -> jax.Array:
    """S / m for each chunk, `[B, N, P or 1, H, Hv]`, from the sums of single chunks."""
    counts = real.sum(-1, dtype=summary.dtype)[:, None, :, None, None]
    if is_causal:
        first = [(0, 0), (0, 0), (1, 0), (0, 0), (0, 0)]
        # The sum before a chunk: all sums shifted by one; nothing is subtracted.
        summary, counts = (
            jnp.cumsum(jnp.pad(x[:, :, :-1], first), 2) for x in (summary, counts)
        )
    else:
        summary, counts = (x.sum(2, keepdims=True) for x in (summary, counts))
    return summary / (
        feature_maps.at_least(counts, 1.0) if divisor is None else divisor
    )
