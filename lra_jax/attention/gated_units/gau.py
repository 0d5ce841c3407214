"""The gated attention unit (Hua et al. 2022, "Transformer Quality in Linear Time").

``out_i = g_i * sum_j a(q_i . k_j / n_i + b_(j - i)) v_j`` with ``a(x) = relu(x)^2``, or
the Laplace function of Mega, b from T5's buckets of the distance, and n_i the number of
keys that the query sees. Queries and keys share one projection z of the input, each
with its own scale and offset: ``q = gamma_1 z + beta_1`` and
``k = gamma_2 z + beta_2``; here z is the ``query``, and ``key`` is not read. Weights
are not normalised.

A whole unit is ``x + W_o (g * A v)`` with ``z, v, g = silu(W norm(x))``, one head of
128 columns for z, and twice the model's width for v and g. It replaces both attention
and MLP (``mlp=False`` in the registry): a block of the encoder then holds two units, as
the paper counts two units for one attention and one MLP.

Cost: O(T^2 (H + Hv)) time and O(T^2) memory. FLASH is linear.

Deviations. The paper divides by the input length, and so does the public code
(lucidrains/FLASH-pytorch, JunnYu/FLASHQuad): outputs then change with the padding, and
in the causal form with the number of future positions. Here n_i counts the real keys
that the query sees, unless ``length`` fixes it. lucidrains divides the bias as well,
and multiplies it by sqrt(D): pass a table scaled to match. Padding is masked after the
activation, since the Laplace function of 0 is not 0.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, feature_maps, inputs, masking
from lra_jax.attention.call import Call
from lra_jax.attention.gated_units import gated
from lra_jax.attention.in_turn import documents_in_turn

__all__ = ["gau_attention", "gau_layout", "gau_parameters", "gau_weights"]


@documents_in_turn
def gau_attention(
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
    activation: str = "relu2",
    rotate: bool = False,
    length: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes the attention of a gated unit.

    Args:
      query: z, `[B, T, N, H]`.
      key: `[B, T, N, H]`; not read.
      value: `[B, T, N, Hv]`; its heads may be a divisor of N.
      mask: as in `linear_attention`.
      is_causal: position i sees keys 0..i only.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      gate: g, `[B, T, N, Hv]`; None = 1.
      scale: gamma, `[2, N, H]`, for queries and keys; None = 1.
      offset: beta, `[2, N, H]`; None = 0.
      relative_bias: `[32, N]`, one bias per bucket of distances; None = 0.
      activation: "relu2" or "laplace".
      rotate: rotate queries and keys by position, as in FLASH; needs an even H.
      length: n; None = the number of keys that a query sees.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; sums are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the mask, an array or an option do not fit, or query
        and key differ in length.
    """
    call = Call.of(query, key, value, mask, is_causal, precision=precision)
    inputs.check_self(query, key, "gau")
    activate = gated.activation(activation)
    length = length if length is None else inputs.check_size("length", length)
    queries, keys = gated.shared_heads(
        call, query, 2, scale=scale, offset=offset, rotate=rotate
    )
    rows, num_heads = query.shape[1:3]
    scores = feature_maps.products(queries, keys, precision)
    real = jnp.ones((1, rows), bool) if call.mask is None else call.mask
    visible = real[:, None, None]
    if is_causal:
        visible = visible & jnp.tri(rows, dtype=bool)[None, None]
    if length is None:
        counts = visible.sum(-1, keepdims=True, dtype=call.dtype)
        scores = scores / feature_maps.at_least(counts, 1.0)
    else:
        scores = scores / length
    if relative_bias is not None:
        scores = scores + gated.bias(call, relative_bias, rows)[None]
    weights = jnp.where(visible, activate(scores), 0)
    value = masking.by_head(call.value, num_heads, call.mask, call.dtype)
    out = jnp.swapaxes(jnp.matmul(weights, value, precision=precision), 1, 2)
    return gated.apply_gate(call, out, gate)


gau_weights = dense.weights_of(
    gau_attention, "The gate is left out; no weight is negative.", without=("gate",)
)


def gau_parameters(
    rng_key: jax.Array,
    *,
    num_heads: int,
    head_dim: int,
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `gau_attention` takes as keywords.

    Args:
      rng_key: a key of ``jax.random``.
      num_heads: N.
      head_dim: H, the width of z.
      dtype: of the arrays.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      ``scale`` and ``offset`` `[2, N, H]`, ``relative_bias`` `[32, N]`.
    """
    inputs.check_sizes(gau_parameters, sizes)
    return gated.parameters(rng_key, 2, num_heads, head_dim, dtype)


gau_layout = gated.layout
