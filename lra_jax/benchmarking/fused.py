"""The best softmax attention on the machine, alongside the papers' naive one.

The same results as softmax attention, without the T x S matrix:

- "cudnn": the flash attention of NVIDIA's library, for 16-bit inputs on its GPUs.
- "blocks": anywhere else, this library's own (`lra_jax.attention.softmax.blockwise`).

Only the benchmark uses it: a baseline must not be weaker than necessary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs, masking, softmax_attention
from lra_jax.errors import known

IMPLEMENTATIONS = ("cudnn", "blocks")


def best_implementation(dtype: Any, backend: str | None = None) -> str:
    """The fastest of `IMPLEMENTATIONS` for a dtype on a backend, by default this one's.

    "gpu" is assumed to be NVIDIA's; on any other GPU, request "blocks".
    """
    backend = backend or jax.default_backend()
    is_fast = backend == "gpu" and jnp.dtype(dtype).itemsize == 2
    return "cudnn" if is_fast else "blocks"


def fused_softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    implementation: str | None = None,
    **_: Any,
) -> jax.Array:
    """Computes ``softmax(q k^T / sqrt(H)) v`` without building the matrix.

    Args:
      query, key, value: `[B, T, N, H]`, `[B, S, N, H]`, `[B, S, N, Hv]`.
      mask: `[B, S]` or `[B, 1, 1, S]`, True = a real position. "cudnn" counts them, so
        it supports padding only at the end.
      is_causal: position i sees only keys 0..i.
      implementation: one of `IMPLEMENTATIONS`; None = the best for dtype and backend.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or the implementation do not fit.
    """
    inputs.check_inputs(query, key, value, is_causal)
    mask = masking.padding_mask(mask, query.shape[0], key.shape[1])
    chosen = implementation or best_implementation(query.dtype)
    known("implementation", chosen, IMPLEMENTATIONS)
    if chosen == "cudnn":
        lengths = None if mask is None else mask.sum(1, dtype=jnp.int32)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=is_causal,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    return softmax_attention(
        query, key, value, mask, is_causal, implementation="blocks"
    )
