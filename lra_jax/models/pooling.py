"""From a batch of sequences to one vector each: masks, encoder, pooling.

A sequence's padding:
  lengths  the positions beyond its length. Exact: a padded batch gives what each
           sequence gives alone.
  zeros    the rule of the Long-Range Arena's code, for comparison with it: every token
           of id 0 is padding to the attention, wherever it is, so that an image's
           black pixels vanish (two thirds of Pathfinder), and a class vector with them
           where the first one is black. The mean is over all T positions.
           Deviation: a masked query attends to the real keys here; that code gives it
           the mean of all values.
"""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention.inputs import check_shape
from lra_jax.errors import known
from lra_jax.models.config import EncoderConfig, configured
from lra_jax.models.encoder import TransformerEncoder

Pooling = Literal["mean", "cls", "first"]
Padding = Literal["lengths", "zeros"]


class PooledEncoder(nnx.Module):
    """The base of the classifiers: an encoder, and one vector for each sequence.

    Args:
      vocab_size: token ids are below it.
      pooling: "mean" over the real tokens; "cls", the row of a learned vector in front
        of them; or "first", the row of the first token.
      padding: "lengths" or "zeros", see above.
      config: the encoder's settings, but for ``cls_token``, which follows from pooling.
      rngs: for initialisation.
      **settings: the fields of `EncoderConfig`, in place of a config or of these values
        of it.

    Raises:
      ValueError: an unknown pooling or padding, or what `EncoderConfig` raises.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        pooling: Pooling = "mean",
        padding: Padding = "lengths",
        config: EncoderConfig | None = None,
        rngs: nnx.Rngs,
        **settings: Any,
    ):
        self.pooling = known("pooling", pooling, get_args(Pooling))
        self.padding = known("padding", padding, get_args(Padding))
        settings |= {"cls_token": pooling == "cls"}
        config = configured(EncoderConfig, config, settings)
        self.encoder = TransformerEncoder(vocab_size, config=config, rngs=rngs)

    def pooled(
        self,
        tokens: jax.Array,
        lengths: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """One float32 vector `[B, D]` for each row of tokens `[B, T]`.

        Raises:
          ValueError: tokens or lengths of another shape, or of a length that the
            encoder refuses.
        """
        check_shape("tokens", tokens, "B T", None, None)
        if lengths is not None:
            check_shape("lengths", lengths, "B", len(tokens))
        mask = self._mask(tokens, lengths)
        encoded = self.encoder(tokens, mask, rngs).astype(jnp.float32)
        if self.pooling != "mean":
            return encoded[:, 0]
        return _mean(encoded, mask if self.padding == "lengths" else None)

    def _mask(self, tokens: jax.Array, lengths: jax.Array | None) -> jax.Array | None:
        """Boolean `[B, T]`, True at what may be attended; None = everything."""
        mask = None
        if lengths is not None:
            mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
        if self.padding == "zeros":
            real = tokens > 0
            mask = real if mask is None else real & mask
        return mask


def _mean(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Mean of `[B, T, D]` over the real tokens; zero where there is none."""
    if mask is None:
        return x.mean(1)
    weights = mask.astype(x.dtype)
    # A product and a sum, not an einsum, whose gradient XLA lays out with T last.
    total = jnp.sum(x * weights[:, :, None], 1)
    return total / jnp.maximum(weights.sum(1), 1)[:, None]
