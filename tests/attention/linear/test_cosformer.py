"""cosFormer: its formula, its lengths M, and what is exactly zero."""

import functools

import jax
import numpy as np
import pytest

from lra_jax import attention

from .. import dense
from ..mechanisms import (
    LENGTH,
    MASK,
    Case,
    assert_close,
    assert_rejects,
    fast_jit,
    init,
    inputs,
    jitted,
    prefill,
    pulled_back,
    run,
    steps,
)


def formula(q, k, v, mask=None, max_length=None, eps=1e-6, causal=False) -> np.ndarray:
    longest = max(q.shape[1], k.shape[1]) if max_length is None else max_length

    def head(q, k, v, where):
        distance = np.arange(len(q))[:, None] - where[None]
        scores = np.maximum(q, 0) @ np.maximum(k, 0).T
        scores = scores * np.cos(np.pi / 2 * distance / longest)
        scores = scores * dense.seen(len(q), where, causal)
        return scores @ v / np.maximum(scores.sum(-1, keepdims=True), eps)

    return dense.each_head(q, k, v, mask, head)


CASE = Case(formula, {"max_length": LENGTH}, mean=True, level={"max_length": 2048})


@pytest.mark.parametrize("is_causal", [False, True], ids=["whole", "causal"])
def test_one_length_a_sample(is_causal: bool) -> None:
    q, k, v = inputs(11, batch=3)
    lengths = np.array([7, 4, 0], "int32")
    q[1, 5], mask = np.nan, np.ones((3, 7), bool)
    call = jitted("cosformer", "causal" if is_causal else "full")
    got = np.asarray(call(q, k, v, mask, max_length=lengths))
    for row, length in enumerate(lengths[:2]):
        alone = [x[row : row + 1, :length] for x in (q, k, v)]
        assert_close(got[row : row + 1, :length], formula(*alone, causal=is_causal))
        assert not got[row, length:].any()
    assert not got[2].any()


def test_lengths_of_samples_may_be_of_any_integer_type() -> None:
    q, k, v = inputs(12, query_length=260, length=260)
    lengths = np.array([250, 40])
    expected = attention.cosformer_attention(q, k, v, max_length=lengths)
    got = attention.cosformer_attention(q, k, v, max_length=lengths.astype("uint8"))
    np.testing.assert_array_equal(got, expected)
    assert not np.asarray(got)[0, 250:].any()


@pytest.mark.parametrize("form", ["full", "causal"])
def test_dead_rows_are_exactly_zero(form: str) -> None:
    q, k, v = inputs(24, batch=3)
    both = pulled_back(lambda *arrays: run("cosformer", form)(*arrays, MASK))
    for change in (lambda x: -np.abs(x), np.zeros_like):
        for array in jax.tree.leaves(both(change(q), change(k), v)):
            assert not np.asarray(array).any()


def test_cosformer_beyond_its_length() -> None:
    """Raises where the position is known; else it counts as the last one."""
    q, k, v = inputs(10, query_length=LENGTH, length=LENGTH)
    _, state = fast_jit(functools.partial(prefill, "cosformer"))(q, k, v)
    one = (q[:, 0], k[:, 0], v[:, 0])
    with pytest.raises(ValueError, match=f"max_length: expected at least {LENGTH + 1}"):
        attention.cosformer_step(state, *one)
    with pytest.raises(ValueError, match="max_length"):
        attention.cosformer_prefill(q, k, v, state=state)
    # Padding at the end needs no room, compiled or not.
    first = [x[:, : LENGTH - 2] for x in (q, k, v)]
    _, begun = prefill("cosformer", *first, max_length=LENGTH)
    mask = np.broadcast_to(np.arange(LENGTH) < 2, q.shape[:2])
    out, _ = prefill("cosformer", q, k, v, mask, state=begun)
    assert np.isfinite(np.asarray(out[:, :2])).all()
    with pytest.raises(ValueError, match="max_length"):  # A state that is known there.
        fast_jit(lambda x: attention.cosformer_prefill(x, k, v, state=state)[0])(q)
    more = [np.concatenate([x, x, x], 1) for x in (q, k, v)]
    out, state = fast_jit(functools.partial(steps, "cosformer"))(state, *more)
    assert np.isfinite(np.asarray(out)).all()
    assert (np.asarray(state.position) == 4 * LENGTH).all()
    # Weights stay positive: the outputs are means of the values, up to rounding.
    low, high = (f(v, axis=1, keepdims=True) for f in (np.min, np.max))
    assert (out > low - 1e-4).all() and (out < high + 1e-4).all()


def test_cosformer_needs_its_length_from_the_start() -> None:
    q, k, v = inputs(12)
    call = attention.cosformer_prefill
    assert_rejects(
        lambda: call(q, k, v), "max_length: expected an int of at least 7", "None"
    )
    assert_rejects(lambda: call(q, k, v, max_length=6), "at least 7", "got 6")
    state = init("cosformer", 2, 2, 4)
    call = functools.partial(call, state=state, max_length=16)
    assert_rejects(lambda: call(q, k, v), "max_length: expected None with a state")
    create = attention.cosformer_init
    assert_rejects(lambda: create(1, 1, 1, max_length=0), "int of at least 1", "got 0")


FEATURES = {
    "identity": lambda x: x,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("reweight", [True, False], ids=["cosine", "plain"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("name", FEATURES)
def test_the_ablations_of_the_paper(name: str, is_causal: bool, reweight: bool) -> None:
    q, k, v = inputs(31)
    mask = np.array([[1] * 7, [1] * 4 + [0] * 3], bool)
    phi = FEATURES[name]
    distance = np.arange(7)[:, None] - np.arange(7)
    near = np.cos(np.pi / 2 * distance / 7) if reweight else np.ones((7, 7))
    seen = mask[:, None, None] & (np.tri(7, dtype=bool) if is_causal else True)
    scores = np.einsum("bnth,bnsh->bnts", *(phi(x.swapaxes(1, 2)) for x in (q, k)))
    scores = scores * near * seen
    expected = scores / np.maximum(scores.sum(-1, keepdims=True), 1e-6)

    options = {"feature_map": name, "reweight": reweight, "is_causal": is_causal}
    options |= {"max_length": 7, "mask": mask}

    out = fast_jit(functools.partial(attention.cosformer_attention, **options))(q, k, v)
    scale = max(1.0, float(np.abs(expected).max()))
    assert_close(out / scale, np.einsum("bnts,bsnh->btnh", expected, v) / scale)
