"""The product-key memory (Lample et al. 2019, "Large Memory Layers with Product Keys"),
in the place of a block's MLP.

A head makes a query of each position, cuts it in two halves, and scores each half
against K sub-keys of its own. The key (a, b) is the pair of sub-keys a and b, and
scores the sum of both; so the best of K^2 keys are among the pairs of each half's best.
The k best have a value each, which all heads share:

``out = sum over heads and their k best keys of softmax(scores)_i value_i``.

Cost: O(K d + k^2 + k D) for each position and head, with queries of d columns, beside
K^2 D values: parameters without arithmetic.

Deviation: queries are normalised each by itself (LayerNorm), where the paper normalises
over the batch, since a position's output must not depend on its companions. Values are
trained like all other parameters, not with a rate of their own.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention.inputs import check_size
from lra_jax.errors import expected, known
from lra_jax.models.layers import Dense, Dropout, LayerNorm, check_even

# The paper has 512 keys a half, 4 heads and 32 best for models of a width of 1024.
DEFAULTS = {"keys": 64, "heads": 4, "top": 8, "query_dim": 32}

# Positions computed at once: their values are gathered, k for each head.
_TOGETHER = 4096


def memory_sizes(options: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a memory, with what the options change.

    Args:
      options: "keys" (K), "heads", "top" (k), "query_dim" (d).

    Raises:
      ValueError: an unknown option, or a size that is impossible.
    """
    for name in options:
        known("option of mlp 'product_key'", name, DEFAULTS)
    sizes = {n: check_size(n, v) for n, v in (DEFAULTS | dict(options)).items()}
    check_even("query_dim", sizes["query_dim"], "width, because a query has two halves")
    if sizes["top"] > sizes["keys"]:
        raise expected("top", f"at most keys={sizes['keys']}", sizes["top"])
    return sizes


class ProductKeyMemory(nnx.Module):
    """A sparse memory of K^2 values, for each position alone.

    Args:
      features: width D of input and output.
      options: see `memory_sizes`.
      dropout: rate on the weights of the values.
      dtype: of the computation; parameters are float32, scores too.
      rngs: for initialisation: values normal with standard deviation D^-1/2, sub-keys
        uniform in +-(d / 2)^-1/2, as in the paper.

    Raises:
      ValueError: what `memory_sizes` raises.
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
        values = jax.random.normal(rngs.params(), (sizes["keys"] ** 2, features))
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
        """`[..., D]` to `[..., D]`; ``mask`` is not read; ``rngs`` trains."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.chosen(flat)
        weights = self.dropout(weights, rngs)
        values = self.values[...]
        dtype = self.dtype or x.dtype

        @jax.checkpoint
        def read(weights: jax.Array, chosen: jax.Array) -> jax.Array:
            rows = values[chosen].astype(dtype)
            return jnp.einsum("nk,nkd->nd", weights.astype(dtype), rows)

        count = len(flat)
        parts = -(-count // _TOGETHER)
        size = -(-count // parts)
        fill = [(0, parts * size - count), (0, 0)]
        cut = [
            jnp.pad(a, fill).reshape(parts, size, a.shape[1]) for a in (weights, chosen)
        ]
        out = jax.lax.map(lambda part: read(*part), tuple(cut))
        return out.reshape(-1, x.shape[-1])[:count].reshape(x.shape).astype(x.dtype)

    def chosen(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of the values that positions `[P, D]` read, and which they are.

        Returns:
          float32 and int32 `[P, heads * k]`; the weights of each head sum to one.
        """
        query = self.query(x).astype(jnp.float32)
        query = self.norm(query.reshape(len(x), self.heads, -1))
        halves = query.reshape(len(x), self.heads, 2, -1)
        scores = jnp.einsum("phcd,hckd->phck", halves, self.keys[...])
        best, index = jax.lax.top_k(scores, self.top)
        count = self.keys.shape[2]
        pairs = best[:, :, 0, :, None] + best[:, :, 1, None]
        places = index[:, :, 0, :, None] * count + index[:, :, 1, None]
        pairs, places = (a.reshape(*a.shape[:2], -1) for a in (pairs, places))
        best, picked = jax.lax.top_k(pairs, self.top)
        places = jnp.take_along_axis(places, picked, -1)
        weights = jax.nn.softmax(best, -1)
        return weights.reshape(len(x), -1), places.reshape(len(x), -1)
