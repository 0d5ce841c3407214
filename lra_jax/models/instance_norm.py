"""Normalisation of each column over the positions of a sequence."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import packed
from lra_jax.attention.inputs import accumulation_dtype, check_shape
from lra_jax.attention.masking import check_mask


class InstanceNorm(nnx.Module):
    """``(x - mean) / sqrt(var + epsilon) * scale + bias``, where mean and variance of
    each column are those over the real positions of a sequence.

    Layer normalisation, which looks at one position at a time, gives every position the
    same size. In an image that is mostly background, such as Pathfinder's, the
    background is then as large as the figure; here it is close to zero. A convolutional
    network learns Pathfinder's short paths in 300 steps with this norm, and is still at
    chance with layer normalisation (docs/tasks.md). S4 and its successors normalise
    over positions too, but of the whole batch (BatchNorm). This form has no running
    statistics, and an example's result does not depend on the others in its batch.

    Padding does not count, and packed documents are normalised one by one. Each output
    depends on all positions, so it is not for causal models. The mean of the output
    over its sequence is ``bias``, whatever the input, so no mean may follow.

    Source: Ulyanov et al. 2016, arXiv:1607.08022.

    Args:
      features: width of the last axis.
      epsilon: added to the variance.
      dtype: dtype of the output; the input's by default. Parameters are float32, and
        statistics float32 or wider.
    """

    def __init__(self, features: int, *, epsilon: float = 1e-5, dtype: Any = None):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(
        self,
        inputs: jax.Array,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        training: bool = False,
    ) -> jax.Array:
        """`[B, T, features]` to `[B, T, features]`.

        Args:
          inputs: the sequences.
          mask: boolean `[B, T]`, True at real positions; None = all.
          segment_ids: integers `[B, T]`, the documents of packed rows
            (`lra_jax.attention.packed`); None = one a row.
          training: ignored; `BatchNorm` needs it.

        Returns:
          The normalised sequences, with ``bias`` at padding.

        Raises:
          ValueError: arrays of other shapes.
        """
        check_shape("inputs", inputs, "B T D", None, None, self.scale.shape[0])
        batch, length = inputs.shape[:2]
        mask = check_mask("mask", mask, "B T", {1, batch}, length)
        documents = packed.documents(segment_ids, inputs, inputs)
        mask = packed.hide_padding(mask, documents)
        x = inputs.astype(accumulation_dtype(inputs))
        shown = jnp.ones((1, length), bool) if mask is None else mask
        real = jnp.broadcast_to(shown, (batch, length))[:, :, None]

        def mean(x: jax.Array) -> jax.Array:
            """Over the document of each position; 0 if nothing in it is real."""
            total, count = _sums(jnp.where(real, x, 0), real.astype(x.dtype), documents)
            return total / jnp.maximum(count, 1)

        centred = jnp.where(real, x - mean(x), 0)
        inverse = jax.lax.rsqrt(mean(jnp.square(centred)) + self.epsilon)
        scale, bias = (
            a[...].astype(x.dtype)[None, None] for a in (self.scale, self.bias)
        )
        out = centred * inverse * scale + bias
        return out.astype(self.dtype or inputs.dtype)


def _sums(
    x: jax.Array, real: jax.Array, documents: packed.Packed | None
) -> tuple[jax.Array, jax.Array]:
    """Sums over the sequence or, at each position, over its document."""
    if documents is None:
        return x.sum(1, keepdims=True), real.sum(1, keepdims=True)
    total, count = (documents.over(jax.ops.segment_sum, a, 1) for a in (x, real))
    return total, count
