"""What must hold whatever the numbers: sums, symmetries, scales."""

import functools

import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import (
    CROSS,
    LENGTH,
    NAMES,
    NORMALISED,
    PATTERNS,
    assert_close,
    fast_jit,
    inputs,
    jitted,
    queries,
    run,
    weights,
)

MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7], bool)


MEANS = (
    "softmax",
    "linear",
    "cosformer",
    "performer",
    *PATTERNS,
    "synthesizer",
    "reformer",
    "luna",
)

# The order of neither queries nor keys matters.
UNORDERED = ("softmax", "linear", "flow", "norm", "performer", "luna")


@pytest.mark.parametrize("name", MEANS)
def test_weights_are_positive_and_sum_to_one(name: str) -> None:
    q, k, _ = inputs(1, batch=3, query_length=queries(name, 5))
    q = np.abs(q)  # no dead rows
    matrix = np.asarray(fast_jit(weights(name))(q, k, MASK))
    assert (matrix >= 0).all()
    sums = matrix[:2].sum(-1)
    # A pattern may leave a row of a scattered mask without any key.
    wanted = sums > 0 if name not in CROSS else np.ones_like(sums)
    assert_close(sums, wanted, 1e-5)
    assert not matrix[2].any()


@pytest.mark.parametrize("name", MEANS)
def test_constant_values_come_out_constant(name: str) -> None:
    q, k, v = inputs(2)
    out = jitted(name)(np.abs(q), np.abs(k), np.full_like(v, 3))
    assert_close(out, np.full_like(v, 3), 1e-5)


def test_cosformer_sees_only_differences_of_positions() -> None:
    q, k, v = inputs(3)
    shift = LENGTH - 7

    def moved(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), (shift, 0), (0, 0), (0, 0)])

    mask = np.arange(LENGTH)[None] >= shift
    call = jitted("cosformer")
    later = call(moved(q), moved(k), moved(v), mask)
    assert_close(later[:, shift:], call(q, k, v))


def test_cosformer_with_a_long_max_length_is_linear_attention() -> None:
    q, k, v = inputs(4)

    @fast_jit
    def both(*a):
        distant = attention.cosformer_attention(*a, max_length=10**6)
        return distant, attention.linear_attention(*a, feature_map="relu")

    assert_close(*both(q, k, v), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_order_of_queries_and_of_keys(name: str) -> None:
    q, k, v = inputs(5, query_length=queries(name, 6))
    rows = np.roll(np.array([3, 5, 0, 1, 2, 4, 6])[: q.shape[1]], 1)
    columns = np.array([6, 2, 0, 4, 1, 3, 5])
    call = jitted(name)
    plain = np.asarray(call(q, k, v))
    by_query = np.asarray(call(q[:, rows], k, v))
    by_key = np.asarray(call(q, k[:, columns], v[:, columns]))
    if name in ("linformer", "synthesizer", *UNORDERED):
        assert_close(by_query, plain[:, rows])
    else:
        assert np.abs(by_query - plain[:, rows]).max() > 1e-3, "these know positions"
    if name in UNORDERED:
        assert_close(by_key, plain)
    else:
        assert np.abs(by_key - plain).max() > 1e-3, "these know the positions"


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 12), (12, 5)])
def test_flow_is_conserved(queries: int, keys: int) -> None:
    q, k, _ = inputs(8, query_length=queries, length=keys)
    terms = fast_jit(lambda q, k: attention.flow_terms(q, k, clip=None))(q, k)
    a, b = (1 / (1 + np.exp(-x)) for x in (q, k))
    assert_close(terms.incoming, np.einsum("btnh,bsnh->btn", a, b), 1e-5)
    assert_close(terms.outgoing, np.einsum("bsnh,btnh->bsn", b, a), 1e-5)
    everywhere = np.ones((2, 2))
    assert_close(terms.conserved_source.sum(1), queries * everywhere, 1e-5)
    assert_close(terms.conserved_sink.sum(1), keys * everywhere, 1e-5)
    assert_close(terms.competition.sum(1), keys * everywhere, 1e-5)
    assert (np.asarray(terms.allocation) > 0.5).all()
    assert (np.asarray(terms.allocation) < 1).all()


def test_flow_with_equal_keys_has_no_competition() -> None:
    q, k, _ = inputs(9)
    same = np.tile(k[:, :1], (1, 7, 1, 1))
    terms = fast_jit(lambda q, k: attention.flow_terms(q, k, clip=None))(q, same)
    assert_close(terms.competition, np.ones((2, 7, 2)), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_linear_in_the_values(name: str) -> None:
    q, k, v = inputs(15)
    other = inputs(16)[2]
    call = jitted(name)
    combined = 2 * call(q, k, v) - 3 * call(q, k, other)
    if name in NORMALISED:  # but not their scale
        assert np.abs(call(q, k, 2 * v - 3 * other) - combined).max() > 0.1
        assert_close(call(q, k, 100 * v), call(q, k, 50 * v), 1e-4)
        call = fast_jit(run(name), static_argnames="norm")
        call = functools.partial(call, norm=None)
        combined = 2 * call(q, k, v) - 3 * call(q, k, other)
    assert_close(call(q, k, 2 * v - 3 * other), combined)


def test_relu_features_ignore_the_scale_of_queries() -> None:
    q, k, v = inputs(17)
    relu = fast_jit(functools.partial(attention.linear_attention, feature_map="relu"))
    for call in (jitted("cosformer"), relu):
        assert_close(call(9 * q, k, v), call(q, k, v))
