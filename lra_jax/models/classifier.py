"""Classification of whole sequences."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.models.encoder import TransformerEncoder
from lra_jax.models.layers import Dense


class SequenceClassifier(nnx.Module):
    """Encoder, pooling over the real tokens, and a head of one hidden layer.

    ``logits = W2 ReLU(W1 pool(encoder(tokens)))``, the head of the LRA code.

    Args:
      vocab_size: token ids are below it.
      num_classes: number of logits.
      pooling: "mean" over the real tokens, or "cls": the row of a learned vector in
        front of them.
      mlp_dim: hidden width of the head and of the blocks' MLPs.
      dtype: of the computation; pooling, head and logits are float32.
      rngs: for initialisation.
      **encoder: see ``TransformerEncoder``.

    Raises:
      ValueError: an unknown pooling, or what the encoder raises.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        *,
        pooling: Literal["mean", "cls"] = "mean",
        embed_dim: int = 64,
        mlp_dim: int = 128,
        dtype: Any = None,
        rngs: nnx.Rngs,
        **encoder: Any,
    ):
        if pooling not in ("mean", "cls"):
            raise ValueError(f"pooling: expected 'mean' or 'cls', got {pooling!r}")
        self.pooling = pooling
        self.encoder = TransformerEncoder(
            vocab_size,
            embed_dim=embed_dim,
            mlp_dim=mlp_dim,
            cls_token=pooling == "cls",
            dtype=dtype,
            rngs=rngs,
            **encoder,
        )
        self.hidden = Dense(embed_dim, mlp_dim, rngs=rngs)
        self.logits = Dense(mlp_dim, num_classes, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Scores a batch.

        Args:
          tokens: integer `[B, T]`; what lies beyond a length is never read.
          lengths: integer `[B]`, tokens of each sequence; None = T for all.
          rngs: with a stream "dropout", to train; None to evaluate.

        Returns:
          float32 logits `[B, num_classes]`.
        """
        mask = None
        if lengths is not None:
            mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        encoded = self.encoder(tokens, mask, rngs).astype(jnp.float32)
        pooled = encoded[:, 0] if self.pooling == "cls" else _mean(encoded, mask)
        return self.logits(jax.nn.relu(self.hidden(pooled)))


def _mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Mean of `[B, T, D]` over the real tokens; zero where there is none."""
    if mask is None:
        return x.mean(1)
    weights = mask.astype(x.dtype)
    # A product and a sum, not an einsum, whose gradient XLA lays out with T last.
    total = jnp.sum(x * weights[:, :, None], 1)
    return total / jnp.maximum(weights.sum(1), 1)[:, None]
