"""The MLP of a block."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from lra_jax.models.config import ModelConfig
from lra_jax.models.layers import Dense, Dropout
from lra_jax.models.product_keys import ProductKeyMemory

_ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
}


class Mlp(nnx.Module):
    """``W_2 dropout(gelu(W_1 x + b_1)) + b_2``, at each position separately; or relu.

    Gated, ``W_2 dropout(silu(W_1 x + b_1) * (W_3 x + b_3)) + b_2``: the SwiGLU of
    Shazeer 2020 (arXiv:2002.05202), with biases.

    The first form has the activation "gelu" (by tanh), "gelu_exact" or "relu"; the
    second has half as many parameters again. Matrices begin as ``kernel_init`` says, by
    default Glorot uniform, and biases at zero.
    """

    def __init__(
        self,
        features: int,
        hidden: int,
        *,
        gated: bool = False,
        activation: str = "gelu",
        dropout: float = 0.0,
        kernel_init: Any = None,
        dtype: Any = None,
        rngs: nnx.Rngs,
    ):
        kernel_init = kernel_init or nnx.initializers.xavier_uniform()
        init: Any = {"kernel_init": kernel_init, "dtype": dtype, "rngs": rngs}
        self.inner = Dense(features, hidden, **init)
        self.gate = Dense(features, hidden, **init) if gated else None
        self.outer = Dense(hidden, features, **init)
        self.activation = activation
        self.dropout = Dropout(dropout)

    def __call__(
        self,
        x: jax.Array,
        *,
        mask: jax.Array | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """`[..., D]` to `[..., D]`; ``mask`` is ignored; ``rngs`` enables dropout."""
        hidden = self.inner(x)
        if self.gate is None:
            hidden = _ACTIVATIONS[self.activation](hidden)
        else:
            hidden = jax.nn.silu(hidden) * self.gate(x)
        return self.outer(self.dropout(hidden, rngs))


def _make_dense(config: ModelConfig, rngs: nnx.Rngs, **_: Any) -> Mlp:
    return Mlp(
        config.embed_dim,
        config.mlp_dim,
        gated=config.mlp == "glu",
        activation=config.activation,
        **_common_arguments(config),
        rngs=rngs,
    )


def _make_memory(
    config: ModelConfig, rngs: nnx.Rngs, **options: Any
) -> ProductKeyMemory:
    return ProductKeyMemory(
        config.embed_dim, options, **_common_arguments(config), rngs=rngs
    )


def _common_arguments(config: ModelConfig) -> dict[str, Any]:
    rate = config.dropout if config.mlp_dropout is None else config.mlp_dropout
    return {"dropout": rate, "dtype": config.dtype}


MLPS: dict[str, Callable[..., Any]] = {
    "dense": _make_dense,
    "glu": _make_dense,
    "product_key": _make_memory,
    "none": lambda config, rngs, **_: None,
}
"""By name; see `lra_jax.models.parts`. Only the memory has options."""
