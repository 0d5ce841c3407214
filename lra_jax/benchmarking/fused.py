"""The best softmax attention on the machine, alongside the papers' naive one.

The same results as softmax attention, without the T x S matrix: the flash attention of
NVIDIA's cuDNN for 16-bit inputs on its GPUs, and this library's own blocks anywhere
else. Only the benchmark uses it: a baseline must not be weaker than necessary.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs, masking, softmax_attention


def best_implementation(dtype: Any, backend: str | None = None) -> str:
    """ "cudnn" or "blocks", for a dtype on a backend, by default this one's."""
    backend = backend or jax.default_backend()
    is_fast = backend == "gpu" and jnp.dtype(dtype).itemsize == 2
    return "cudnn" if is_fast else "blocks"


def fused_softmax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    **_: Any,
) -> jax.Array:
    """Computes ``softmax(q k^T / sqrt(H)) v`` without building the matrix.

    Args:
      query, key, value: `[B, T, N, H]`, `[B, S, N, H]`, `[B, S, N, Hv]`.
      mask: `[B, S]` or `[B, 1, 1, S]`, True = a real position. cuDNN counts them, so
        there padding may only be at the end.
      is_causal: position i sees only keys 0..i.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit.
    """
    if best_implementation(query.dtype) == "blocks":
        return softmax_attention(
            query, key, value, mask, is_causal, implementation="blocks"
        )
    inputs.check_inputs(query, key, value, is_causal)
    mask = masking.padding_mask(mask, query.shape[0], key.shape[1])
    lengths = None if mask is None else mask.sum(1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=is_causal,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
