"""Activations of gates: their formulas, in float32 or wider."""

import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention.gates import ACTIVATIONS, activate

X = np.linspace(-9, 9, 19)
FORMULAS = {
    "log_sigmoid": -np.log1p(np.exp(-X)),
    "silu": X / (1 + np.exp(-X)),
    "sigmoid": 1 / (1 + np.exp(-X)),
    "slow_decay": -np.log1p(np.exp(-X)) / 16,
    "small_angle": 0.3 * X,
    "softplus_decay": -np.log1p(np.exp(X)),
    "identity": X,
}


def test_every_activation_has_a_formula() -> None:
    assert FORMULAS.keys() == {*ACTIVATIONS, "identity"}


@pytest.mark.parametrize("name", FORMULAS)
def test_activations(name: str) -> None:
    actual = activate(name, jnp.asarray(X, jnp.float32))
    np.testing.assert_allclose(actual, FORMULAS[name], rtol=1e-5)
    half = activate(name, jnp.asarray(X, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    # Rounded once, at the end.
    np.testing.assert_allclose(half.astype("float32"), FORMULAS[name], rtol=2**-8)
