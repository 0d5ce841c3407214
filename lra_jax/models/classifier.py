"""Classification of whole sequences."""

from typing import Any

import jax
from flax import nnx

from lra_jax.models.layers import Dense
from lra_jax.models.pooling import PooledEncoder


class SequenceClassifier(PooledEncoder):
    """Encoder, pooling, and a head of one hidden layer.

    ``logits = W2 ReLU(W1 pool(encoder(tokens)))``, the head of the LRA code.

    The hidden layer is as wide as the blocks' MLPs. Pooling, head and logits are
    float32 in every dtype of the computation.

    Args:
      vocab_size: token ids are below it.
      num_classes: number of logits.
      rngs: for initialisation.
      **settings: pooling, padding, and the encoder's ``config`` or its fields: see
        `PooledEncoder` and `EncoderConfig`.

    Raises:
      ValueError: what these raise.

    Examples:
      >>> model = SequenceClassifier(
      ...     256, 10, mechanism="flow", num_layers=1, embed_dim=32, num_heads=2,
      ...     mlp_dim=64, max_length=512, rngs=nnx.Rngs(0),
      ... )
      >>> model(jnp.ones((2, 300), int), lengths=jnp.array([300, 120])).shape
      (2, 10)
    """

    INPUTS = ("tokens", "lengths")
    """The arrays of a batch that a call takes, in its order."""

    def __init__(
        self, vocab_size: int, num_classes: int, *, rngs: nnx.Rngs, **settings: Any
    ):
        super().__init__(vocab_size, rngs=rngs, **settings)
        self.num_classes = num_classes
        config = self.encoder.config
        self.hidden = Dense(self.pooled_features, config.mlp_dim, rngs=rngs)
        self.logits = Dense(config.mlp_dim, num_classes, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        segment_ids: jax.Array | None = None,
        documents: int | None = None,
    ) -> jax.Array:
        """Scores a batch.

        Args:
          tokens: integer `[B, T]`; what lies beyond a length is never read.
          lengths: integer `[B]`, tokens of each sequence; None = T for all.
          rngs: with a stream "dropout", to train; None to evaluate.
          segment_ids, documents: where several documents are packed into a row, and the
            most that a row has; see `pooled`.

        Returns:
          float32 logits `[B, num_classes]`, or `[B, documents, num_classes]`.

        Raises:
          ValueError: what `pooled` raises.
        """
        pooled = self.pooled(
            tokens, lengths, rngs, segment_ids=segment_ids, documents=documents
        )
        return self.logits(jax.nn.relu(self.hidden(pooled)))
