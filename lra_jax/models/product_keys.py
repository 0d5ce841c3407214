"""The product-key memory (Lample et al. 2019, "Large Memory Layers with Product Keys"),
replacing a block's MLP.

A head makes a query for each position, splits it into two halves, and scores each half
against its K sub-keys. The key (a, b) is the pair of sub-keys a and b, and its score is
the sum of theirs; so the best of the K^2 keys are pairs of each half's best sub-keys.
Each of the k best selects a value, and all heads share the values:

``out = sum over heads and their k best keys of softmax(scores)_i value_i``.

Cost: O(K d + k^2 + k D) for each position and head, with queries of d columns, plus
K^2 D values: parameters without arithmetic.

Deviation: each query is normalised separately (LayerNorm), where the paper normalises
over the batch, since a position's output must not depend on the rest of the batch.
Values are trained like all other parameters, without a separate learning rate.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax import kernels
from lra_jax.attention.inputs import check_size
from lra_jax.errors import expected, known
from lra_jax.models.layers import Dense, Dropout, LayerNorm, check_even, take_rows

# For models of width 1024 the paper has 512 keys per half, 4 heads and the 32 best.
DEFAULTS = {"keys": 64, "heads": 4, "top": 8, "query_dim": 32}

# Positions computed at once: their values are gathered, k for each head.
_TOGETHER = 4096


def memory_sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a memory: the defaults, updated by the options.

    Args:
      options: "keys" (K), "heads", "top" (k), "query_dim" (d).

    Raises:
      ValueError: an unknown option, or an impossible size.
    """
    for name in options:
        known("option of mlp 'product_key'", name, DEFAULTS)
    sizes = {n: check_size(n, v) for n, v in (DEFAULTS | dict(options)).items()}
    check_even("query_dim", sizes["query_dim"], "width, because a query has two halves")
    if sizes["top"] < 2:
        needed = "at least 2: the weight of one value alone is 1 and trains no keys"
        raise expected("top", needed, sizes["top"])
    if sizes["top"] > sizes["keys"]:
        raise expected("top", f"at most keys={sizes['keys']}", sizes["top"])
    return sizes


class ProductKeyMemory(nnx.Module):
    """A sparse memory of K^2 values, applied at each position separately.

    Args:
      features: width D of input and output.
      options: see `memory_sizes`.
      dropout: rate on the weights of the values.
      dtype: dtype of the computation; parameters and scores are float32.
      rngs: for initialisation: values normal with standard deviation D^-1/2, sub-keys
        uniform in +-(d / 2)^-1/2, as in the paper.

    Raises:
      ValueError: see `memory_sizes`.
    """

    def __init__(
        self,
        features: int,
        options: Mapping[str, Any] | None = None,
        *,
        dropout: float = 0.0,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        sizes = memory_sizes(options or {})
        self.heads, self.top = sizes["heads"], sizes["top"]
        half = sizes["query_dim"] // 2
        width = self.heads * sizes["query_dim"]
        init: dict[str, Any] = {"kernel_init": nnx.initializers.xavier_uniform()}
        self.query = Dense(features, width, dtype=dtype, rngs=rngs, **init)
        self.norm = LayerNorm(sizes["query_dim"], dtype=jnp.float32)
        shape = (self.heads, 2, sizes["keys"], half)
        bound = half**-0.5
        keys = jax.random.uniform(
            rngs.params(), shape, minval=-bound, maxval=bound, dtype=jnp.float32
        )
        self.keys = nnx.Param(keys)
        shape = (sizes["keys"] ** 2, features)
        values = jax.random.normal(rngs.params(), shape, jnp.float32)
        self.values = nnx.Param(values * features**-0.5)
        self.dropout = Dropout(dropout)
        self.dtype = dtype

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """`[..., D]` to `[..., D]`; ``mask`` is ignored; ``rngs`` enables dropout."""
        if not x.size:
            return x
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.choose(flat)
        weights = self.dropout(weights, rngs)
        read = functools.partial(_read, dtype=self.dtype or x.dtype)
        shared = (self.values[...],)
        out = kernels.by_sample(read, weights, chosen, shared=shared)
        return out.reshape(x.shape).astype(x.dtype)

    def choose(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights and indices of the values that positions `[P, D]` read.

        Returns:
          float32 and int32 `[P, heads * k]`; the weights of each head sum to one.
        """
        query = self.query(x).astype(jnp.float32)
        query = self.norm(query.reshape(x.shape[0], self.heads, -1))
        halves = query.reshape(x.shape[0], self.heads, 2, -1)
        scores = jnp.einsum("phcd,hckd->phck", halves, self.keys[...])
        best, places = kernels.by_sample(self._best_pairs, scores)
        weights = jax.nn.softmax(best, -1)
        return weights.reshape(x.shape[0], -1), places.reshape(x.shape[0], -1)

    def _best_pairs(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest sums of two scores `[P, heads, 2, keys]`, and their values."""
        best, index = jax.lax.top_k(scores, self.top)
        count = self.keys.shape[2]
        pairs = best[:, :, 0, :, None] + best[:, :, 1, None]
        places = index[:, :, 0, :, None] * count + index[:, :, 1, None]
        pairs, places = (a.reshape(*a.shape[:2], -1) for a in (pairs, places))
        best, picked = jax.lax.top_k(pairs, self.top)
        return best, jnp.take_along_axis(places, picked, -1)


def _read(
    values: jax.Array, weights: jax.Array, chosen: jax.Array, *, dtype: Any
) -> jax.Array:
    """The weighted sums `[P, D]` of the chosen values, some positions at a time."""

    @jax.checkpoint
    def read(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        weights, chosen = part
        rows = take_rows(values, chosen).astype(dtype)
        return jnp.einsum("nk,nkd->nd", weights.astype(dtype), rows)

    count = chosen.shape[0]
    # A symbolic batch is read at once.
    parts = -(-count // _TOGETHER) if isinstance(count, int) else 1
    size = -(-count // parts)
    fill = [(0, parts * size - count), (0, 0)]
    # Positions at even intervals: a loop over neighbours would gather those of all
    # devices on each.
    cut = [
        jnp.moveaxis(jnp.pad(a, fill).reshape(size, parts, a.shape[1]), 1, 0)
        for a in (weights, chosen)
    ]
    out = jnp.moveaxis(jax.lax.map(read, tuple(cut)), 0, 1)
    return out.reshape(-1, values.shape[1])[:count]
