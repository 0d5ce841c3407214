"""Dense, LayerNorm and position tables against the library's; dropout's statistics."""

import functools
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from lra_jax.models.layers import (
    Dense,
    Dropout,
    HeadNorm,
    LayerNorm,
    random_uint32,
    sinusoidal_positions,
)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def drop(x, key: int = 0, rate: float = 0.25) -> np.ndarray:
    return np.asarray(Dropout(rate)(x, nnx.Rngs(dropout=key)))


def assert_same_layer(mine: nnx.Module, theirs: nnx.Module, x: np.ndarray) -> None:
    """Equal outputs and gradients, of parameters and inputs, for equal parameters."""
    graph, params = nnx.split(theirs, nnx.Param)

    @functools.partial(helpers.quick_jit, static_argnums=0)
    def gradients(graph, params, x):
        def loss(params, x):
            out = nnx.merge(graph, params)(x)
            return (out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum()

        return jax.value_and_grad(loss, (0, 1))(params, x)

    expected = gradients(graph, params, x)
    got = gradients(nnx.split(mine, nnx.Param)[0], params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 5, 8), (4, 8), (2, 3, 2, 8)])
def test_dense_is_linear(shape):
    layers = (kind(8, 6, rngs=nnx.Rngs(0)) for kind in (Dense, nnx.Linear))
    assert_same_layer(*layers, normal(*shape))


@pytest.mark.parametrize("shape", [(3, 5, 8), (4, 8)])
def test_layer_norm(shape):
    mine = LayerNorm(8)
    theirs: Any = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    theirs.scale[...], theirs.bias[...] = normal(8, seed=2), normal(8, seed=3)
    assert_same_layer(mine, theirs, 3 * normal(*shape) + 1)


def test_layer_norm_in_half_precision():
    layer = LayerNorm(8, dtype=jnp.bfloat16)
    out = layer(jnp.asarray(normal(4, 8), jnp.bfloat16))
    assert out.dtype == jnp.bfloat16
    assert layer.scale[...].dtype == jnp.float32
    np.testing.assert_allclose(out.astype(jnp.float32).std(-1), 1, rtol=0.02)


def test_norms_in_double_precision() -> None:
    """Below float32's rounding of 1, differences stay what they are."""
    with jax.enable_x64(True):
        x = 1 + 1e-9 * jnp.asarray(normal(3, 8), jnp.float64)
        out = LayerNorm(8, epsilon=1e-30)(x)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out.std(-1), 1, rtol=1e-5)
        heads = HeadNorm(2, 4, epsilon=0.0)(x.reshape(3, 1, 2, 4))
        square = np.square(x.reshape(3, 1, 2, 4)).mean(-1, keepdims=True)
        expected_heads = x.reshape(3, 1, 2, 4) / np.sqrt(square)
        np.testing.assert_allclose(heads, expected_heads, rtol=1e-14)


def test_sinusoidal_positions():
    table = np.asarray(sinusoidal_positions(50, 8, jnp.float32))
    steps = np.arange(50)
    np.testing.assert_allclose(table[:, 0], np.sin(steps), atol=1e-5)
    np.testing.assert_allclose(table[:, 4], np.cos(steps), atol=1e-5)
    np.testing.assert_allclose(table[:, 7], np.cos(steps / 1e4), atol=1e-5)
    with pytest.raises(ValueError, match="even"):
        sinusoidal_positions(50, 7, jnp.float32)


def test_dropout_rate_and_scale():
    out = drop(np.ones((200, 500), np.float32), rate=0.3)
    np.testing.assert_allclose(np.unique(out), [0, 1 / 0.7], rtol=1e-6)
    # Five standard deviations of 100,000 draws.
    assert abs((out == 0).mean() - 0.3) < 5 * np.sqrt(0.21 / 1e5)
    assert drop(jnp.ones((4, 4), jnp.bfloat16)).dtype == jnp.bfloat16


def test_dropout_follows_its_key():
    ones = np.ones((100, 1000), np.float32)
    first, again, other = drop(ones), drop(ones), drop(ones, key=1)
    np.testing.assert_array_equal(first, again)
    # Independent masks of rate p agree at p^2 + (1 - p)^2 of the places.
    agree = ((first == 0) == (other == 0)).mean()
    assert abs(agree - 0.625) < 5 * np.sqrt(0.24 / 1e5)


def test_keys_of_neighbouring_steps_give_independent_masks():
    key = jax.random.key(0)
    keys = jax.vmap(lambda step: jax.random.fold_in(key, step))(jnp.arange(64))
    ones = jnp.ones(2000)
    masks = jax.vmap(lambda k: Dropout(0.5)(ones, nnx.Rngs(dropout=k)) == 0)(keys)
    correlations = np.asarray(np.corrcoef(np.asarray(masks, np.float64)))
    off = correlations[~np.eye(64, dtype=bool)]
    assert np.abs(off).max() < 5.5 / np.sqrt(2000)
    assert abs(off.std() * np.sqrt(2000) - 1) < 0.1


def test_padding_does_not_change_the_mask_of_what_is_before_it():
    for shape in ((3, 7), (3, 7, 4), (3, 7, 2, 4)):
        padded = (shape[0], shape[1] + 5, *shape[2:])
        key = jax.random.key(2)
        one, other = random_uint32(key, shape), random_uint32(key, padded)
        np.testing.assert_array_equal(one, other[:, : shape[1]])
        assert len(np.unique(one)) == one.size


@pytest.mark.parametrize("lag", [1, 2, 64, 500, 1000, 65_536])
def test_dropout_is_independent_over_positions(lag):
    zero = drop(np.ones((512, 500), np.float32), rate=0.5).ravel() == 0
    agree = (zero[lag:] == zero[:-lag]).mean()
    assert abs(agree - 0.5) < 5 * np.sqrt(0.25 / zero.size)


def test_no_dropout_without_keys_or_rate():
    x = normal(4, 8)
    assert Dropout(0.5)(x) is x
    assert Dropout(0.0)(x, nnx.Rngs(dropout=0)) is x
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"\[0, 1\)"):
            Dropout(rate)


def test_dropout_does_not_depend_on_the_layout():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(8, 6, 4)
    jitted = helpers.quick_jit(
        lambda x: Dropout(0.5)(x, nnx.Rngs(dropout=jax.random.key(3)))
    )
    whole = jitted(x)
    for spec in (PartitionSpec("data"), PartitionSpec(None, "data")):
        sharded = jitted(jax.device_put(x, NamedSharding(mesh, spec)))
        np.testing.assert_array_equal(whole, sharded)
