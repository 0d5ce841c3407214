"""The attention of Transformer-XL and XLNet (Dai et al. 2019, Yang et al. 2019).

``softmax(((q_i + u) . k_j + (q_i + w) . r_(i-j)) / sqrt(H))``: positions enter only as
the distance i - j, through r, a projection of its sines and cosines. Quadratic; used in
the networks of the rank-collapse figure, and not a registered mechanism.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class RelativeAttention(nnx.Module):
    """Self-attention by content and distance, without biases in its projections.

    Deviation from XLNet: one segment, no memory, no second stream.

    Args:
      width: D.
      num_heads: N, a divisor of D.
      kernel_init: for all arrays, including the vectors u and w.
      rngs: for initialisation.
    """

    def __init__(self, width: int, num_heads: int, *, kernel_init: Any, rngs: nnx.Rngs):
        head_dim = width // num_heads
        kernel, row = (width, num_heads, head_dim), (num_heads, head_dim)
        self.query, self.key, self.value, self.distance, self.out = (
            nnx.Param(kernel_init(rngs.params(), kernel)) for _ in range(5)
        )
        self.content_bias, self.distance_bias = (
            nnx.Param(kernel_init(rngs.params(), row)) for _ in range(2)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`."""
        query, key, value = (
            jnp.einsum("btd,dnh->btnh", x, kernel[...])
            for kernel in (self.query, self.key, self.value)
        )
        length, width = x.shape[1:]
        rows = jnp.asarray(_distance_table(length, width), x.dtype)
        distance = jnp.einsum("rd,dnh->rnh", rows, self.distance[...])
        content = query + self.content_bias[...][None, None]
        scores = jnp.einsum("btnh,bsnh->bnts", content, key)
        by_distance = query + self.distance_bias[...][None, None]
        all_distances = jnp.einsum("btnh,rnh->bntr", by_distance, distance)
        # Row i of the table's axis r holds distance i - j at r = T - 1 - (i - j).
        index = length - 1 - np.subtract.outer(np.arange(length), np.arange(length))
        scores = scores + jnp.take_along_axis(
            all_distances, jnp.asarray(index)[None, None], -1
        )
        weights = jax.nn.softmax(scores / np.sqrt(query.shape[-1]), -1)
        heads = jnp.einsum("bnts,bsnh->btnh", weights, value)
        return jnp.einsum("btnh,dnh->btd", heads, self.out[...])


def _distance_table(length: int, width: int) -> np.ndarray:
    """Sines, then cosines, of the distances T - 1 .. -(T - 1), `[2 T - 1, D]`."""
    rates = 10_000.0 ** (-np.arange(0, width, 2) / width)
    angles = np.arange(length - 1, -length, -1)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], 1)
