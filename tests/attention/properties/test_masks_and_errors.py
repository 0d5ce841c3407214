"""The answers of every mechanism to arrays and masks that do not fit."""

import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import (
    CROSS,
    NAMES,
    assert_rejects,
    case,
    inputs,
    run,
    weights,
)

Q, K, V = inputs(2, query_length=5)  # (2, 5, 2, 4), (2, 7, 2, 4), (2, 7, 2, 4)


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ((Q[0], K, V), ("query: expected [B, T, N, H]", "(5, 2, 4)")),
        ((Q, K[..., None], V), ("key: expected [B, S, N, H]", "(2, 7, 2, 4, 1)")),
        ((Q, K, V[0]), ("value: expected [B, S, N, Hv]", "(7, 2, 4)")),
        ((Q.astype("int32"), K, V), ("query: expected a floating dtype", "int32")),
        (
            (Q, K[:1], V),
            ("key: expected [B, S, N, H]=(2, 7, 2, 4)", "got (1, 7, 2, 4)"),
        ),
        (
            (Q, K, V[:1]),
            ("value: expected [B, S, N, Hv]=(2, 7, 2, Hv)", "got (1, 7, 2, 4)"),
        ),
        (
            (Q[:, :, :1], K, V),
            ("key: expected [B, S, N, H]=(2, 7, 1, 4)", "got (2, 7, 2, 4)"),
        ),
        (
            (Q, K, V[:, :, :0]),
            ("value: expected [B, S, N, Hv] without an empty", "(2, 7, 0, 4)"),
        ),
        (
            (Q, K[..., :3], V),
            ("key: expected [B, S, N, H]=(2, 7, 2, 4)", "got (2, 7, 2, 3)"),
        ),
        (
            (Q, K, V[:, :6]),
            ("value: expected [B, S, N, Hv]=(2, 7, 2, Hv)", "got (2, 6, 2, 4)"),
        ),
        (
            (Q, K[:, :0], V[:, :0]),
            ("key: expected [B, S, N, H] without an empty", "(2, 0, 2, 4)"),
        ),
    ],
)
def test_arrays_that_do_not_fit(arrays: tuple, parts: tuple) -> None:
    for name in NAMES:
        assert_rejects(lambda name=name: run(name)(*arrays), *parts)


@pytest.mark.parametrize("name", NAMES)
def test_masks_that_do_not_fit(name: str) -> None:
    for shape in [(2, 5), (7, 2), (3, 7), (3, 1, 7), (2, 1, 1, 1, 7), ()]:
        mask = np.ones(shape, bool)
        assert_rejects(
            lambda mask=mask: run(name)(K, K, V, mask), "mask: ", "[B, S]=(2, 7)"
        )
    mask = np.ones((2, 7), "complex64")
    assert_rejects(
        lambda: run(name)(K, K, V, mask), "mask: expected a boolean", "complex64"
    )


@pytest.mark.parametrize("name", [name for name in NAMES if not case(name).pair_masks])
@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (1, 2, 1, 7)])
def test_a_query_or_head_axis_is_refused_with_the_reason(name: str, shape) -> None:
    mask = np.ones(shape, bool)
    query = Q if name in CROSS else K
    if name not in CROSS and shape[2] > 1:
        shape, mask = (2, 1, 7, 7), np.ones((2, 1, 7, 7), bool)
    parts = "mask: expected", str(shape), "hidden from all queries and heads alike"
    assert_rejects(lambda: run(name)(query, K, V, mask), *parts)
    if case(name).weighted:
        assert_rejects(lambda: weights(name)(query, K, mask), *parts)


@pytest.mark.parametrize("name", sorted({*NAMES} - {*CROSS}))
def test_those_without_a_cross_form_attend_to_themselves(name: str) -> None:
    parts = "key: expected the query's length T=5", "no cross form, got S=7"
    assert_rejects(lambda: run(name)(Q, K, V), *parts)
    if case(name).weighted:
        assert_rejects(lambda: weights(name)(Q, K), *parts)


@pytest.mark.parametrize("name", NAMES)
def test_causal_needs_one_length(name: str) -> None:
    if not attention.resolve(name).causal:
        refused = "is_causal: expected False", "got True"
        assert_rejects(lambda: run(name)(K, K, V, is_causal=True), *refused)
        if case(name).weighted:
            assert_rejects(lambda: weights(name)(K, K, is_causal=True), *refused)
        return
    assert_rejects(
        lambda: run(name)(Q, K, V, is_causal=True), "is_causal: expected", "T=5", "S=7"
    )
