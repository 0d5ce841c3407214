"""Decoding: position by position, prompts in one pass, and states that do not grow."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.sums import Chunking

from ..mechanisms import (
    EVERY_CALL,
    KEYWORDS,
    LENGTH,
    LINEAR_STREAMS,
    STREAMS,
    assert_close,
    causal,
    cuts,
    fast_jit,
    gates,
    inputs,
    jitted_causal,
)

CHUNKING = Chunking(2, 4)


# What a stream's state alone needs.
BOUNDED = {"softmax": {"max_length": LENGTH}}


def init(name: str, *sizes: int, **more: Any):
    keywords = KEYWORDS[name] | BOUNDED.get(name, {}) | more
    return getattr(attention, f"{name}_init")(*sizes, **keywords)


def prefill(name: str, *arrays, **more: Any):
    keywords = cuts(name, CHUNKING) | EVERY_CALL[name] | more
    if more.get("state") is None:
        keywords |= KEYWORDS[name] | BOUNDED.get(name, {})
    keywords = gates(name, arrays[1]) | keywords
    return getattr(attention, f"{name}_prefill")(*arrays, **keywords)


def one_step(name: str, **more: Any):
    function = getattr(attention, f"{name}_step")

    def step(state, query, key, value):
        keywords = gates(name, key) | EVERY_CALL[name] | more
        return function(state, query, key, value, **keywords)

    return step


def steps(name: str, state, query, key, value, **more: Any):
    """Every position by a step of its own, in one loop."""
    function = one_step(name, **more)

    def step(state, position):
        out, state = function(state, *position)
        return state, out

    arrays = [jnp.swapaxes(x, 0, 1) for x in (query, key, value)]
    state, out = jax.lax.scan(step, state, arrays)
    return jnp.swapaxes(out, 0, 1), state


@pytest.mark.parametrize("name", LINEAR_STREAMS)
def test_steps_are_the_parallel_form(name: str) -> None:
    arrays = inputs(1, heads=4, key_heads=2, value_dim=3)

    @fast_jit
    def both(arrays):
        by_steps = steps(name, init(name, 2, 4, 4, 3), *arrays)
        return by_steps, prefill(name, *arrays)

    by_steps, at_once = both(arrays)
    jax.tree.map(assert_close, by_steps, at_once)
    assert_close(at_once[0], jitted_causal(name)(*arrays), 1e-6)


@pytest.mark.parametrize("name", STREAMS)
def test_a_prompt_and_steps_are_both(name: str) -> None:
    arrays = inputs(2)

    @fast_jit
    def parts(arrays):
        first, state = prefill(name, *(x[:, :3] for x in arrays))
        second, state = prefill(name, *(x[:, 3:5] for x in arrays), state=state)
        third, state = steps(name, state, *(x[:, 5:] for x in arrays))
        return jnp.concatenate([first, second, third], 1), state

    whole = fast_jit(functools.partial(prefill, name))(*arrays)
    jax.tree.map(assert_close, parts(arrays), whole)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", STREAMS)
def test_prompts_of_several_lengths(name: str, side: str) -> None:
    arrays = inputs(3)
    lengths = (3, 5)
    mask = np.arange(5)[None] < np.array(lengths)[:, None]
    mask = mask if side == "right" else mask[:, ::-1]

    @fast_jit
    def together(arrays):
        _, state = prefill(name, *(x[:, :5] for x in arrays), mask=mask)
        return steps(name, state, *(x[:, 5:] for x in arrays))[0]

    found = np.asarray(together(arrays))
    for row, length in enumerate(lengths):
        prompt = slice(0, length) if side == "right" else slice(5 - length, 5)
        alone = [
            np.concatenate([x[row : row + 1, prompt], x[row : row + 1, 5:]], 1)
            for x in arrays
        ]
        wanted = np.asarray(jitted_causal(name)(*alone))[:, length:]
        assert_close(found[row : row + 1], wanted)


@pytest.mark.parametrize("name", LINEAR_STREAMS)
def test_the_state_has_one_size_and_dtype(name: str) -> None:
    def kinds(state):
        return jax.tree.map(lambda x: (x.shape, x.dtype), state)

    wanted = kinds(init(name, 2, 2, 4))
    assert hasattr(init(name, 2, 2, 4), "_fields")
    for length in (1, 7):
        arrays = inputs(4, query_length=length, length=length)
        for dtype in ("float32", "bfloat16"):
            given = [jnp.asarray(x, dtype) for x in arrays]
            out, state = jax.eval_shape(functools.partial(prefill, name), *given)
            assert out.dtype == dtype
            assert kinds(state) == wanted
            step = functools.partial(steps, name)
            assert kinds(jax.eval_shape(step, state, *given)[1]) == wanted


@pytest.mark.parametrize("name", LINEAR_STREAMS)
def test_float64_states(name: str) -> None:
    with jax.enable_x64(True):
        arrays = [x.astype("float64") for x in inputs(5)]
        both = fast_jit(
            lambda *a: steps(name, init(name, 2, 2, 4, dtype="float64"), *a)
        )
        out, state = both(*arrays)
        assert out.dtype == state.sums.summary.dtype == jnp.float64
        assert_close(out, jitted_causal(name)(*arrays), 1e-13)


@pytest.mark.parametrize("name", STREAMS)
def test_gradients_pass_through_the_state(name: str) -> None:
    arrays = inputs(6)

    @fast_jit
    def both(arrays):
        def streamed(arrays):
            first, state = prefill(name, *(x[:, :4] for x in arrays))
            rest, _ = steps(name, state, *(x[:, 4:] for x in arrays))
            return jnp.sin(jnp.concatenate([first, rest], 1)).sum()

        def parallel(arrays):
            return jnp.sin(causal(name)(*arrays)).sum()

        return jax.grad(streamed)(arrays), jax.grad(parallel)(arrays)

    jax.tree.map(assert_close, *both(arrays))


@pytest.mark.parametrize("name", STREAMS)
def test_positions_are_counted(name: str) -> None:
    q, k, v = inputs(7)
    mask = np.array([[1, 0, 1, 0, 0, 0, 0], [0] * 7], bool)
    state = fast_jit(functools.partial(prefill, name))(q, k, v, mask=mask)[1]
    if name == "flow":  # its means need the numbers of real sinks and sources
        assert state.sources.tolist() == state.sinks.tolist() == [2, 0]
    else:  # one past the last real position
        assert state.position.tolist() == [3, 0]
    one = [x[:, :1] for x in (q, k, v)]
    with_step = fast_jit(functools.partial(steps, name))(state, *one)[1]
    counter = with_step.sources if name == "flow" else with_step.position
    assert counter.tolist() == ([3, 1] if name == "flow" else [4, 1])


def test_flow_options_reach_the_stream() -> None:
    arrays = inputs(8)
    options = {"clip": 0.4, "eps": 1e-2}

    @fast_jit
    def both(arrays):
        by_steps = steps("flow", init("flow", 2, 2, 4), *arrays, **options)[0]
        return by_steps, causal("flow", **options)(*arrays)

    assert_close(*both(arrays))


def test_features_of_another_width() -> None:
    def wide(x):
        return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], -1)

    arrays = inputs(9)
    options = {"feature_map": wide}
    for name in ("linear", "flow"):
        state = init(name, 2, 2, 4, **options)
        assert state.sums.summary.shape == (2, 2, 8, 4)
        call = functools.partial(steps, name, **options)
        assert jax.eval_shape(call, state, *arrays)[0].shape == (2, 7, 2, 4)
    state = init("linear", 2, 2, 4, **options)
    out = fast_jit(functools.partial(steps, "linear", **options))(state, *arrays)[0]
    assert_close(out, fast_jit(causal("linear", **options))(*arrays))


def test_cosformer_beyond_its_length() -> None:
    """Raises where the position is known; else it counts as the last one."""
    q, k, v = inputs(10, query_length=LENGTH, length=LENGTH)
    _, state = fast_jit(functools.partial(prefill, "cosformer"))(q, k, v)
    one = (q[:, 0], k[:, 0], v[:, 0])
    with pytest.raises(ValueError, match=f"max_length: expected at least {LENGTH + 1}"):
        attention.cosformer_step(state, *one)
    with pytest.raises(ValueError, match="max_length"):
        prefill("cosformer", q, k, v, state=state)
    more = [np.concatenate([x, x, x], 1) for x in (q, k, v)]
    out, state = fast_jit(functools.partial(steps, "cosformer"))(state, *more)
    assert np.isfinite(np.asarray(out)).all()
    assert (np.asarray(state.position) == 4 * LENGTH).all()
    # Weights stay positive: the outputs are means of the values, up to rounding.
    low, high = (f(v, axis=1, keepdims=True) for f in (np.min, np.max))
    assert (out > low - 1e-4).all() and (out < high + 1e-4).all()


def _rejects(call, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", LINEAR_STREAMS)
def test_what_does_not_fit(name: str) -> None:
    q, k, v = inputs(11)
    state = init(name, 2, 2, 4)
    step = one_step(name)
    _rejects(lambda: step(state, q, k, v), "query: expected [B, N, H]", "(2, 7, 2, 4)")
    one = [x[:, 0] for x in (q, k, v)]
    _rejects(lambda: step(state, *one[:2], one[2][0]), "value: expected [B, N, Hv]")
    _rejects(lambda: step(state, *(x[:1] for x in one)), "state: expected", "(1, 2, ")
    _rejects(lambda: step(state, *one[:2], one[2][..., :3]), "state: expected summary")
    _rejects(lambda: init(name, 2, 2, 4, dtype="bfloat16"), "dtype: expected float32")
    _rejects(lambda: prefill(name, q, k[:, :5], v[:, :5]), "is_causal", "T=7", "S=5")


def test_cosformer_needs_its_length_from_the_start() -> None:
    q, k, v = inputs(12)
    call = attention.cosformer_prefill
    _rejects(lambda: call(q, k, v), "max_length: expected an int of at least 7", "None")
    _rejects(lambda: call(q, k, v, max_length=6), "at least 7", "got 6")
    state = init("cosformer", 2, 2, 4)
    call = functools.partial(call, state=state, max_length=16)
    _rejects(lambda: call(q, k, v), "max_length: expected None with a state")
    create = attention.cosformer_init
    _rejects(lambda: create(1, 1, 1, max_length=0), "int of at least 1", "got 0")
