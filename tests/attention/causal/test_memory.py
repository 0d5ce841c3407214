"""Memory of a training step besides its arrays, as the compiled program states it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from lra_jax import attention


@pytest.mark.parametrize("name", ["linear", "cosformer", "flow", "softmax"])
def test_long_sequences_need_less_than_they_hold(name: str) -> None:
    """64K tokens, 8 heads of 64; the linear forms keep nothing of such a length."""
    x = jax.ShapeDtypeStruct((1, 1 << 16, 8, 64), jnp.float32)
    call = functools.partial(getattr(attention, f"{name}_attention"), is_causal=True)

    def both(query, key, value, cotangent):
        out, pullback = jax.vjp(call, query, key, value)
        return out, pullback(cotangent)

    memory: Any = jax.jit(both).lower(x, x, x, x).compile().memory_analysis()
    one = x.size * 4
    # Query, key, value, output, and as many gradients but the output's.
    assert memory.output_size_in_bytes == pytest.approx(4 * one, rel=1e-3)
    # Softmax holds copies of all seven in blocks.
    limit = {"softmax": 7.1, "cosformer": 2}.get(name, 1)
    assert memory.temp_size_in_bytes < limit * one
