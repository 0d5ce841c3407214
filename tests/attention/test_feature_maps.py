"""Feature maps, norms and softmax of very small, very large and equal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention import feature_maps

from .mechanisms import fast_jit


def test_feature_maps_may_be_functions() -> None:
    assert feature_maps.feature_map(np.tanh) is np.tanh


def test_gradients_at_the_bounds_pass() -> None:
    # Where torch's clamp and relu are at their bound, so that trained models agree.
    def slope(function, at: float) -> float:
        return float(jax.grad(function)(jnp.float32(at)))

    assert slope(lambda x: feature_maps.clamp(x, 1.0), 1.0) == 1
    assert slope(lambda x: feature_maps.clamp(x, 1.0), -1.0) == 1
    assert slope(lambda x: feature_maps.clamp(x, 1.0), 1.5) == 0
    assert slope(lambda x: feature_maps.at_least(x, 0.5), 0.5) == 1
    assert slope(lambda x: feature_maps.at_least(x, 0.5), 0.4) == 0
    assert slope(feature_maps.feature_map("relu"), 0.0) == 0


def test_the_largest_logit_keeps_its_gradient() -> None:
    logits = jnp.float32([1e7, 1e7 - 8, 0])
    value = jnp.float32([3, 1, 5])
    shares = np.array([1, np.exp(-8), 0]) / (1 + np.exp(-8))
    slope = jax.grad(lambda x: feature_maps.softmax(x, 0) @ value)(logits)
    np.testing.assert_allclose(slope, shares * (value - shares @ value), 1e-4)
    matrix = feature_maps.below(logits[None, :], logits[:2, None])
    assert matrix[0, 0] == 0 and matrix.shape == (2, 3)
    slope = jax.grad(lambda x: feature_maps.below(x[None], logits[:2, None]).sum())
    np.testing.assert_array_equal(slope(logits), [2, 2, 2])


def test_elu_plus_one_keeps_the_digits_of_small_features() -> None:
    """elu(x) + 1 is exp(x) below 0, but elu itself rounds to -1."""
    x = np.float32([-80, -30, -16, -5, -1e-3, 0, 2, 1e30])
    expected = np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    value, pull = jax.vjp(feature_maps.feature_map("elu"), x)
    np.testing.assert_allclose(value, expected, 1e-6)
    np.testing.assert_allclose(pull(jnp.ones_like(x))[0], np.minimum(expected, 1), 1e-6)


@pytest.mark.parametrize("size", [1e-37, 1e-25, 1e-20, 1e-10, 1.0, 1e20, 1e30])
def test_a_vector_of_any_size_has_a_unit_vector(size: float) -> None:
    """Compiled, as XLA rearranges divisions."""
    direction = np.float32([[1, -2, 3, 4]]) / np.sqrt(np.float32(30))
    value, pull = fast_jit(lambda x: jax.vjp(feature_maps.unit, x))(direction * size)
    np.testing.assert_allclose(value, direction, 1e-5)
    slope = pull(jnp.float32([[1, 0, 0, 0]]))[0] * size
    expected = np.float32([[1, 0, 0, 0]]) - direction * direction[0, 0]
    np.testing.assert_allclose(slope, expected, 1e-4, 1e-6)


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_derivatives_of_norms(norm: str, eps: float) -> None:
    """The first is written out; forward, and of second order, against the formula."""

    def formula(x: jax.Array) -> jax.Array:
        centre = x.mean(1, keepdims=True) if norm == "layer" else 0.0
        squares = jnp.square(x - centre).mean(1, keepdims=True)
        return jnp.sin((x - centre) / jnp.sqrt(squares + eps))

    def ours(x: jax.Array) -> jax.Array:
        return jnp.sin(feature_maps.normalise(x, norm, (1,), eps))

    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)))
        for derivative in (jax.jacrev, jax.jacfwd, jax.hessian):
            got, expected = (fast_jit(derivative(f))(x) for f in (ours, formula))
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)
