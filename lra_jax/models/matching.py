"""Classification of pairs: whether one document cites the other, for example."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention.inputs import check_shape, check_size
from lra_jax.errors import expected
from lra_jax.models.classifier import PooledEncoder
from lra_jax.models.inputs import check_lengths
from lra_jax.models.layers import Dense


class MatchingClassifier(PooledEncoder):
    """One encoder for both sequences, and a head of two hidden layers on the pair.

    With a and b the pooled vectors of the two,
    ``logits = W3 ReLU(W2 ReLU(W1 f(a, b)))``, where f is
      concat: ``[a, b]``, the default of the LRA code;
      nli: ``[a, b, a * b, a - b]``, the LRA paper's formula, from natural language
        inference. The classifier need not learn to compare.
    The hidden layers are as wide as the MLPs and half as wide, as in the LRA code;
    the PyTorch code bases have one hidden layer. Pooling, head and logits are
    computed in float32, whatever the dtype.

    Args:
      vocab_size, rngs, **settings: see `TransformerEncoder`.
      num_classes: number of logits.

    Raises:
      ValueError: ``head="linear"``, or see `PooledEncoder`.
    """

    INPUTS = ("tokens_1", "lengths_1", "tokens_2", "lengths_2")
    """The arrays of a batch that a call takes, in order."""

    def __init__(
        self, vocab_size: int, num_classes: int, *, rngs: nnx.Rngs, **settings: Any
    ):
        super().__init__(vocab_size, rngs=rngs, **settings)
        self.num_classes = check_size("num_classes", num_classes)
        if self.encoder.config.head == "linear":
            raise expected("head", "'mlp' for pairs", "'linear'")
        width = self.encoder.config.mlp_dim
        self.interaction = self.encoder.config.interaction
        parts = 4 if self.interaction == "nli" else 2
        self.hidden = Dense(parts * self.pooled_features, width, rngs=rngs)
        self.hidden_2 = Dense(width, max(width // 2, 1), rngs=rngs)
        self.logits = Dense(max(width // 2, 1), self.num_classes, rngs=rngs)

    def __call__(
        self,
        tokens_1: jax.Array,
        lengths_1: jax.Array | None,
        tokens_2: jax.Array,
        lengths_2: jax.Array | None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Scores a batch of pairs.

        Args:
          tokens_1: integer `[B, T]`, the first sequence of each pair.
          lengths_1: integer `[B]`, number of tokens; None (then for both) = T.
          tokens_2: integer `[B, T]`, the second sequence.
          lengths_2: integer `[B]`.
          rngs: with a stream "dropout", for training; None for evaluation.

        Returns:
          float32 logits `[B, num_classes]`.

        Raises:
          ValueError: arrays of other shapes, lengths beyond T where they are known (not
            traced), or lengths for one sequence only.
        """
        check_shape("tokens_1", tokens_1, "B T", None, None)
        check_shape("tokens_2", tokens_2, "B T", *tokens_1.shape)
        for name, lengths in {"lengths_1": lengths_1, "lengths_2": lengths_2}.items():
            if lengths is not None:
                check_lengths(name, lengths, tokens_1)
        if (lengths_1 is None) != (lengths_2 is None):
            raise expected("lengths_1, lengths_2", "both or none", "one of them")
        # One pass over the pairs stacked as [B, 2, T], so that both rows of an example
        # stay on the device that holds it.
        lengths = None
        if lengths_1 is not None and lengths_2 is not None:
            lengths = jnp.stack([lengths_1, lengths_2], 1).reshape(-1)
        both = jnp.stack([tokens_1, tokens_2], 1)
        pooled = self.pool(both.reshape(-1, both.shape[-1]), lengths, rngs)
        a, b = pooled[0::2], pooled[1::2]
        parts = [a, b, a * b, a - b] if self.interaction == "nli" else [a, b]
        hidden = jax.nn.relu(self.hidden(jnp.concatenate(parts, -1)))
        return self.logits(jax.nn.relu(self.hidden_2(hidden)))
