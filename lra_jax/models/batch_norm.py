"""Normalisation of each column over all positions of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import packed
from lra_jax.attention.inputs import accumulation_dtype, check_shape
from lra_jax.attention.masking import check_mask
from lra_jax.models.attention import Buffer
from lra_jax.models.layers import at_positions


class RunningMean(Buffer):
    """A buffer that each call in training moves towards the mean of its batch."""


class BatchNorm(nnx.Module):
    """``(x - mean) / sqrt(var + epsilon) * scale + bias`` for each column.

    In training, mean and variance are those over the real positions of the whole batch,
    on all devices, and ``running = momentum * running + (1 - momentum) * batch``, with
    the unbiased variance. Otherwise they are the running ones, so that an example's
    result does not depend on the others.

    The running statistics change in a call, as those of ``nnx.BatchNorm`` do: under
    ``nnx.jit`` and ``nnx.grad``, or where the model is made inside a function of
    ``jax.jit`` and its new state is returned. The trainer does the latter. In training
    an output depends on all positions, so the norm is not for causal models.

    Source: Ioffe & Szegedy 2015, arXiv:1502.03167; momentum and epsilon are PyTorch's.
    Deviation: padding does not count; in PyTorch code, which has no mask, it does.

    Args:
      features: width of the last axis.
      momentum: how much of the running statistics a call in training keeps.
      epsilon: added to the variance.
      dtype: dtype of the output; the input's by default. Parameters and running
        statistics are float32, and those of a batch float32 or wider.
    """

    def __init__(
        self,
        features: int,
        *,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        dtype: Any = None,
    ):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.mean = RunningMean(jnp.zeros((features,), jnp.float32))
        self.var = RunningMean(jnp.ones((features,), jnp.float32))
        self.momentum = momentum
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
          segment_ids: integers `[B, T]`, the documents of packed rows, 0 = padding;
            None = no row is packed.
          training: normalise with the statistics of the batch, and update the running
            ones; a batch of fewer than two real positions leaves these as they are.

        Raises:
          ValueError: arrays of other shapes.
        """
        check_shape("inputs", inputs, "B T D", None, None, self.scale.shape[0])
        batch, length = inputs.shape[:2]
        mask = check_mask("mask", mask, "B T", {1, batch}, length)
        x = inputs.astype(accumulation_dtype(inputs))
        mean, var = (a[...].astype(x.dtype) for a in (self.mean, self.var))
        if training:
            real = packed.hide_padding(
                mask, packed.documents(segment_ids, inputs, inputs)
            )
            shown = jnp.ones((1, length), bool) if real is None else real
            shown = jnp.broadcast_to(shown, (batch, length))[:, :, None]
            x = jnp.where(shown, x, 0)
            mean, var, count = _statistics(x, shown)
            self._follow(self.mean, mean, count > 1)
            self._follow(self.var, var * count / jnp.maximum(count - 1, 1), count > 1)
        inverse = jax.lax.rsqrt(var + self.epsilon) * self.scale[...].astype(x.dtype)
        out = (x - at_positions(mean, x)) * at_positions(inverse, x)
        out = out + at_positions(self.bias[...], x)
        return out.astype(self.dtype or inputs.dtype)

    def _follow(self, running: RunningMean, new: jax.Array, known: jax.Array) -> None:
        """Moves a running mean, if the batch has a value."""
        old = running[...]
        new = jax.lax.stop_gradient(new).astype(old.dtype)
        moved = self.momentum * old + (1 - self.momentum) * new
        running[...] = jnp.where(known, moved, old)


def _statistics(
    x: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and variance `[D]` over the real positions of `[B, T, D]`, and their number.

    Both are 0 if there are none; ``real`` is `[B, T, 1]`.
    """
    count = real.astype(x.dtype).sum()

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(real, x, 0).sum((0, 1)) / jnp.maximum(count, 1)

    average = mean(x)
    return average, mean(jnp.square(x - at_positions(average, x))), count
