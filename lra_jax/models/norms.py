"""Normalisation of each column over positions: of a sequence, or of a whole batch."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.attention import packed
from lra_jax.attention.inputs import accumulation_dtype, check_shape
from lra_jax.attention.masking import check_mask
from lra_jax.models.attention import Buffer
from lra_jax.models.layers import at_positions


class PositionNorm(nnx.Module):
    """The base of both: ``(x - mean) / sqrt(var + epsilon) * scale + bias``.

    Args:
      features: width of the last axis.
      epsilon: added to the variance.
      dtype: dtype of the output; the input's by default. Parameters and running
        statistics are float32, and those of a call float32 or wider.
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
          segment_ids: integers `[B, T]`, the documents of packed rows, 0 = padding
            (`lra_jax.attention.packed`); None = one per row.
          training: normalise with the statistics of the batch, and update the running
            ones; without those, ignored.

        Raises:
          ValueError: arrays of other shapes.
        """
        check_shape("inputs", inputs, "B T D", None, None, self.scale.shape[0])
        batch, length = inputs.shape[:2]
        mask = check_mask("mask", mask, "B T", {1, batch}, length)
        documents = packed.documents(segment_ids, inputs, inputs)
        mask = packed.real_positions(mask, documents)
        shown = jnp.ones((1, length), bool) if mask is None else mask
        real = jnp.broadcast_to(shown, (batch, length))[:, :, None]
        x = inputs.astype(accumulation_dtype(inputs))
        out = self.normalise(x, real, documents, training)
        return out.astype(self.dtype or inputs.dtype)

    @abc.abstractmethod
    def normalise(
        self,
        x: jax.Array,
        real: jax.Array,
        documents: packed.Packed | None,
        training: bool,
    ) -> jax.Array:
        """The output for `[B, T, D]`; ``real`` is boolean `[B, T, 1]`."""


class InstanceNorm(PositionNorm):
    """Mean and variance of each column are those over the real positions of a sequence.

    Layer normalisation, which looks at one position at a time, gives every position the
    same size. In an image that is mostly background, such as Pathfinder's, the
    background is then as large as the figure; here it is close to zero. A convolutional
    network learns Pathfinder's short paths in 300 steps with this norm, and is still at
    chance with layer normalisation (docs/tasks.md). S4 and its successors normalise
    over positions too, but of the whole batch (BatchNorm). This form has no running
    statistics, and an example's result does not depend on the others in its batch.

    Padding does not count and becomes ``bias``, and packed documents are normalised one
    by one. Each output depends on all positions, so it is not for causal models. The
    mean of the output over its sequence is ``bias``, whatever the input, so no mean may
    follow.

    Source: Ulyanov et al. 2016, arXiv:1607.08022.

    Args:
      features, epsilon, dtype: see `PositionNorm`.
    """

    def normalise(
        self,
        x: jax.Array,
        real: jax.Array,
        documents: packed.Packed | None,
        training: bool,
    ) -> jax.Array:
        """See the base class."""

        def total(x: jax.Array) -> jax.Array:
            if documents is None:
                return x.sum(1, keepdims=True)
            return documents.over(jax.ops.segment_sum, x, 1)

        def mean(x: jax.Array) -> jax.Array:
            """The mean of each position's document; 0 if it has no real one."""
            count = total(real.astype(x.dtype))
            return total(jnp.where(real, x, 0)) / jnp.maximum(count, 1)

        centred = jnp.where(real, x - mean(x), 0)
        inverse = jax.lax.rsqrt(mean(jnp.square(centred)) + self.epsilon)
        scale, bias = (
            a[...].astype(x.dtype)[None, None] for a in (self.scale, self.bias)
        )
        return centred * inverse * scale + bias


class RunningMean(Buffer):
    """A buffer that each call in training moves towards the mean of its batch."""


class BatchNorm(PositionNorm):
    """Mean and variance of each column are those over the real positions of a batch.

    In training, the batch is the whole one, on all devices, and ``running = momentum *
    running + (1 - momentum) * batch``, with the unbiased variance. Otherwise mean and
    variance are the running ones, so that an example's result does not depend on the
    others. A batch of fewer than two real positions leaves them as they are.

    The running statistics change in a call, as those of ``nnx.BatchNorm`` do: under
    ``nnx.jit`` and ``nnx.grad``, or where the model is made inside a function of
    ``jax.jit`` and its new state is returned. The trainer does the latter. In training
    an output depends on all positions, so the norm is not for causal models.

    Source: Ioffe & Szegedy 2015, arXiv:1502.03167; momentum and epsilon are PyTorch's.
    Deviation: padding does not count; in PyTorch code, which has no mask, it does.

    Args:
      features, epsilon, dtype: see `PositionNorm`.
      momentum: how much of the running statistics a call in training keeps.
    """

    def __init__(self, features: int, *, momentum: float = 0.9, **more: Any):
        super().__init__(features, **more)
        self.mean = RunningMean(jnp.zeros((features,), jnp.float32))
        self.var = RunningMean(jnp.ones((features,), jnp.float32))
        self.momentum = momentum

    def normalise(
        self,
        x: jax.Array,
        real: jax.Array,
        documents: packed.Packed | None,
        training: bool,
    ) -> jax.Array:
        """See the base class."""
        mean, var = (a[...].astype(x.dtype) for a in (self.mean, self.var))
        if training:
            x = jnp.where(real, x, 0)
            count = real.astype(x.dtype).sum()

            def average(x: jax.Array) -> jax.Array:
                """The average over all real positions; 0 if there are none."""
                return jnp.where(real, x, 0).sum((0, 1)) / jnp.maximum(count, 1)

            mean = average(x)
            var = average(jnp.square(x - at_positions(mean, x)))
            self._follow(self.mean, mean, count > 1)
            self._follow(self.var, var * count / jnp.maximum(count - 1, 1), count > 1)
        inverse = jax.lax.rsqrt(var + self.epsilon) * self.scale[...].astype(x.dtype)
        out = (x - at_positions(mean, x)) * at_positions(inverse, x)
        return out + at_positions(self.bias[...], x)

    def _follow(self, running: RunningMean, new: jax.Array, known: jax.Array) -> None:
        """Moves a running mean, if the batch has a value."""
        old = running[...]
        new = jax.lax.stop_gradient(new).astype(old.dtype)
        moved = self.momentum * old + (1 - self.momentum) * new
        running[...] = jnp.where(known, moved, old)
