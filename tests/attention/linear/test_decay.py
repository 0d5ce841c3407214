"""Retention and lightning attention: what they have besides the common properties."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.linear import decay

from ..mechanisms import SMALL, assert_close, assert_rejects, fast_jit, inputs

NAMES = ("retention", "lightning")
MASK = np.array([[0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 0, 0], [0] * 7], bool)


def test_published_slopes() -> None:
    np.testing.assert_allclose(
        attention.lightning_slopes(8), [2.0**-n for n in range(1, 9)]
    )
    np.testing.assert_array_equal(attention.lightning_slopes(1), [2**-8])
    # Those of four heads, then the first and third of eight.
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    np.testing.assert_allclose(attention.lightning_slopes(6), expected)
    gammas = np.exp(-attention.retention_slopes(3))
    np.testing.assert_allclose(gammas, [31 / 32, 63 / 64, 127 / 128], rtol=1e-15)


@pytest.mark.parametrize("is_causal", [False, True])
def test_slopes_near_zero_have_a_derivative(is_causal: bool) -> None:
    """That of the same sums in float64, and not only above zero."""
    arrays = inputs(4, heads=3)

    @functools.partial(jax.jit, static_argnums=1)
    def total(slopes: jax.Array, dtype: str = "float64") -> jax.Array:
        cast = (x.astype(dtype) for x in arrays)
        options = {"is_causal": is_causal, "norm": None, "chunking": SMALL}
        out = attention.retention_attention(*cast, slopes=slopes, **options)
        return (out * jnp.arange(out.size, dtype=dtype).reshape(out.shape)).sum()

    slope = jax.jit(jax.grad(total), static_argnums=1)
    with jax.enable_x64(True):
        for height in (0.0, 1e-7, 1e-4, 1e-2):
            slopes = jnp.full(3, height)
            step = 1e-6
            ends = (
                [total(slopes.at[head].add(x)) for head in range(3)]
                for x in (2 * step, step, 0.0)
            )
            two, one, none = (jnp.stack(end) for end in ends)
            expected = (4 * one - two - 3 * none) / (2 * step)
            np.testing.assert_allclose(slope(slopes), expected, rtol=1e-5)
            got = slope(slopes.astype("float32"), "float32")
            np.testing.assert_allclose(got, expected, rtol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_slopes(name: str) -> None:
    arrays = inputs(8, heads=3, query_length=9, length=5)
    function = getattr(attention, f"{name}_attention")
    slopes = np.array([0.0, 0.3, 40.0], "float32")

    @fast_jit
    def both(slopes, arrays):
        def loss(slopes):
            return jnp.sin(function(*arrays, MASK[:2, :5], slopes=slopes)).sum()

        return jax.value_and_grad(loss)(slopes)

    gradient = np.asarray(both(slopes, arrays)[1])
    assert np.isfinite(gradient).all()
    with jax.enable_x64(True):
        arrays = [x.astype("float64") for x in arrays]
        ahead, behind = (
            float(both(np.asarray([0.0, 0.3 + step, 40.0]), arrays)[0])
            for step in (1e-5, -1e-5)
        )
    assert_close(gradient[1], (ahead - behind) / 2e-5, 1e-3)


def test_the_floor_of_the_spread_is_for_rows_without_a_neighbour() -> None:
    slopes = jnp.asarray([0.0, 1.0, 120.0])
    first, last = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), 3, jnp.int32)
    total = np.asarray(decay.spread(slopes, 60, first, last))[0]
    distance = np.abs(np.arange(60)[:, None] - np.arange(4))
    for row, slope in zip(total, (0, 1, 120), strict=True):
        expected = np.exp(-slope * distance.astype(float)).sum(1)
        np.testing.assert_allclose(row, np.maximum(expected, 1e-20), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("slopes", "parts"),
    [
        (np.ones(3), ("slopes: expected one for each head", "(2,)", "(3,)")),
        (0.1, ("slopes: expected one for each head", "()")),
        ([0.1, -0.1], ("slopes: expected none below zero", "-0.1")),
        ([0.1, np.nan], ("slopes: expected none below zero", "nan")),
        ([0.1, np.inf], ("slopes: expected finite numbers", "inf")),
    ],
)
def test_slopes_that_do_not_fit(name: str, slopes: Any, parts: tuple) -> None:
    q, k, v = inputs(9)
    for part in ("attention", "prefill", "weights"):
        call = getattr(attention, f"{name}_{part}")
        arrays = (q, k) if part == "weights" else (q, k, v)
        assert_rejects(lambda c=call, a=arrays: c(*a, slopes=slopes), *parts)
