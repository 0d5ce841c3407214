"""Language models that predict the next token, or masked ones.

Logits are inner products with the token embeddings, which are tied to the input's
(Press & Wolf 2017, arXiv:1608.05859): ``logits_t = E x_t + b``. With ``cutoffs`` they
come from an adaptive softmax tied to the adaptive inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.errors import expected
from lra_jax.models.layers import Dense, LayerNorm
from lra_jax.models.tokens import TokenModel


class LanguageModel(TokenModel):
    """The base of both models: tied logits.

    Args:
      vocab_size, rngs, **settings: see `TransformerEncoder`; ids are also classes.

    Raises:
      ValueError: see `TokenModel`; or inputs that are not embeddings.
    """

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs, **settings: Any):
        super().__init__(vocab_size, rngs=rngs, **settings)
        if self.encoder.config.inputs != "embedding":
            needed = "'embedding' for a language model"
            raise expected("inputs", needed, repr(self.encoder.config.inputs))
        adaptive = self.encoder.config.clusters
        bias = None if adaptive else nnx.Param(jnp.zeros((vocab_size,), jnp.float32))
        self.bias: Any = bias

    def compute_logits(self, x: jax.Array) -> jax.Array:
        """See the base class."""
        embed: Any = self.encoder.embed
        rows = x.reshape(-1, x.shape[-1])
        if self.bias is None:
            return embed.log_probabilities(rows).reshape(*x.shape[:-1], -1)
        logits = rows @ embed.embedding[...].T + self.bias[...][None]
        return logits.reshape(*x.shape[:-1], -1)


class CausalLM(LanguageModel):
    """``p(token_{t + 1} | tokens up to t) = softmax(E decoder(tokens)_t + b)``.

    The decoder is a `TransformerEncoder` with ``is_causal=True``; any mechanism with a
    causal form will do. If the mechanism also has a stream, `lra_jax.models.generate`
    can continue texts.

    Raises:
      ValueError: ``is_causal=False``, or see `LanguageModel`.

    Examples:
      >>> model = CausalLM(
      ...     256, mechanism="retention", num_layers=1, embed_dim=32, num_heads=2,
      ...     mlp_dim=64, max_length=512, rngs=nnx.Rngs(0),
      ... )
      >>> model(jnp.ones((2, 300), int)).shape
      (2, 300, 256)
    """

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs, **settings: Any):
        if settings.get("config") is None:
            settings = {"is_causal": True, **settings}
        super().__init__(vocab_size, rngs=rngs, **settings)
        if not self.encoder.config.is_causal:
            raise expected("is_causal", "True for the next token", False)


class MaskedLM(LanguageModel):
    """``p(token_t | the tokens that are not masked)``, with any mechanism.

    The logits are preceded by the head of BERT and RoBERTa: ``LN(gelu(W x + b))``.

    The last token of the vocabulary serves as the mask token.

    Raises:
      ValueError: ``is_causal=True``, or see `LanguageModel`.
    """

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs, **settings: Any):
        super().__init__(vocab_size, rngs=rngs, **settings)
        if self.encoder.config.is_causal:
            raise expected("is_causal", "False for masked tokens", True)
        width = self.encoder.config.embed_dim
        self.dense = Dense(width, width, rngs=rngs)
        self.norm = LayerNorm(width)

    def compute_logits(self, x: jax.Array) -> jax.Array:
        """See the base class."""
        return super().compute_logits(self.norm(jax.nn.gelu(self.dense(x))))
