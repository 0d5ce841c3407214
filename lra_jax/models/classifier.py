"""Classification of whole sequences."""

from typing import Any

import jax
from flax import nnx

from lra_jax.models.layers import Dense
from lra_jax.models.pooling import PooledEncoder


class SequenceClassifier(PooledEncoder):
    """Encoder, pooling, and a head of one hidden layer.

    ``logits = W2 ReLU(W1 pool(encoder(tokens)))``, the head of the LRA code.

    Args:
      vocab_size: token ids are below it.
      num_classes: number of logits.
      mlp_dim: hidden width of the head and of the blocks' MLPs.
      dtype: of the computation; pooling, head and logits are float32.
      rngs: for initialisation.
      **encoder: pooling, padding and the encoder's sizes: see ``PooledEncoder`` and
        ``TransformerEncoder``.

    Raises:
      ValueError: what these raise.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        *,
        embed_dim: int = 64,
        mlp_dim: int = 128,
        dtype: Any = None,
        rngs: nnx.Rngs,
        **encoder: Any,
    ):
        super().__init__(
            vocab_size,
            embed_dim=embed_dim,
            mlp_dim=mlp_dim,
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
        pooled = self.pooled(tokens, lengths, rngs)
        return self.logits(jax.nn.relu(self.hidden(pooled)))
