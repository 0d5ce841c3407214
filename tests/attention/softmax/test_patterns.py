"""Windows and patterns against their definitions; causality, cost and wrong options."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import (
    assert_close,
    assert_rejects,
    fast_jit,
    inputs,
)
from . import patterns

# Right, scattered and left padding; nothing at all.
MASK = np.array(
    [
        [1] * 9 + [0] * 4,
        [0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0],
        [0, 0, 0] + [1] * 10,
        [0] * 13,
    ],
    bool,
)
CASES = [
    ("local", {"window": 2}),
    ("local", {"window": 0}),
    ("local", {"window": 40}),
    ("local", {"block": 4}),
    ("longformer", {"window": 2, "global_tokens": 3}),
    ("longformer", {"window": 1, "global_tokens": 0}),
    ("longformer", {"window": 3, "global_tokens": 20}),
    ("bigbird", {"block": 2, "num_random": 2, "seed": 3}),
    ("bigbird", {"block": 1, "num_random": 3}),
    ("bigbird", {"block": 5, "num_random": 0}),
    ("sparse", {"stride": 3}),
    ("sparse", {"stride": 30}),
    ("sparse", {"stride": 4, "pattern": "fixed", "summary": 2}),
    ("sparse", {"stride": 20, "pattern": "fixed"}),
]
LONG = [
    ("local", {"window": 19}),
    ("longformer", {"window": 17, "global_tokens": 2}),
    ("bigbird", {"block": 8, "num_random": 2, "seed": 1}),
    ("sparse", {"stride": 9}),
    ("sparse", {"stride": 9, "pattern": "fixed", "summary": 1}),
]


def _named(case: tuple[str, dict[str, Any]]) -> str:
    name, options = case
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])


def _functions(name: str):
    return getattr(attention, f"{name}_attention"), getattr(
        attention, f"{name}_weights"
    )


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", CASES, ids=_named)
def test_the_definition_with_masks_and_grouped_heads(case, causal: bool) -> None:
    name, options = case
    q, k, v = inputs(
        1, 4, query_length=13, length=13, heads=4, key_heads=2, value_dim=3
    )
    run = functools.partial(_functions(name)[0], is_causal=causal, **options)
    out = np.asarray(fast_jit(run)(q, k, v, MASK))
    expected = patterns.attention(name, q, k, v, mask=MASK, causal=causal, **options)
    assert_close(out, expected)
    assert not out[3].any(), "a row that sees nothing is exactly zero"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("case", LONG, ids=_named)
def test_the_definition_over_many_blocks(case, causal: bool) -> None:
    """The second row has padding; the weights are those of the first."""
    name, options = case
    q, k, v = inputs(2, 2, query_length=101, length=101)
    mask = np.arange(101)[None] < np.array([[101], [77]])
    run, weights = _functions(name)
    more = options | {"is_causal": causal}

    @fast_jit
    def both(q, k, v):
        return run(q, k, v, mask, **more), weights(q[:1], k[:1], **more)

    out, matrix = (np.asarray(x) for x in both(q, k, v))
    expected = functools.partial(patterns.attention, name, causal=causal, **options)
    assert_close(out[:1], expected(*(x[:1] for x in (q, k, v))))
    assert_close(out[1:, :77], expected(*(x[1:, :77] for x in (q, k, v))))
    dense = patterns.weights(name, q[:1], k[:1], causal=causal, **options)
    assert_close(matrix, dense)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_random_blocks_are_distinct_seeded_and_spread(causal: bool) -> None:
    from lra_jax.attention.softmax.bigbird import _Blocks

    def table(seed: int) -> np.ndarray:
        pattern = _Blocks(1, 3, seed, causal)
        return np.asarray(pattern.random(jnp.array([39], "int32"), 2, 40))[0]

    blocks = table(0)
    np.testing.assert_array_equal(blocks, table(0))
    assert (blocks[0] != blocks[1]).any(), "heads differ"
    assert (blocks != table(1)).any(), "seeds differ"
    for head in range(2):
        for row in range(40):
            drawn = [block for block in blocks[head, row] if block >= 0]
            assert drawn == patterns.random_blocks(head, row, 39, 3, 0, causal)
            assert len(set(drawn)) == len(drawn)
            assert not set(drawn) & {0, 39, row - 1, row, row + 1}
    if not causal:
        counts = np.bincount(blocks[:, 1:-1].ravel(), minlength=39)[1:39]
        assert counts.min() > 0 and counts.max() < 20, "no block is drawn always"
        # The drawn pattern is part of a trained model: it may not change.
        assert blocks[0, 5].tolist() == PINNED


PINNED = [23, 27, 20]


def test_sparse_takes_its_stride_from_max_length() -> None:
    q, k, v = inputs(5, query_length=10, length=10)
    run = fast_jit(attention.sparse_attention, static_argnames=("max_length", "stride"))
    for keywords, stride in (({}, 4), ({"max_length": 26}, 6), ({"max_length": 25}, 5)):
        assert_close(run(q, k, v, **keywords), run(q, k, v, stride=stride), 1e-6)


X = inputs(4, 2, query_length=7, length=7)


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("local", {"window": 3, "block": 4}, ("expected one of them", "window=3")),
        ("longformer", {"window": None}, ("window: expected an int", "got None")),
        (
            "sparse",
            {"pattern": "fixed", "stride": 4, "summary": 5},
            ("summary: expected at most the stride 4", "got 5"),
        ),
    ],
)
def test_options_that_do_not_fit(name: str, options: dict, parts: tuple) -> None:
    run, weights = _functions(name)
    q, k, v = X
    assert_rejects(lambda: run(q, k, v, **options), *parts)
    assert_rejects(lambda: weights(q, k, **options), *parts)
