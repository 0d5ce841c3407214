"""Gates as layers: their shapes, and biases that spread the time constants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.attention.registry import Gate
from lra_jax.models.gates import GateLayer, spread


@pytest.mark.parametrize("count", [1, 6, 7])
def test_biases_spread_the_time_constants(count: int) -> None:
    """A state keeps exp(-1 / c) of itself: c from 2 to 2,000, twice."""
    bias = np.asarray(spread(jax.random.key(0), (count,)), np.float64)
    constants = 1 / np.log1p(np.exp(-bias))
    expected = 2 * 1000 ** (2 * np.arange(count) / count % 1)
    np.testing.assert_allclose(constants, expected, rtol=1e-4)


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize(("width", "shape"), [("one", (3,)), ("head", (3, 4))])
def test_a_gate_is_an_activation_of_a_projection(width, shape, rank) -> None:
    gate = Gate("gate", width=width, activation="sigmoid", rank=rank, bias=0.5)
    layer = GateLayer(gate, 5, 3, {"head": 4}, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 7, 5))
    inner = x if layer.inner is None else layer.inner(x)
    assert inner.shape[-1] == (rank or 5)
    expected = jax.nn.sigmoid(layer.outer(inner)).reshape(2, 7, *shape)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-6)
    np.testing.assert_allclose(layer(jnp.zeros_like(x)), jax.nn.sigmoid(0.5), 1e-6)
