"""Padding is exact, and gradients are right and finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention import feature_maps

from ..mechanisms import (
    NAMES,
    QUERY_MASKED,
    assert_close,
    fast_jit,
    inputs,
    jitted,
    queries,
    run,
)

MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7], bool)


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_equals_each_sample_alone(name: str) -> None:
    q, k, v = inputs(10, query_length=9, length=9)
    lengths = (6, 9)
    mask = np.arange(9)[None] < np.array(lengths)[:, None]
    keywords = {"query_mask": mask} if name in QUERY_MASKED else {}
    together = np.asarray(jitted(name)(q, k, v, mask, **keywords))
    for row, length in enumerate(lengths):
        alone = jitted(name)(*(x[row : row + 1, :length] for x in (q, k, v)))
        assert_close(together[row : row + 1, :length], alone, 2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_what_padding_holds_does_not_matter(name: str) -> None:
    q, k, v = inputs(13, batch=3)
    keywords = {}
    if name in QUERY_MASKED:
        keywords = {"query_mask": MASK}

    @fast_jit
    def both(*arrays):
        out, pullback = jax.vjp(lambda *a: run(name)(*a, MASK, **keywords), *arrays)
        return out, pullback(jnp.ones_like(out))

    def spoilt(x: np.ndarray, garbage: float) -> np.ndarray:
        return np.where(MASK[:, :, None, None], x, np.float32(garbage))

    clean = both(q, k, v)
    for garbage in (1e6, np.nan, np.inf):
        query = spoilt(q, garbage) if keywords else q
        dirty = both(query, spoilt(k, garbage), spoilt(v, garbage))
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("name", NAMES)
def test_companions_in_a_batch_do_not_matter(name: str) -> None:
    q, k, v = inputs(14, batch=3)
    call = jitted(name)
    assert_close(call(q, k, v)[:1], call(q[:1], k[:1], v[:1]), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_finite_differences(name: str) -> None:
    sizes = {"batch": 1, "length": 5, "value_dim": 3}
    sizes["query_length"] = queries(name, 4, 5)
    mask = np.array([[1, 1, 0, 1, 1]], bool)
    # Flow's clip bends the function where a step of differences may cross it.
    keywords = {"clip": None} if name == "flow" else {}

    @fast_jit
    def slope(arrays):
        def loss(arrays):
            return jnp.sin(run(name)(*arrays, mask, **keywords)).sum()

        return jax.value_and_grad(loss)(arrays)

    with jax.enable_x64(True):
        arrays, way = (
            [x.astype("float64") for x in inputs(seed, **sizes)] for seed in (23, 24)
        )
        step = 1e-5
        ahead, behind = (
            slope([x + sign * step * d for x, d in zip(arrays, way, strict=True)])[0]
            for sign in (1, -1)
        )
        gradients = slope(arrays)[1]
        wanted = sum((g * d).sum() for g, d in zip(gradients, way, strict=True))
        assert abs((ahead - behind) / (2 * step) - wanted) < 1e-7 * abs(wanted) + 1e-8


@pytest.mark.parametrize("name", NAMES)
def test_gradients_stay_finite(name: str) -> None:
    q, k, v = inputs(24, batch=3)

    @fast_jit
    def both(*arrays):
        out, pullback = jax.vjp(lambda *a: run(name)(*a, MASK), *arrays)
        return out, pullback(jnp.ones_like(out))

    changes = {"dead": lambda x: -np.abs(x), "large": lambda x: 100 * x}
    for kind, change in (changes | {"zero": np.zeros_like}).items():
        out, gradients = both(change(q), change(k), v)
        for array in (out, *gradients):
            assert np.isfinite(np.asarray(array)).all(), kind
            if name == "cosformer" and kind != "large":
                assert not np.asarray(array).any(), "dead rows are exactly zero"


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
