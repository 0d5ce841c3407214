"""Padding is exact, and gradients are right and finite."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..mechanisms import (
    ALL_FORMS,
    FORMS,
    NAMES,
    ROWS,
    assert_close,
    assert_extremes,
    fast_jit,
    formula,
    gates,
    gradients,
    inputs,
    jitted,
    masks,
    row_inputs,
    run,
    takes,
)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_padded_batch_equals_each_sample_alone(name: str, form: str) -> None:
    """On the right, and causal forms on the left; the formulas have any padding."""
    arrays, upstream = row_inputs(10)
    out, _ = gradients(name, form)(*arrays, ROWS, upstream)
    alone = jitted(name, form)(*(np.stack([x[0, :11], x[2, 5:]]) for x in arrays))
    assert_close(out[0, :11], alone[0], 2e-6)
    if form == "causal":
        assert_close(out[2, 5:], alone[1], 2e-6)


@pytest.mark.parametrize(("name", "form"), ALL_FORMS)
def test_what_padding_holds_does_not_matter(name: str, form: str) -> None:
    """In keys and values, and in queries: their rows reach no gradient."""
    (q, k, v), upstream = row_inputs(13)
    both = gradients(name, form)
    real = ROWS[:, :, None, None]

    def spoilt(x: np.ndarray, garbage: float) -> np.ndarray:
        return np.where(real, x, np.float32(garbage))

    clean = both(q, k, v, ROWS, upstream)
    for garbage in (1e6, np.nan, np.inf):
        query = spoilt(q, garbage) if takes(name, "query_mask") else q
        arrays = query, spoilt(k, garbage), spoilt(v, garbage)
        chex.assert_trees_all_equal(both(*arrays, ROWS, upstream), clean)

    def of_real_rows(*arrays: np.ndarray) -> Any:
        out, slopes = both(*arrays, ROWS, spoilt(upstream, 0))
        return np.where(real, out, 0), slopes

    # In Flow, padded queries without a query mask reach the gradients of real keys.
    if (name, form) != ("flow", "causal"):
        clean = of_real_rows(q, k, v)
        for garbage in (np.nan, np.inf):
            dirty = of_real_rows(*(spoilt(x, garbage) for x in (q, k, v)))
            assert_close(dirty, clean, 1e-6)


@pytest.mark.parametrize(("name", "form"), ALL_FORMS)
def test_gradients_match_finite_differences(name: str, form: str) -> None:
    """Central ones of order four, in float64."""
    with jax.enable_x64(True):
        (arrays, upstream), (way, _) = (
            ([x.astype("float64") for x in arrays], one.astype("float64"))
            for arrays, one in (row_inputs(43), row_inputs(44))
        )

        def call(step: float) -> Any:
            moved = (x + step * d for x, d in zip(arrays, way, strict=True))
            return gradients(name, form)(*moved, ROWS, upstream)

        step, change = 2e-5, 0.0
        for count, factor in ((1, 8), (2, -1)):
            ahead, behind = (np.asarray(call(x * step)[0]) for x in (count, -count))
            change += factor * (upstream * (ahead - behind)).sum() / (12 * step)
        pairs = zip(call(0)[1], way, strict=True)
        expected = sum((slope * d).sum() for slope, d in pairs)
        assert abs(change - expected) < 1e-7 * abs(expected) + 1e-8


@pytest.mark.parametrize(("name", "form"), [*FORMS, ("luna", "causal")])
def test_extreme_inputs(name: str, form: str) -> None:
    """With the last row all padding."""
    arrays, upstream = row_inputs(24)
    expected = functools.partial(formula(name, form), **masks(name, form, ROWS))
    both = functools.partial(gradients(name, form), mask=ROWS, upstream=upstream)
    assert_extremes(name, both, expected, *arrays)


# DeltaNet is the gated delta rule without decays, and Lightning's decays are RetNet's.
WITH_EPS = [
    x for x in FORMS if takes(x[0], "eps") and x[0] not in ("delta", "lightning")
]


@pytest.mark.parametrize(("name", "form"), WITH_EPS)
def test_rows_without_keys_are_zero_without_an_eps_too(name: str, form: str) -> None:
    """Also those that fill up the last chunk, which the gradient of all keys meets."""
    arrays, upstream = row_inputs(30)
    out, slopes = gradients(name, form, eps=0.0)(*arrays, ROWS, upstream)
    chex.assert_tree_all_finite((out, slopes))
    assert not np.asarray(out)[3].any()
    if form == "causal":
        assert not np.asarray(out)[1, 0].any()
        assert not np.asarray(out)[2, :5].any()


@pytest.mark.parametrize(("name", "form"), [x for x in FORMS if takes(x[0], "eps")])
def test_gradients_of_large_inputs(name: str, form: str) -> None:
    """Those of divisions and norms too, although squares leave float32's range."""
    (q, k, v), upstream = row_inputs(31)
    large = [(q, k, np.float32(1e15) * v)]
    if not gates(name, k):  # which are functions of the key here
        large.append((np.float32(1e10) * q, np.float32(1e10) * k, v))
    for arrays in large:
        _, slopes = gradients(name, form)(*arrays, ROWS, upstream)
        with jax.enable_x64(True):
            *wide, wide_upstream = (x.astype("float64") for x in (*arrays, upstream))
            _, expected = gradients(name, form)(*wide, ROWS, wide_upstream)
        assert_close(slopes, expected, 1e-3)


@pytest.mark.parametrize("name", ["softmax", "linformer", "softmax in blocks"])
def test_large_scores_in_optimised_code(name: str) -> None:
    """XLA rounds recomputed scores differently where the scale is not exact."""
    name, _, form = name.partition(" ")
    more = {"implementation": "blocks", "block": 5} if form else {}

    @jax.jit
    def both(*arrays):
        attend = functools.partial(run(name), **more)
        out, pullback = jax.vjp(attend, *arrays[:3])
        return out, pullback(arrays[3])[2]

    q, k, v = inputs(33, query_length=16, length=16, head_dim=6)
    arrays = np.float32(1e5) * q, np.float32(1e5) * k, v, inputs(34, 2, 16, 16, 2, 6)[0]
    with jax.enable_x64(True):
        expected = both(*(x.astype("float64") for x in arrays))
    assert_close(both(*arrays), expected, 1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_one_position_of_one_head_in_float16(name: str) -> None:
    arrays = [10 * x for x in inputs(29, 1, 1, 1, 1)]
    q, k, v = (x.astype("float16") for x in arrays)
    got = jitted(name)(q, k, v)
    assert got.dtype == jnp.float16
    assert_close(got, formula(name)(*(x.astype("float64") for x in (q, k, v))), 2e-3)


@pytest.mark.parametrize(
    ("name", "form"), [x for x in ALL_FORMS if takes(x[0], "gate")]
)
def test_what_padded_gates_hold_reaches_no_gradient(name: str, form: str) -> None:
    q, k, v = inputs(26)
    mask = np.arange(7)[None] < np.array([[7], [4]])
    arrays = {"gate": inputs(27)[0]}

    @fast_jit
    def slope(q, k, v, arrays):
        def loss(q, k, v, arrays):
            out = run(name, form)(q, k, v, mask, **arrays)
            real = jnp.where(mask[:, :, None, None], out, 0)
            return jnp.sin(real).sum(), real

        return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, arrays)

    def spoilt(x: np.ndarray, garbage: float) -> np.ndarray:
        return np.where(mask[:, :, None, None], x, np.float32(garbage))

    clean = slope(q, k, v, arrays)
    for garbage in (np.nan, np.inf):
        dirty = jax.tree.map(lambda x, g=garbage: spoilt(x, g), (q, k, v, arrays))
        assert_close(slope(*dirty), clean, 1e-6)


@pytest.mark.parametrize("name", ["softmax", "linformer", "local", "gau"])
def test_a_broken_query_is_seen_in_its_row(name: str) -> None:
    q, k, v = inputs(28)
    q[0, 2, 1] = np.nan
    out = np.asarray(jitted(name)(q, k, v))
    assert np.isnan(out[0, 2, 1]).all()
    if name != "gau":  # whose keys are made of the queries
        assert np.isnan(out).any(-1).sum() == 1
