"""The best softmax attention of a machine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention import softmax_attention
from lra_jax.benchmarking.fused import best_implementation, fused_softmax_attention


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_are_softmax_attention(masked: bool, is_causal: bool) -> None:
    """Output and gradients."""
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, cotangent = (jax.random.normal(k, (2, 10, 2, 4)) for k in keys)
    mask = jnp.arange(10)[None] < jnp.array([[10], [7]]) if masked else None
    if masked:
        key = key.at[1, 7:].set(jnp.nan)

    def both(function, **options):
        def call(*arrays):
            return function(*arrays, mask, is_causal, **options)

        out, pullback = jax.vjp(call, query, key, value)
        return out, pullback(cotangent)

    expected = both(softmax_attention, implementation="dense")
    got = both(fused_softmax_attention)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_the_best_softmax_depends_on_the_machine() -> None:
    assert best_implementation("bfloat16", "gpu") == "cudnn"
    assert best_implementation("float32", "gpu") == "blocks"
    assert best_implementation("float32", "tpu") == "blocks"
    assert best_implementation("float32", "cpu") == "blocks"
