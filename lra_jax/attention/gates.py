"""Activations of a layer's projections, by the names used in the registry."""

from collections.abc import Callable

import jax

from lra_jax.attention import inputs

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    # log(sigmoid(x)^(1/16)), the decay of gated linear attention.
    "slow_decay": lambda x: jax.nn.log_sigmoid(x) / 16,
    # Radians: a state that rotates little at first keeps its past.
    "small_angle": lambda x: 0.3 * x,
    # -log(1 + e^x), the logarithm of a decay.
    "softplus_decay": lambda x: -jax.nn.softplus(x),
}


def activate(name: str, x: jax.Array) -> jax.Array:
    """Applies an activation of the table in float32 or wider; keeps the dtype."""
    if name == "identity":
        return x
    wide = inputs.accumulation_dtype(x)
    return ACTIVATIONS[name](x.astype(wide)).astype(x.dtype)
