"""The gates of a mechanism: additional projections of a layer's input."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention import gates, registry
from lra_jax.models.layers import Dense


class GateLayer(nnx.Module):
    """``activation(W x + b)`` for each head; with a low rank, W is two matrices.

    There is a bias whether or not the other projections have one: without it, a gate is
    half open at zero, in every head alike. Weights begin Glorot uniform, the bias as
    the gate specifies. ``widths`` are the columns per head, by the gate's ``width``.
    """

    def __init__(
        self,
        gate: registry.Gate,
        in_features: int,
        num_heads: int,
        widths: Mapping[str, int],
        *,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        self.shape = (num_heads,)
        self.shape += () if gate.width == "one" else (widths[gate.width],)
        self.activation = gate.activation
        init: dict[str, Any] = {"kernel_init": nnx.initializers.xavier_uniform()}
        init |= {"dtype": dtype, "rngs": rngs}
        rank = gate.rank
        # One assignment each: an attribute first set to None cannot become a layer.
        self.inner = (
            None if rank is None else Dense(in_features, rank, use_bias=False, **init)
        )
        in_features = in_features if rank is None else rank
        width = num_heads * widths.get(gate.width, 1)
        bias: Any = spread
        if not isinstance(gate.bias, str):
            bias = nnx.initializers.constant(gate.bias)
        self.outer = Dense(in_features, width, bias_init=bias, **init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B, T, D]` to `[B, T, N, W]`, or `[B, T, N]` for a gate of one column."""
        x = x if self.inner is None else self.inner(x)
        x = gates.activate(self.activation, self.outer(x))
        return x.reshape(*x.shape[:-1], *self.shape)


def spread(key: jax.Array, shape: tuple[int], dtype: Any = jnp.float32) -> jax.Array:
    """Biases b with ``sigmoid(b) = exp(-1 / c)``, for time constants c from 2 to 2,000.

    ``c_i = 2 * 1000^((2 i / n) mod 1)``: each half of the n columns covers the range.
    """
    del key
    constants = 2 * 1000 ** (2 * np.arange(shape[0]) / shape[0] % 1)
    return jnp.asarray(-np.log(np.expm1(1 / constants)), dtype)
