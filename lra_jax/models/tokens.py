"""Models that predict a class at single positions of a sequence."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention.inputs import check_shape, check_size
from lra_jax.errors import expected
from lra_jax.models.encoder import TransformerEncoder
from lra_jax.models.inputs import length_mask
from lra_jax.models.layers import (
    Dense,
    LayerNorm,
    check_even,
    rows_at,
    sinusoidal_positions,
    take_rows,
)


class TokenModel(nnx.Module):
    """The base of the models below: an encoder, or a decoder with ``is_causal``.

    Args:
      vocab_size, rngs, **settings: see `TransformerEncoder`.

    Raises:
      ValueError: see `ModelConfig`; or a class vector, a reconstruction, patches or
        ``padding="zeros"``, which only classifiers of whole sequences have.
    """

    INPUTS = ("tokens", "lengths", "positions")
    """The arrays of a batch that a call takes, in order."""
    PACKED = True
    """Whether a row may hold several documents."""

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs, **settings: Any):
        self.encoder = TransformerEncoder(vocab_size, rngs=rngs, **settings)
        config = self.encoder.config
        others = {"pooling": config.cls_token, "reconstructs": config.reconstructs}
        others |= {"patch": config.patch > 1, "padding": config.padding == "zeros"}
        for name in (name for name, is_set in others.items() if is_set):
            needed = "another value for a model of single positions"
            raise expected(name, needed, f"{getattr(config, name)!r}")

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Scores positions of a batch.

        Args:
          tokens: integer `[B, T]`; anything beyond a sequence's length is ignored.
          lengths: integer `[B]`, number of tokens in each sequence; None = T for all.
          positions: integer `[B, K]`, the positions to score; None = all, K = T.
          rngs: with a stream "dropout", for training; None for evaluation.
          segment_ids: `[B, T]`, if several documents are packed into a row.

        Returns:
          float32 logits `[B, K, num_classes]`.

        Raises:
          ValueError: arrays of other shapes, or tokens too long for the encoder.
        """
        read = self.read(tokens, lengths, positions, rngs, segment_ids=segment_ids)
        return self.compute_logits(read)

    def read(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        positions: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
        *,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """The features that a call scores, `[B, K, D]`; the same arguments."""
        if segment_ids is not None and not self.PACKED:
            needed = "None, since a row is reconstructed from its last position"
            raise expected("segment_ids", needed, "an array")
        mask = length_mask(tokens, lengths)
        batch, length = tokens.shape[:2]
        if positions is None:
            ids = tokens[:, :, 0] if tokens.ndim == 3 else tokens
            steps = jnp.arange(length, dtype=jnp.int32)[None]
            positions = jnp.zeros_like(ids, jnp.int32) + steps
        check_shape("positions", positions, "B K", batch, None)
        encoded = self.encoder(tokens, mask, rngs, segment_ids, in_place=True)
        return self._read(encoded.astype(jnp.float32), lengths, positions)

    @abc.abstractmethod
    def compute_logits(self, x: jax.Array) -> jax.Array:
        """The logits of vectors `[..., D]` float32."""

    def _read(
        self, encoded: jax.Array, lengths: jax.Array | None, positions: jax.Array
    ) -> jax.Array:
        """The features for the logits, `[B, K, D]`, from `[B, T, D]`."""
        return rows_at(encoded, positions)


class TokenClassifier(TokenModel):
    """``logits_t = W encoder(tokens)_t + b``, at each position separately.

    Args:
      vocab_size, rngs, **settings: see `TransformerEncoder`.
      num_classes: number of logits.
    """

    def __init__(
        self, vocab_size: int, num_classes: int, *, rngs: nnx.Rngs, **settings: Any
    ):
        super().__init__(vocab_size, rngs=rngs, **settings)
        self.num_classes = check_size("num_classes", num_classes)
        width = self.encoder.config.embed_dim
        self.logits = Dense(width, self.num_classes, rngs=rngs)

    def compute_logits(self, x: jax.Array) -> jax.Array:
        """See the base class."""
        return self.logits(x)


class AutoEncoder(TokenClassifier):
    """All positions reconstructed from the vector of the last one.

    ``logits_t = W norm(mlp(encoder(tokens)_last + p_t)) + b`` with sinusoidal p and an
    mlp of two layers ``gelu(W norm(x))`` as wide as the model: the decoder of MAD's
    compression test (athms/mad-lab, mad/model/auto_encoder.py). A row is one sequence.
    """

    PACKED = False

    def __init__(
        self, vocab_size: int, num_classes: int, *, rngs: nnx.Rngs, **settings: Any
    ):
        super().__init__(vocab_size, num_classes, rngs=rngs, **settings)
        width = self.encoder.config.embed_dim
        check_even("embed_dim", width, "width for sinusoidal positions")
        self.norms = nnx.List([LayerNorm(width) for _ in range(3)])
        self.layers = nnx.List([Dense(width, width, rngs=rngs) for _ in range(2)])

    def _read(
        self, encoded: jax.Array, lengths: jax.Array | None, positions: jax.Array
    ) -> jax.Array:
        batch, length, width = encoded.shape
        if lengths is None:
            lengths = jnp.full((batch,), length)
        last = rows_at(encoded, lengths[:, None] - 1)
        table = sinusoidal_positions(
            self.encoder.config.max_length, width, encoded.dtype
        )
        x = last + take_rows(table, positions)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = jax.nn.gelu(layer(norm(x)))
        return self.norms[-1](x)
