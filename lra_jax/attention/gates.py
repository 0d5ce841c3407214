"""Activations of a layer's projections, by the names used in the registry."""

from collections.abc import Callable

import jax

from lra_jax.attention import inputs


def _slow_decay(x: jax.Array) -> jax.Array:
    """``log(sigmoid(x)^(1/16))``, the decay of gated linear attention."""
    return jax.nn.log_sigmoid(x) / 16


def _softplus_decay(x: jax.Array) -> jax.Array:
    """``-log(1 + e^x)``, the logarithm of a decay."""
    return -jax.nn.softplus(x)


def _small_angle(x: jax.Array) -> jax.Array:
    """``0.3 x`` radians: a state that rotates little at first keeps its past."""
    return 0.3 * x


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "log_sigmoid": jax.nn.log_sigmoid,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "slow_decay": _slow_decay,
    "small_angle": _small_angle,
    "softplus_decay": _softplus_decay,
}


def activate(name: str, x: jax.Array) -> jax.Array:
    """Applies an activation of the table in float32 or wider; keeps the dtype."""
    if name == "identity":
        return x
    wide = inputs.accumulation_dtype(x)
    return ACTIVATIONS[name](x.astype(wide)).astype(x.dtype)
