"""Sums of the logarithms of decays within a chunk, and their exact differences.

A chunk weights a pair of positions by ``exp(F_i - F_j)``, where F sums the logarithms
up to a position. After strong decays F is large, thousands in a chunk that forgets
everything several times, and a float32 of that size has only a few decimals left for
the weak decays that follow. So F is kept in two parts: the logarithms rounded to
multiples of 1 / 64, whose sums and differences are exact, and the remainders, whose
sums are small.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Sums of 64 logarithms, none below that of the smallest normal number, have at most 19
# binary digits in units of 1 / 64; a float32 holds 24.
_UNIT = 1 / 64


def bound(log_decay: jax.Array) -> jax.Array:
    """The logarithms of decays, none below that of the smallest normal number.

    Next to a much lower one, the later terms of a sum would be rounded away; -inf would
    make differences of sums NaN.
    """
    return jnp.maximum(log_decay, math.log(jnp.finfo(log_decay.dtype).tiny))


class Fade(NamedTuple):
    """Sums of logarithms, two arrays of one shape, whose sum is the `total`."""

    coarse: jax.Array
    fine: jax.Array

    @property
    def total(self) -> jax.Array:
        """The sums in one array."""
        return self.coarse + self.fine

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "Fade":
        """The same function of both parts, such as an index."""
        return Fade(function(self.coarse), function(self.fine))

    def since(self, other: "Fade") -> jax.Array:
        """``self - other``, without the error of either's size."""
        return (self.coarse - other.coarse) + (self.fine - other.fine)


def accumulate(log_decay: jax.Array, so_far: Callable[[jax.Array], jax.Array]) -> Fade:
    """The sums of logarithms from `bound`, by sums along a chunk, ``so_far``."""
    coarse = jnp.round(log_decay / _UNIT) * _UNIT
    return Fade(coarse, log_decay - coarse).map(so_far)
