"""A layer's stream gives what the layer gives for the whole sequence."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import FAMILY_STREAMS, assert_close, assert_rejects, fast_jit
from flax import nnx
from orbax.checkpoint import v1 as ocp

from lra_jax.attention import linear_attention, linear_prefill
from lra_jax.attention.registry import Mechanism, resolve
from lra_jax.models import MultiHeadAttention, load_arrays, save_arrays
from lra_jax.models.stream import prefill

LENGTH = 10
X = np.random.default_rng(0).normal(size=(2, LENGTH, 8)).astype("float32")


def _layer(mechanism: str | Mechanism, **more) -> MultiHeadAttention:
    settings = {"is_causal": True, "max_length": LENGTH, **more}
    return MultiHeadAttention(2, 8, mechanism=mechanism, rngs=nnx.Rngs(0), **settings)


PARTS = {"short_conv": 3, "gate": True, "local_values": True}


def _stream(layer: MultiHeadAttention, x, first: int = 8):
    out, state = prefill(layer, x[:, :first])
    outs = [out]
    for t in range(first, x.shape[1]):
        out, state = layer.step(state, x[:, t])
        outs.append(out[:, None])
    return jnp.concatenate(outs, 1)


@pytest.mark.parametrize("mechanism", FAMILY_STREAMS)
def test_a_prompt_and_steps_are_the_whole(mechanism: str):
    layer = _layer(mechanism, **PARTS)
    both = fast_jit(lambda x: (_stream(layer, x), layer(x)))
    assert_close(*both(X))


def twice_attention(query, key, value, is_causal=False):
    return 2 * linear_attention(query, key, value, is_causal=is_causal)


def twice_prefill(query, key, value, mask=None, *, state=None):
    out, state = linear_prefill(query, key, value, mask, state=state)
    return 2 * out, state


def lone_attention(query, key, value, is_causal=False):
    return twice_attention(query, key, value, is_causal)


def warm_attention(query, key, value, is_causal=False, temperature=1.0):
    return twice_attention(query / temperature, key, value, is_causal)


def warm_prefill(query, key, value, mask=None, *, state=None):
    return twice_prefill(query, key, value, mask, state=state)


def test_an_option_that_the_stream_would_lose_is_refused():
    entry = Mechanism(name="warm", causal=True, stream=True, function=warm_attention)
    prefill(_layer(entry), jnp.asarray(X))
    layer = _layer(entry, options={"temperature": 0.1})
    parts = "layer: expected warm_prefill to take temperature", "got one without"
    assert_rejects(lambda: prefill(layer, jnp.asarray(X)), *parts)


@pytest.mark.parametrize("name", ["linear", "twice"])
def test_a_mechanism_from_outside_has_its_own_stream(name: str):
    """Not that of a registered mechanism with its name."""
    entry = Mechanism(name=name, causal=True, stream=True, function=twice_attention)
    layer = _layer(entry)
    both = fast_jit(lambda x: (_stream(layer, x), layer(x)))
    assert_close(*both(X))
    lone = dataclasses.replace(entry, function=lone_attention)
    known = dataclasses.replace(resolve("linear"), function=lone_attention)
    for without in (lone, known):
        read = functools.partial(prefill, _layer(without), jnp.asarray(X))
        assert_rejects(read, "layer", "prefill")


@pytest.mark.parametrize("more", [{}, {"rotary": True}, {"short_conv": 1}])
def test_without_parts_and_with_rotary_positions(more: dict):
    layer = _layer("softmax", **more)
    both = fast_jit(lambda x: (_stream(layer, x), layer(x)))
    assert_close(*both(X))


@pytest.mark.parametrize("side", ["right", "left"])
def test_prompts_of_different_lengths_go_on_as_if_alone(side: str):
    layer = _layer("cosformer", rotary=False, **PARTS)
    lengths = (5, 2)
    places = np.arange(5)[None]
    ends = np.array(lengths)[:, None]
    mask = places < ends if side == "right" else places >= 5 - ends
    prompts = np.full((2, 5, 8), np.nan, "float32")
    for row, length in enumerate(lengths):
        prompts[row, mask[row]] = X[row, :length]

    @fast_jit
    def together(prompts, mask):
        out, state = prefill(layer, prompts, mask=mask)
        last = []
        for t in range(3):
            rows = jnp.stack(
                [jnp.asarray(X)[row, n + t] for row, n in enumerate(lengths)]
            )
            out, state = layer.step(state, rows)
            last.append(out)
        return jnp.stack(last, 1)

    expected = [layer(X[r : r + 1, : n + 3])[0, n:] for r, n in enumerate(lengths)]
    assert_close(together(prompts, mask), np.stack(expected))


@pytest.mark.parametrize("mechanism", ["softmax", "cosformer"])
def test_states_are_rolled_back_branched_and_taken_out_of_a_batch(mechanism):
    layer = _layer(mechanism, **PARTS)

    def outputs(x):
        _, state = prefill(layer, x[:, :6])
        first, _ = layer.step(state, x[:, 6])
        _, further = layer.step(state, x[:, 7])
        again, _ = layer.step(state, x[:, 6])
        one = jax.tree.map(lambda a: a[1:], further)
        alone, _ = layer.step(one, x[1:, 8])
        both, _ = layer.step(further, x[:, 8])
        return (first, alone), (again, both[1:])

    for got, expected in zip(*fast_jit(outputs)(X), strict=True):
        assert_close(got, expected)


def test_what_cannot_be_streamed():
    x = jnp.asarray(X)
    assert_rejects(
        lambda: prefill(_layer("linear", is_causal=False), x), "layer", "causal"
    )
    assert_rejects(lambda: prefill(_layer("gau"), x), "layer", "'gau'")
    rotary = _layer("softmax", rotary=True, max_length=None)
    assert_rejects(lambda: prefill(rotary, x), "layer", "max_length")
    assert_rejects(lambda: prefill(_layer("linear"), x[..., :4]), "inputs", "8")
    state = prefill(_layer("linear"), x)[1]
    assert_rejects(lambda: _layer("linear").step(state, x), "inputs", "[B, D]")
    turning = _layer("linear", rotary=True)
    left = np.arange(LENGTH)[None] >= np.array([[0], [3]])
    assert_rejects(lambda: prefill(turning, x, mask=left), "mask", "on the left")
    _, state = prefill(turning, x)
    assert_rejects(lambda: turning.step(state, x[:, 0]), "inputs", "max_length=10")


@pytest.mark.parametrize("window", [0, 3])
def test_a_saved_state_goes_on(window: int, tmp_path):
    """By Orbax, which refuses arrays without entries, and by safetensors."""
    layer = _layer("linear", short_conv=window)
    _, state = prefill(layer, X[:, :5])
    ocp.save_pytree(tmp_path / "orbax", state)
    save_arrays(tmp_path / "state.safetensors", state)
    expected, _ = layer.step(state, X[:, 5])
    shapes = jax.eval_shape(lambda: layer.init_state(2))
    for restored in (
        ocp.load_pytree(tmp_path / "orbax", state),
        load_arrays(tmp_path / "state.safetensors", shapes),
    ):
        assert_close(layer.step(restored, X[:, 5])[0], expected)


def test_states_of_other_layers_and_batches_are_refused():
    layers = {window: _layer("linear", short_conv=window) for window in (0, 3, 4)}
    states = {window: prefill(x, X[:, :5])[1] for window, x in layers.items()}
    one = X[:, 5]
    for window, other in ((3, 4), (4, 3), (3, 0), (0, 3)):
        call = functools.partial(layers[window].step, states[other], one)
        assert_rejects(call, "state.recent: expected")
    for window, layer in layers.items():
        call = functools.partial(layer.step, states[window], one[:1])
        assert_rejects(call, "state.position: expected", "(1,)")
        call = functools.partial(prefill, layer, X[:, :0], state=states[window])
        assert_rejects(call, "inputs: expected at least one position")
