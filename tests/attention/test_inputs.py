"""The dtype of sums."""

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs


def test_sums_of_numpys_float64_are_what_jax_makes_of_it() -> None:
    """Else the lowest float64 number stands for a float32 one, as minus infinity."""
    arrays = np.zeros(2), np.zeros(2, "float16")
    assert inputs.accumulation_dtype(*arrays) == jnp.float32
    with jax.enable_x64(True):
        assert inputs.accumulation_dtype(*arrays) == jnp.float64
