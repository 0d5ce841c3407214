"""Classification of whole sequences."""

from typing import Any

import jax
from flax import nnx

from lra_jax.attention.inputs import check_size
from lra_jax.models.layers import Dense, Dropout
from lra_jax.models.pooling import PooledEncoder


class SequenceClassifier(PooledEncoder):
    """Encoder, pooling, and a head of one hidden layer.

    ``logits = W2 ReLU(W1 pool(encoder(tokens)))``, the head of the LRA code; with
    pooling "flatten" ``W dropout(pool(encoder(tokens)))``, that of time series (Zerveas
    et al. 2021, arXiv:2010.02803). One logit can also be a number to predict.

    The hidden layer is as wide as the blocks' MLPs. Pooling, head and logits are
    computed in float32, whatever the dtype.

    Args:
      vocab_size: token ids are below this; with inputs "vectors", their width C.
      num_classes: number of logits.
      rngs: for initialisation.
      **settings: a ``config`` or its fields, see `PooledEncoder`.

    Raises:
      ValueError: a number of classes below 1, or see `PooledEncoder`.

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
        width, one_layer = self.pooled_features, self.pooling == "flatten"
        self.hidden: Any = (
            None if one_layer else Dense(width, config.mlp_dim, rngs=rngs)
        )
        width = width if one_layer else config.mlp_dim
        self.logits = Dense(width, self.num_classes, rngs=rngs)
        self.dropout = Dropout(config.dropout)

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
          tokens: integer `[B, T]`, or real vectors `[B, T, C]`; anything beyond a
            sequence's length is ignored.
          lengths: integer `[B]`, number of tokens in each sequence; None = T for all.
          rngs: with a stream "dropout", for training; None for evaluation.
          segment_ids, documents: for rows of several packed documents, and the maximum
            number in a row; see `pool`.

        Returns:
          float32 logits `[B, num_classes]`, or `[B, documents, num_classes]`.

        Raises:
          ValueError: see `pool`.
        """
        pooled = self.pool(
            tokens, lengths, rngs, segment_ids=segment_ids, documents=documents
        )
        if self.hidden is None:
            return self.logits(self.dropout(pooled, rngs))
        return self.logits(jax.nn.relu(self.hidden(pooled)))
