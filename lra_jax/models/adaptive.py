"""Adaptive inputs and an adaptive softmax: small vectors for rare words.

Baevski & Auli 2019, arXiv:1809.10853, after Grave et al. 2017, arXiv:1609.04309. Token
ids are ordered by frequency and divided into clusters. Tokens of cluster c have vectors
of width D / 4^c, which a matrix projects to D. The softmax has tied weights: tokens of
the first cluster compete with one entry for each other cluster, and each of those has
its own softmax.

Deviation: dense, because shapes are fixed under jit: every cluster is computed at every
position, which is still much cheaper than a full softmax. No dropout in the tails.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.models.layers import Dense, take_rows

# How much narrower each cluster is than the one before.
_FACTOR = 4


class AdaptiveEmbed(nnx.Module):
    """Vectors of tokens, and their log-probabilities.

    ``cutoffs`` are the first token ids of the clusters, increasing; those beyond the
    vocabulary are dropped. Tables begin normal, with the inverse root of their width as
    standard deviation, and matrices Glorot uniform.
    """

    def __init__(
        self,
        vocab_size: int,
        features: int,
        *,
        cutoffs: tuple[int, ...],
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        starts = [0, *(c for c in cutoffs if c < vocab_size)]
        self.num_embeddings, self.dtype = vocab_size, dtype
        self.bounds = tuple(zip(starts, [*starts[1:], vocab_size], strict=True))
        tables, matrices = [], []
        for index, (start, stop) in enumerate(self.bounds):
            width = max(1, features // _FACTOR**index)
            normal = nnx.initializers.normal(width**-0.5)
            glorot = nnx.initializers.xavier_uniform()
            table = normal(rngs.params(), (stop - start, width), jnp.float32)
            matrix = glorot(rngs.params(), (width, features), jnp.float32)
            tables.append(nnx.Param(table))
            matrices.append(nnx.Param(matrix))
        self.tables, self.matrices = nnx.List(tables), nnx.List(matrices)
        tails = len(self.bounds) - 1
        dense = Dense(features, tails, use_bias=False, rngs=rngs) if tails else None
        self.clusters: Any = dense

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `[B, T]` to `[B, T, D]`, NaN for ids beyond the vocabulary."""
        # As in `nnx.Embed`, ids beyond the vocabulary get no plausible vector.
        known = (tokens >= 0) & (tokens < self.num_embeddings)
        out: Any = jnp.where(known, 0.0, jnp.nan)[:, :, None]
        parts = zip(self.bounds, self.tables, self.matrices, strict=True)
        for (start, stop), table, matrix in parts:
            inside = (tokens >= start) & (tokens < stop)
            place = jnp.where(inside, tokens - start, 0)
            vectors = take_rows(table[...], place) @ matrix[...]
            out = out + jnp.where(inside[:, :, None], vectors, 0.0)
        return out if self.dtype is None else out.astype(self.dtype)

    def log_probabilities(self, x: jax.Array) -> jax.Array:
        """Log-probabilities `[K, V]` of all tokens, from float32 vectors `[K, D]`."""
        scores = [
            (x @ matrix[...].T) @ table[...].T
            for table, matrix in zip(self.tables, self.matrices, strict=True)
        ]
        if self.clusters is None:
            return jax.nn.log_softmax(scores[0], -1)
        first = jnp.concatenate([scores[0], self.clusters(x)], -1)
        first = jax.nn.log_softmax(first, -1)
        size = scores[0].shape[-1]
        tails = [
            jax.nn.log_softmax(tail, -1) + first[:, size + i : size + i + 1]
            for i, tail in enumerate(scores[1:])
        ]
        return jnp.concatenate([first[:, :size], *tails], -1)
