"""Gradients of half-precision arrays that are used many times are summed in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention


def _drawn(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def _error(got: jax.Array, expected: jax.Array) -> float:
    assert got.dtype == jnp.bfloat16
    wide, exact = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(wide - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("name", ["softmax", "linear", "cosformer", "fnet"])
def test_a_value_that_many_heads_share(name: str) -> None:
    """The gradient of 64 copies; rounding alone is 2^-9."""
    mechanism = attention.resolve(name)
    query, key, value = (_drawn(n, 1, 16, n, 2) for n in (64, 1, 1))

    def total(value: jax.Array) -> jax.Array:
        out = mechanism.attention(query, key, value)
        return out.astype(jnp.float32).sum()

    got = jax.grad(total)(value)
    assert _error(got, jax.grad(total)(value.astype(jnp.float32))) < 2**-8


def test_parameters_of_many_documents() -> None:
    """Each of 600 documents of one position adds 4; in bfloat16 it ends at 1024."""
    count = 600
    value = jnp.ones((1, count, 1, 4), jnp.bfloat16)
    query = jnp.zeros_like(value)
    projection: Any = jnp.ones((1, count), jnp.bfloat16)
    ids = jnp.arange(1, count + 1, dtype=jnp.int32)[None]

    def total(projection: jax.Array) -> jax.Array:
        out = attention.linformer_attention(
            *(query, query, value, projection, projection), segment_ids=ids
        )
        return out.astype(jnp.float32).sum()

    assert float(jax.grad(total)(projection)[0, 0]) == 4 * count


def test_a_memory_that_a_batch_shares() -> None:
    query, key, value, memory = (abs(_drawn(n, 1, 2, 1, 2)) for n in range(4))
    query, key, value = (
        jnp.broadcast_to(x, (3_000, 2, 1, 2)) for x in (query, key, value)
    )

    def total(memory: jax.Array) -> jax.Array:
        out = attention.luna_attention(query, key, value, memory)
        return out.astype(jnp.float32)[..., 0].sum()

    got = jax.grad(total)(memory)
    assert _error(got, jax.grad(total)(memory.astype(jnp.float32))) < 2**-8
