"""Properties of the weights of any input: sums, symmetries, scales."""

import functools

import numpy as np
import pytest

from ..mechanisms import (
    CROSS,
    MASK,
    NAMES,
    assert_close,
    case,
    fast_jit,
    having,
    inputs,
    jitted,
    queries,
    run,
    weights,
)


@pytest.mark.parametrize("name", having("mean"))
def test_weights_are_positive_and_sum_to_one(name: str) -> None:
    q, k, _ = inputs(1, batch=3, query_length=queries(name, 5))
    q = np.abs(q)  # no dead rows
    matrix = np.asarray(fast_jit(weights(name))(q, k, MASK))
    assert (matrix >= 0).all()
    sums = matrix[:2].sum(-1)
    # A pattern may leave a row of a scattered mask without any key.
    expected = sums > 0 if name not in CROSS else np.ones_like(sums)
    assert_close(sums, expected, 1e-5)
    assert not matrix[2].any()


@pytest.mark.parametrize("name", NAMES)
def test_order_of_queries_and_of_keys(name: str) -> None:
    q, k, v = inputs(5, query_length=queries(name, 6))
    rows = np.roll(np.array([3, 5, 0, 1, 2, 4, 6])[: q.shape[1]], 1)
    columns = np.array([6, 2, 0, 4, 1, 3, 5])
    call = jitted(name)
    plain = np.asarray(call(q, k, v))
    by_query = np.asarray(call(q[:, rows], k, v))
    by_key = np.asarray(call(q, k[:, columns], v[:, columns]))
    if "query" in case(name).unordered:
        assert_close(by_query, plain[:, rows])
    else:
        assert np.abs(by_query - plain[:, rows]).max() > 1e-3, "these know positions"
    if "key" in case(name).unordered:
        assert_close(by_key, plain)
    else:
        assert np.abs(by_key - plain).max() > 1e-3, "these know the positions"


@pytest.mark.parametrize("name", NAMES)
def test_linear_in_the_values(name: str) -> None:
    q, k, v = inputs(15)
    other = inputs(16)[2]
    call = jitted(name)
    combined = 2 * call(q, k, v) - 3 * call(q, k, other)
    if case(name).normalised:  # but not their scale
        assert np.abs(call(q, k, 2 * v - 3 * other) - combined).max() > 0.1
        assert_close(call(q, k, 100 * v), call(q, k, 50 * v), 1e-4)
        call = fast_jit(run(name), static_argnames="norm")
        call = functools.partial(call, norm=None)
        combined = 2 * call(q, k, v) - 3 * call(q, k, other)
    assert_close(call(q, k, 2 * v - 3 * other), combined)
