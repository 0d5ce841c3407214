"""Classification of whole sequences."""

from typing import Any

import jax
from flax import nnx

from lra_jax.attention.inputs import check_size
from lra_jax.models.layers import Dense
from lra_jax.models.pooling import PooledEncoder


class SequenceClassifier(PooledEncoder):
    """Encoder, pooling, and a head of one hidden layer.

    ``logits = W2 ReLU(W1 pool(encoder(tokens)))``, the head of the LRA code.

    The hidden layer is as wide as the blocks' MLPs. Pooling, head and logits are
    computed in float32, whatever the dtype.

    Args:
      vocab_size: token ids are below this.
      num_classes: number of logits.
      rngs: for initialisation.
      **settings: pooling, padding, and the encoder's ``config`` or its fields: see
        `PooledEncoder` and `EncoderConfig`.

    Raises:
      ValueError: a number of classes below 1, or see the same two.

    Examples:
      >>> model = SequenceClassifier(
      ...     256, 10, mechanism="flow", num_layers=1, embed_dim=32, num_heads=2,
      ...     mlp_dim=64, max_length=512, rngs=nnx.Rngs(0),
      ... )
      >>> model(jnp.ones((2, 300), int), lengths=jnp.array([300, 120])).shape
      (2, 10)
    """

    INPUTS = ("tokens", "lengths")
    """The arrays of a batch that a call takes, in order."""

    def __init__(
        self, vocab_size: int, num_classes: int, *, rngs: nnx.Rngs, **settings: Any
    ):
        super().__init__(vocab_size, rngs=rngs, **settings)
        self.num_classes = check_size("num_classes", num_classes)
        config = self.encoder.config
        self.hidden = Dense(self.pooled_features, config.mlp_dim, rngs=rngs)
        self.logits = Dense(config.mlp_dim, self.num_classes, rngs=rngs)

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
          tokens: integer `[B, T]`; anything beyond a sequence's length is ignored.
          lengths: integer `[B]`, number of tokens in each sequence; None = T for all.
          rngs: with a stream "dropout", for training; None for evaluation.
          segment_ids, documents: for rows of several packed documents, and the maximum
            number in a row; see `pooled`.

        Returns:
          float32 logits `[B, num_classes]`, or `[B, documents, num_classes]`.

        Raises:
          ValueError: see `pooled`.
        """
        pooled = self.pooled(
            tokens, lengths, rngs, segment_ids=segment_ids, documents=documents
        )
        return self.logits(jax.nn.relu(self.hidden(pooled)))
