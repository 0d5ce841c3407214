"""Decoding: position by position, prompts in one pass, and states that do not grow."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import (
    FAMILY,
    FAMILY_STREAMS,
    ROWS,
    STREAMS,
    assert_close,
    assert_rejects,
    case,
    fast_jit,
    gradients,
    init,
    inputs,
    jitted,
    one_step,
    prefill,
    row_inputs,
    run,
    steps,
)

# Those with a state of sums, whose size depends on no length.
LINEAR_STREAMS = tuple(name for name in STREAMS if case(name).cache is None)


@pytest.mark.parametrize("name", LINEAR_STREAMS)
def test_steps_are_the_parallel_form(name: str) -> None:
    """In float64, so that the states must be wide, too."""
    arrays = inputs(1, heads=4, key_heads=2, value_dim=3)

    @fast_jit
    def each(arrays):
        start = init(name, 2, 4, 4, 3, dtype="float64")
        by_steps = steps(name, start, *arrays)
        return by_steps, prefill(name, *arrays), run(name, "causal")(*arrays)

    with jax.enable_x64(True):
        by_steps, at_once, parallel = each([x.astype("float64") for x in arrays])
        assert by_steps[0].dtype == by_steps[1].sums.summary.dtype == jnp.float64
        assert_close(by_steps, at_once, 1e-13)
        assert_close(at_once[0], parallel, 1e-13)


def _wide(x):
    return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], -1)


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"feature_map": _wide, "eps": 0.1}),
    ("cosformer", {"feature_map": "elu"}),
    ("cosformer", {"feature_map": "elu", "reweight": False}),
    ("flow", {"competition": False}),
    ("flow", {"allocation": False}),
    ("flow", {"feature_map": _wide, "clip": 0.4, "eps": 1e-2}),
    ("norm", {"norm": "layer", "per_head": True, "eps": 0.1, "feature_map": "relu"}),
    ("performer", {"kernel": "relu", "feature_eps": 1e-2}),
    ("performer", {"hyperbolic": True, "scale": 0.4}),
    ("retention", {"rotate": False, "norm": "rms"}),
    ("lightning", {"feature_map": "silu", "norm": "rms"}),
    ("delta", {"beta_range": 2.0}),
    ("gated_delta", {"beta_range": 2.0, "norm": None}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options_reach_the_stream(name: str, options: dict[str, Any]) -> None:
    """After a prompt, and from the first position."""
    known = inspect.signature(getattr(attention, f"{name}_init")).parameters
    of_init = {option: x for option, x in options.items() if option in known}

    @fast_jit
    def each(arrays):
        first, state = prefill(name, *(x[:, :3] for x in arrays), **options)
        rest, _ = steps(name, state, *(x[:, 3:] for x in arrays), **options)
        every, _ = steps(name, init(name, 2, 2, 4, **of_init), *arrays, **options)
        whole = run(name, "causal", **options)(*arrays)
        return (jnp.concatenate([first, rest], 1), every), (whole, whole)

    assert_close(*each(inputs(2)))


@pytest.mark.parametrize("name", STREAMS)
def test_prompts_of_several_lengths(name: str) -> None:
    """Padded on the right and on the left."""
    q, k, v = inputs(3)
    arrays = [x[[0, 1, 0, 1]] for x in (q, k, v)]
    prompts = slice(0, 3), slice(0, 5), slice(2, 5), slice(1, 5)
    mask = np.zeros((4, 5), bool)
    for row, prompt in zip(mask, prompts, strict=True):
        row[prompt] = True

    @fast_jit
    def together(arrays):
        _, state = prefill(name, *(x[:, :5] for x in arrays), mask=mask)
        return steps(name, state, *(x[:, 5:] for x in arrays))[0]

    # What each row has, from its first position on.
    real = np.pad(mask, [(0, 0), (0, 2)], constant_values=True)
    order = np.argsort(~real, axis=1, kind="stable")[..., None, None]
    left = [np.take_along_axis(x, order, 1) for x in arrays]
    count = real.sum(1)[:, None]
    whole = jitted(name, "causal")(*left, np.arange(7)[None] < count)
    last = np.concatenate([count - 2, count - 1], 1)[..., None, None]
    expected = np.take_along_axis(np.asarray(whole), last, 1)
    assert_close(list(together(arrays)), list(expected))


@pytest.mark.parametrize("name", [x for x in LINEAR_STREAMS if x in FAMILY])
def test_the_state_has_one_size_and_dtype(name: str) -> None:
    def kinds(state):
        return jax.tree.map(lambda x: (x.shape, x.dtype), state)

    expected = kinds(init(name, 2, 2, 4))
    assert hasattr(init(name, 2, 2, 4), "_fields")
    for length, dtype in ((1, "float32"), (7, "bfloat16")):
        shape = jax.ShapeDtypeStruct((2, length, 2, 4), dtype)
        arguments = [shape, shape, shape]
        out, state = jax.eval_shape(functools.partial(prefill, name), *arguments)
        assert out.dtype == dtype
        assert kinds(state) == expected
        step = functools.partial(steps, name)
        assert kinds(jax.eval_shape(step, state, *arguments)[1]) == expected


@pytest.mark.parametrize("name", FAMILY_STREAMS)
def test_prompts_and_steps_are_one_pass(name: str) -> None:
    """A prompt, another and steps: output, state and gradients."""
    arrays, upstream = row_inputs(6)

    def parts(*arrays):
        first, state = prefill(name, *(x[:, :5] for x in arrays))
        second, state = prefill(name, *(x[:, 5:11] for x in arrays), state=state)
        third, state = steps(name, state, *(x[:, 11:] for x in arrays))
        return jnp.concatenate([first, second, third], 1), state

    @fast_jit
    def streamed(*arrays):
        out, pullback, state = jax.vjp(parts, *arrays, has_aux=True)
        return (out, pullback(upstream)), state

    whole = gradients(name, "causal")(*arrays, np.ones_like(ROWS), upstream)
    assert_close(streamed(*arrays), (whole, prefill(name, *arrays)[1]))


@pytest.mark.parametrize("name", FAMILY_STREAMS)
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


@pytest.mark.parametrize("name", [x for x in LINEAR_STREAMS if x in FAMILY])
def test_what_does_not_fit(name: str) -> None:
    q, k, v = inputs(11)
    state = init(name, 2, 2, 4)
    step = one_step(name)
    assert_rejects(
        lambda: step(state, q, k, v), "query: expected [B, N, H]", "(2, 7, 2, 4)"
    )
    one = [x[:, 0] for x in (q, k, v)]
    assert_rejects(
        lambda: step(state, *one[:2], one[2][0]), "value: expected [B, N, Hv]"
    )
    assert_rejects(lambda: step(state, *(x[:1] for x in one)), "state: expected", "(1,")
    assert_rejects(
        lambda: step(state, *one[:2], one[2][..., :3]), "state: expected summary"
    )
    assert_rejects(
        lambda: init(name, 2, 2, 4, dtype="bfloat16"), "dtype: expected float32"
    )
    assert_rejects(lambda: init(name, 2, 2, 4, 0), "value", "got (2, 1, 2, 0)")
    assert_rejects(
        lambda: prefill(name, q, k[:, :5], v[:, :5]), "is_causal", "T=7", "S=5"
    )


@pytest.mark.parametrize("name", FAMILY_STREAMS)
def test_states_travel(name: str) -> None:
    """Chosen, repeated, put into another batch, written down: every sample goes on."""
    arrays = inputs(41, batch=3, query_length=6, length=6)
    further = [x[:, 0] for x in inputs(42, batch=3, query_length=1, length=1)]
    _, state = prefill(name, *arrays)
    step = fast_jit(one_step(name))
    expected, _ = step(state, *further)
    # Samples of different ages: the second starts after two positions.
    _, young = prefill(name, *(x[1:2, :2] for x in arrays))
    young_out, _ = step(young, *(x[1:2] for x in further))

    def rows(index: np.ndarray, tree: Any) -> Any:
        return jax.tree.map(lambda x: x[index] if x.ndim else x, tree)

    order = np.array([2, 0, 2])
    out, _ = step(rows(order, state), *(x[order] for x in further))
    assert_close(out, np.asarray(expected)[order], 1e-6)
    joined = jax.tree.map(
        lambda x, new: x.at[1].set(new[0]) if x.ndim else x, state, young
    )
    out, _ = step(joined, *further)
    together = np.asarray(expected).copy()
    together[1] = np.asarray(young_out)[0]
    assert_close(out, together, 1e-6)
    # As bytes and back; and the state before is what it was.
    leaves, structure = jax.tree.flatten(state)
    copies = [np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape) for x in leaves]
    out, _ = step(jax.tree.unflatten(structure, map(jnp.asarray, copies)), *further)
    np.testing.assert_array_equal(out, expected)
    shapes = jax.eval_shape(lambda: init(name, 3, *arrays[0].shape[2:]))
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, state)


@pytest.mark.parametrize("name", LINEAR_STREAMS)
def test_a_state_of_another_mechanism_is_refused(name: str) -> None:
    """Also where the shapes agree."""
    arrays = inputs(1)
    states = {x: init(x, 2, *arrays[0].shape[2:]) for x in LINEAR_STREAMS}
    half = jax.tree.map(lambda x: x.astype("bfloat16"), states[name].sums)
    states[name] = states[name]._replace(sums=half)
    one = [x[:, 0] for x in arrays]
    for state in states.values():
        for step in (one_step(name), one_step("softmax")):
            assert_rejects(
                lambda state=state, step=step: step(state, *one), "state: expected"
            )
