"""Causal Flow's gradient as it is written out, against the derivative of its block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention.causal import chunks, raw
from lra_jax.attention.flow.block import FlowBlock, FlowSums, Tables
from lra_jax.attention.flow.parts import Options

from ..mechanisms import fast_jit

BATCH, HEADS, WIDTH, VALUE = 2, 2, 3, 4


def inputs(plan: chunks.Plan, rng: np.random.Generator, hidden: bool):
    """State, arrays, tables and cotangents of a super-block, all of them random."""
    size = plan.chunks * plan.chunk

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.1, 1.0, (BATCH, HEADS, *shape)))

    def state() -> FlowSums:
        keys, queries, key_flow, query_flow = (draw(WIDTH) * 5 for _ in range(4))
        # A small clip leaves no largest logit but zero.
        largest = jnp.zeros((BATCH, HEADS))
        flows = keys, queries, key_flow, query_flow
        return FlowSums(*flows, largest, draw(), draw(WIDTH, VALUE))

    query, key, value = draw(size, WIDTH), draw(size, WIDTH), draw(size, VALUE)
    seen = np.ones((BATCH, 1, size), bool)
    if hidden:
        seen[0, :, -3:] = seen[1, :, 2] = False
        real = jnp.asarray(seen)[..., None]
        query, key, value = (jnp.where(real, x, 0.0) for x in (query, key, value))
    counts = jnp.asarray(7.0 + np.cumsum(seen, -1))
    tables = Tables(counts, counts + 2, jnp.asarray(seen))
    cotangents = draw(size, VALUE) - 0.5, state()
    return state(), (query, key, value), tables, cotangents


def both(block: FlowBlock, state, arrays, tables, cotangents):
    """The gradient as written, as derived, and O', which the clip limits."""

    def call(state, arrays, tables, cotangents):
        (numerator, scale), _ = block(state, arrays, tables)
        given = state, arrays, tables, numerator * scale[..., None], cotangents
        terms, _ = dataclasses.replace(block, as_terms=True)(state, arrays, tables)
        got = block.scaled_pullback(*given, raw.identity)
        expected = chunks.Block.scaled_pullback(block, *given, raw.identity)
        return got, expected, terms.conserved_source

    return fast_jit(call)(state, arrays, tables, cotangents)


@pytest.mark.parametrize(
    ("clip", "eps", "hidden", "count", "parts"),
    [
        (1.0, 1e-6, False, 2, {}),
        (1.0, 0.3, True, 3, {}),
        (20.0, 0.1, False, 1, {}),
        (30.0, 1e-6, True, 2, {"competition": False}),
        (30.0, 1e-6, True, 2, {"allocation": False}),
    ],
)
def test_equals_the_derivative_of_the_block(
    clip: float, eps: float, hidden: bool, count: int, parts: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        plan = chunks.Plan(5, count, 1, False)
        block = FlowBlock(plan, Options(clip=clip, eps=eps, extra_eps=1e-3, **parts))
        given = inputs(plan, np.random.default_rng(0), hidden)
        got, expected, conserved = both(block, *given)
        beyond = float((conserved > clip).mean())
        assert beyond == 0 if clip > 1 else 0.1 < beyond < 0.9
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        for one, two in pairs:
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)


def test_no_features_no_gradient() -> None:
    """Without eps nothing flows where features are zero: no 0 / 0."""
    with jax.enable_x64(True):
        plan = chunks.Plan(4, 2, 1, False)
        block = FlowBlock(plan, Options(clip=1.0, eps=0.0))
        state, arrays, *rest = inputs(plan, np.random.default_rng(1), True)
        state = jax.tree.map(jnp.zeros_like, state)
        arrays = tuple(x.at[0].set(0) for x in arrays)
        got, expected, _ = both(block, state, arrays, *rest)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
        for one, two in pairs:
            assert jnp.isfinite(one).all()
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-9)
