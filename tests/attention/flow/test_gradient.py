"""Causal Flow's gradient as written out, against the derivative of its segment."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention.flow import causal, gradient
from lra_jax.attention.flow.causal import FlowSums, Options, Tables

from ..mechanisms import fast_jit

BATCH, HEADS, WIDTH, VALUE = 2, 2, 3, 4


def inputs(chunks: int, size: int, rng: np.random.Generator, hidden: bool):
    """State, features, tables and cotangents of a segment, all of them random."""

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.1, 1.0, (BATCH, HEADS, *shape)))

    def state() -> FlowSums:
        keys, queries, key_flow, query_flow = (draw(WIDTH) * 5 for _ in range(4))
        # A small clip leaves no largest logit but zero.
        largest = jnp.zeros((BATCH, HEADS))
        flows = keys, queries, key_flow, query_flow
        return FlowSums(*flows, largest, draw(), draw(WIDTH, VALUE))

    query, key = draw(chunks, size, WIDTH), draw(chunks, size, WIDTH)
    value = draw(chunks, size, VALUE)
    seen = np.ones((BATCH, 1, chunks * size), bool)
    if hidden:
        seen[0, :, -3:] = seen[1, :, 2] = False
    counts = 7.0 + np.cumsum(seen, -1)
    counts, seen = (x.reshape(BATCH, 1, chunks, size) for x in (counts, seen))
    if hidden:
        real = seen[..., None]
        query, key, value = (jnp.where(real, x, 0.0) for x in (query, key, value))
    counts = jnp.asarray(counts)
    tables = Tables(counts, counts + 2, jnp.asarray(seen))
    cotangents = draw(chunks, size, VALUE) - 0.5, state()
    return state(), (query, key, value), tables, cotangents


def both(options: Options, state, features, tables, cotangents):
    """The gradient as written, as derived, and O', which the clip limits."""

    def call(state, features, tables, cotangents):
        def segment(state, features):
            (numerator, factor), after = causal.segment(
                options, state, features, tables
            )
            return numerator * factor[..., None], after

        (outputs, _), derived = jax.vjp(segment, state, features)
        got = gradient.pullback(options, state, features, tables, outputs, *cotangents)
        terms, _ = causal.terms_segment(options, state, features, tables)
        return got, derived(cotangents), terms.conserved_source

    return fast_jit(call)(state, features, tables, cotangents)


def compare(got: Any, wanted: Any) -> None:
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert jnp.isfinite(one).all()
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("clip", "eps", "hidden", "count", "parts"),
    [
        (1.0, 1e-6, False, 2, {}),
        (1.0, 0.3, True, 3, {}),
        (20.0, 0.1, False, 1, {}),
        (30.0, 1e-6, True, 2, {"competition": False}),
        (30.0, 1e-6, True, 2, {"allocation": False}),
        (30.0, 0.01, True, 2, {"unit": 8.0}),
    ],
)
def test_equals_the_derivative_of_the_segment(
    clip: float, eps: float, hidden: bool, count: int, parts: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        unit = parts.get("unit")
        parts = {name: part for name, part in parts.items() if name != "unit"}
        options = Options(
            "sigmoid", jnp.dtype("float64"), clip=clip, eps=eps, extra_eps=1e-3, **parts
        )
        state, features, tables, cotangents = inputs(
            count, 5, np.random.default_rng(0), hidden
        )
        if unit is not None:
            tables = tables._replace(unit=jnp.full_like(tables.sinks, unit))
        got, wanted, conserved = both(options, state, features, tables, cotangents)
        beyond = float((conserved > clip).mean())
        assert beyond == 0 if clip > 1 else 0.1 < beyond < 0.9
        compare(got, wanted)


def test_no_features_no_gradient() -> None:
    """Without eps nothing flows where features are zero: no 0 / 0."""
    with jax.enable_x64(True):
        options = Options("sigmoid", jnp.dtype("float64"), clip=1.0, eps=0.0)
        state, features, *rest = inputs(2, 4, np.random.default_rng(1), True)
        state = jax.tree.map(jnp.zeros_like, state)
        features = tuple(x.at[0].set(0) for x in features)
        compare(*both(options, state, features, *rest)[:2])
