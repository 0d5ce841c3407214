"""The state of linear attention: sums over keys."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import streams


class Sums(NamedTuple):
    """The sums over past positions in linear attention; float32 or float64."""

    summary: jax.Array  # sum of phi(k_j) v_j^T, [B, N, M, Hv]
    total: jax.Array  # sum of phi(k_j), [B, N, M]

    __repr__ = streams.show_shapes


def key_sums(key: jax.Array) -> jax.Array:
    """The sum over a chunk's positions, `[B, N, P, C, M]` -> `[B, N, P, M]`.

    A product with ones, faster on a CPU than a sum that XLA fuses with its input.
    """
    ones = jnp.ones_like(key[..., 0])
    return jnp.einsum("bnpjm,bnpj->bnpm", key, ones, precision="highest")


def row_sums(scores: jax.Array) -> jax.Array:
    """`[B, N, P, C, C]` -> `[B, N, P, C]`, also as a product with ones."""
    ones = jnp.ones_like(scores[..., 0])
    return jnp.einsum("bnpij,bnpj->bnpi", scores, ones, precision="highest")
