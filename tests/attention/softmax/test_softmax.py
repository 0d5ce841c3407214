"""Softmax in blocks against its dense form, and its stream's cache."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lra_jax import attention

from .. import dense
from ..mechanisms import (
    LENGTH,
    Case,
    assert_close,
    assert_rejects,
    fast_jit,
    inputs,
    largest_array,
)


def formula(q, k, v, mask=None, causal=False) -> np.ndarray:
    def head(q, k, v, where):
        logits = q @ k.T / np.sqrt(q.shape[-1])
        if not causal:
            return dense.row_softmax(logits) @ v
        out = np.zeros((len(q), v.shape[-1]))
        for i in range(len(q)):
            seen = where <= i
            if seen.any():
                out[i] = dense.row_softmax(logits[i, seen]) @ v[seen]
        return out

    return dense.each_head(q, k, v, mask, head)


CASE = Case(
    formula,
    cache={"max_length": LENGTH},
    mean=True,
    pair_masks=True,
    unordered=("query", "key"),
)

blocks = functools.partial(attention.softmax_attention, implementation="blocks")
whole = functools.partial(attention.softmax_attention, implementation="dense")


@st.composite
def _cases(draw):
    length, keys = draw(st.integers(1, 11)), draw(st.integers(1, 11))
    causal = draw(st.booleans())
    heads = draw(st.sampled_from([1, 2]))
    shape = {
        "batch": draw(st.sampled_from([1, 3])),
        "query_length": keys if causal else length,
        "length": keys,
        "heads": 2,
        "key_heads": heads,
        "value_dim": draw(st.sampled_from([1, 5])),
    }
    sizes = (shape["batch"], 2, shape["query_length"], keys)
    axes = tuple(x if draw(st.booleans()) else 1 for x in sizes)
    mask = np.random.default_rng(draw(st.integers(0, 99))).random(axes) < 0.7
    return shape, mask, causal, draw(st.integers(1, 12))


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(case=_cases())
def test_blocks_are_the_dense_form(case) -> None:
    shape, mask, is_causal, block = case

    @fast_jit
    def each(arrays):
        def loss(arrays, function, **options):
            out = function(*arrays, mask, is_causal, **options)
            return jnp.sin(out).sum(), out

        call = jax.value_and_grad(loss, has_aux=True)
        return call(arrays, blocks, block=block), call(arrays, whole)

    ((_, out), slopes), ((_, expected), gradients) = each(inputs(1, **shape))
    assert_close(out, expected, 1e-6)
    for got, gradient in zip(slopes, gradients, strict=True):
        # One visible key, or none: the scores have no gradient but rounding.
        largest = max(np.abs(gradient).max(), 0.1)
        assert np.abs(got - gradient).max() < 1e-6 * largest


def test_against_the_formula() -> None:
    q, k, v = inputs(2, batch=3, value_dim=3)
    mask = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7], bool)
    q, k = 30 * q, 30 * k  # beyond the range of exp without the largest score
    out = np.asarray(fast_jit(functools.partial(blocks, block=3))(q, k, v, mask))
    assert_close(out, formula(q, k, v, mask), 2e-5)
    assert not out[2].any(), "a row without visible keys is exactly zero"


@pytest.mark.parametrize("form", ["dense", "blocks"])
def test_values_of_half_precision_do_not_round_the_weights(form: str) -> None:
    q, k, v = inputs(13)
    v = jnp.asarray(v, "bfloat16")
    out = attention.softmax_attention(q, k, v, implementation=form)
    assert out.dtype == jnp.float32
    assert_close(out, formula(q, k, np.asarray(v, "float64")), 1e-6)


def test_large_scores_share_their_gradient_in_blocks() -> None:
    """In float32 the logarithm of a sum of two is lost beside a score of 2e8."""
    q = np.full((1, 2, 1, 4), 1e4, "float32")
    v = inputs(3, 1, 2, 2, 1)[2]

    def loss(v):
        blocks = {"implementation": "blocks", "block": 1}
        return attention.softmax_attention(q, q, v, **blocks).sum()

    np.testing.assert_allclose(jax.grad(loss)(v), np.ones_like(v), 1e-6)


def test_gradients_of_gradients() -> None:
    arrays = inputs(3, batch=1, heads=1)

    @fast_jit
    def both(arrays):
        def slope(arrays, function, **options):
            def loss(arrays):
                return jnp.sin(function(*arrays, is_causal=True, **options)).sum()

            return sum(jnp.sin(x).sum() for x in jax.grad(loss)(arrays))

        call = jax.grad(slope)
        return call(arrays, blocks, block=3), call(arrays, whole)

    assert_close(*both(arrays))


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "all"])
def test_memory_is_linear_in_the_length(is_causal: bool) -> None:
    x = jnp.zeros((1, 256, 1, 2))

    def slope(function, **options):
        def loss(x):
            return function(x, x, x, is_causal=is_causal, **options).sum()

        return largest_array(jax.grad(loss), x)

    assert slope(whole) == 256 * 256
    assert slope(blocks, block=16) == 256 * 2


def test_blocks_are_chosen_by_the_length() -> None:
    def formed(length: int, **options: Any) -> int:
        x = jnp.zeros((1, length, 1, 2))
        call = functools.partial(attention.softmax_attention, **options)
        return largest_array(call, x, x, x)

    assert formed(256) == 256**2
    assert formed(1024) == 128**2, "pairs of blocks"
    assert formed(1216) == 152**2, "nothing is filled up"
    assert formed(1024, block=64) == 64 * 64
    assert formed(1024, implementation="dense") == 1024**2
    assert formed(64, implementation="blocks", block=8) < 64**2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stream_keeps_the_keys_heads_and_dtype(dtype: str) -> None:
    arrays = inputs(5, heads=4, key_heads=2, value_dim=3)
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    out, state = attention.softmax_prefill(*arrays, max_length=9)
    assert out.dtype == state.key.dtype == state.value.dtype == dtype
    assert state.key.shape == (2, 2, 9, 4) and state.value.shape == (2, 2, 9, 3)
    expected = whole(*arrays, is_causal=True)
    assert_close(out, expected, 1e-6 if dtype == "float32" else 1e-2)


def test_what_padding_holds_stays_out_of_the_cache() -> None:
    q, k, v = inputs(6)
    mask = np.arange(7)[None] < np.array([[7], [4]])
    spoilt = [np.where(mask[:, :, None, None], x, np.nan) for x in (k, v)]
    call = fast_jit(functools.partial(attention.softmax_prefill, max_length=9))
    actual, expected = call(q, *spoilt, mask), call(q, k, v, mask)
    chex.assert_trees_all_equal(actual, expected)


def test_steps_from_an_empty_state() -> None:
    q, k, v = inputs(7, heads=4, key_heads=2)
    # As many heads as the query, or as the key.
    for heads in (4, 2):
        state = attention.softmax_init(2, heads, 4, max_length=7)
        sizes = [x.shape for x in state]
        step = fast_jit(attention.softmax_step)
        out = None
        for i in range(7):
            out, state = step(state, q[:, i], k[:, i], v[:, i])
            assert [x.shape for x in state] == sizes
        assert_close(out, whole(q, k, v, is_causal=True)[:, -1], 1e-6)


@pytest.mark.parametrize("key_heads", [8, 2])
def test_a_step_reads_the_cache_where_it_is(key_heads: int) -> None:
    """A copy of the keys, or the repeated heads of a group, would cost ten times it."""
    state = attention.softmax_init(1, key_heads, 64, max_length=4_096)
    query, key = jnp.zeros((1, 8, 64)), jnp.zeros((1, key_heads, 64))
    step = jax.jit(attention.softmax_step, donate_argnums=0)
    compiled: Any = step.lower(state, query, key, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.key.nbytes / 4


def test_a_cache_of_two_key_heads_and_three_value_heads() -> None:
    query, key, _ = inputs(9, heads=6, key_heads=2)
    value = inputs(10, heads=3)[2]
    expected = attention.softmax_attention(query, key, value, is_causal=True)
    _, state = attention.softmax_prefill(
        *(x[:, :6] for x in (query, key, value)), max_length=8
    )
    last = (x[:, 6] for x in (query, key, value))
    assert_close(attention.softmax_step(state, *last)[0], expected[:, 6])


def test_beyond_the_length() -> None:
    q, k, v = inputs(8)
    one = q[:, 0], k[:, 0], v[:, 0]
    _, state = attention.softmax_prefill(q, k, v, max_length=8)
    _, state = attention.softmax_step(state, *one)
    with pytest.raises(ValueError, match=r"max_length: expected at least 9 .* got 8"):
        attention.softmax_step(state, *one)
    with pytest.raises(ValueError, match="max_length: expected at least 15"):
        attention.softmax_prefill(q, k, v, state=state)
    # Where the position is not known: what is held stays, and nothing is added.
    out, after = fast_jit(attention.softmax_step)(state, *one)
    chex.assert_trees_all_equal(after[:3], state[:3])
    expected = whole(q[:, :1], *(np.concatenate([x, x[:, :1]], 1) for x in (k, v)))
    assert_close(out, expected[:, 0], 1e-6)


def test_padding_needs_no_room() -> None:
    q, k, v = inputs(8)
    rows = q.shape[0]
    first, more = ([x[:, a:b] for x in (q, k, v)] for a, b in ((0, 6), (2, 6)))
    _, state = attention.softmax_prefill(*first, max_length=8)
    mask = np.tile([[True, True, False, False]], (rows, 1))
    out, after = attention.softmax_prefill(*more, mask=mask, state=state)
    expected, expected_after = attention.softmax_prefill(
        *(x[:, :2] for x in more), state=state
    )
    assert_close(out[:, :2], expected, 1e-6)
    chex.assert_trees_all_equal(after, expected_after)


def test_states_that_do_not_fit() -> None:
    q, k, v = inputs(9)
    init = functools.partial(attention.softmax_init, 2, 2, 4)
    state, one = init(max_length=9), (q[:, 0], k[:, 0], v[:, 0])
    step = functools.partial(attention.softmax_step, state)
    assert_rejects(lambda: step(q, k, v), "query: expected [B, N, H]", "(2, 7, 2, 4)")
    assert_rejects(
        lambda: step(*(x[:1] for x in one)), "state: expected key", "(1, 2, 9, 4)"
    )
    assert_rejects(lambda: step(*one[:2], v[:, 0, :, :3]), "state: expected value")
    narrow = attention.softmax_init(2, 3, 4, max_length=9)
    assert_rejects(
        lambda: attention.softmax_step(narrow, *one), "state: expected a number"
    )
    assert_rejects(lambda: init(max_length=0), "max_length: expected an int", "got 0")
    assert_rejects(
        lambda: init(max_length=9, dtype="int32"), "dtype: expected a floating"
    )
    call = attention.softmax_prefill
    assert_rejects(
        lambda: call(q, k, v), "max_length: expected an int of at least 7", "None"
    )
    assert_rejects(lambda: call(q, k, v, max_length=6), "at least 7", "got 6")
    both = functools.partial(call, state=state, max_length=9)
    assert_rejects(lambda: both(q, k, v), "max_length: expected None with a state")
    pairs = np.ones((1, 1, 7, 7), bool)
    assert_rejects(
        lambda: call(q, k, v, pairs, max_length=9), "mask:", "hidden from all"
    )


def test_masks_of_pairs_and_of_heads() -> None:
    q, k, v = inputs(8)
    call = attention.softmax_attention
    pairs = np.tri(7, dtype=bool)[None, None]
    assert_close(call(q, k, v, pairs), formula(q, k, v, causal=True))
    heads = np.ones((1, 2, 1, 7), bool)
    heads[0, 0, 0, 3:] = False
    out = call(q, k, v, heads)
    assert_close(out[:, :, 0], formula(q, k[:, :3], v[:, :3])[:, :, 0])
    assert_close(out[:, :, 1], formula(q, k, v)[:, :, 1])
