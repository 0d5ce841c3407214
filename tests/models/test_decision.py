"""The decision transformer: causal, exact with padding, the same by a stream."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import call_model

from lra_jax.models import ModelConfig
from lra_jax.models.decision import DecisionTransformer

STATE, ACTION, STEPS = 4, 2, 6
SIZES = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "mlp_dim": 16}


def make(mechanism="flow", horizon=STEPS, **settings):
    config = ModelConfig(
        mechanism=mechanism,
        is_causal=True,
        max_length=3 * horizon,
        **{**SIZES, "positions": "none", **settings},
    )
    return DecisionTransformer(STATE, ACTION, horizon, config=config, rngs=nnx.Rngs(0))


def windows(batch=2, steps=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(batch, steps, x)) for x in (1, STATE, ACTION)]
    times = np.broadcast_to(np.arange(steps, dtype=np.int32), (batch, steps))
    return [*(jnp.asarray(x, jnp.float32) for x in parts), jnp.asarray(times)]


def run(model, *arrays):
    """A call, compiled."""
    return call_model(type(model).__call__, model, *arrays)


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [
        ("softmax", {}),
        ("linear", {"positions": "rotary"}),
        ("cosformer", {}),
        ("flow", {"post_norm": True}),
        ("hgrn", {"short_conv": 3}),
    ],
)
def test_a_stream_acts_as_the_whole_past_does(mechanism, settings):
    model, inputs = make(mechanism, **settings), windows()
    whole = run(model, *inputs)
    assert whole.shape == (2, STEPS, ACTION) and jnp.abs(whole).max() < 1
    past = None
    for step in range(STEPS):
        returns, states, actions, times = (x[:, step] for x in inputs)
        actions = inputs[2][:, step - 1]  # At the first step, it has no effect.
        arrays = returns, states, actions, times, past
        acted, past = call_model(type(model).step, model, *arrays)
        np.testing.assert_allclose(acted, whole[:, step], atol=2e-5)


def test_actions_depend_on_the_past_alone():
    model, inputs = make(), windows(batch=1)

    def action(inputs):
        return model(*inputs, inputs_times)[0, 3].sum()

    inputs_times = inputs.pop()
    returns, states, actions = jax.grad(action)(inputs)
    for grad, last in ((returns, 3), (states, 3), (actions, 2)):
        seen = jnp.abs(grad[0]).max(-1) > 0
        assert seen.tolist() == [step <= last for step in range(STEPS)]


@pytest.mark.parametrize("mechanism", ["softmax", "flow", "local"])
def test_padding_is_exact(mechanism):
    model, inputs = make(mechanism), windows()
    lengths = jnp.array([STEPS, 3])
    both = run(model, *inputs, lengths)
    alone = run(model, *(x[1:, :3] for x in inputs))
    np.testing.assert_allclose(both[1, :3], alone[0], atol=1e-5)
    other = [
        jnp.where(jnp.arange(STEPS).reshape(1, -1, *(1,) * (x.ndim - 2)) < 3, x, 1)
        for x in inputs
    ]
    np.testing.assert_array_equal(run(model, *other, lengths)[1, :3], both[1, :3])


def test_each_input_counts():
    model, inputs = make(), windows(batch=1)
    before = run(model, *inputs)
    for index, change in enumerate((1.0, 1.0, 1.0, -1)):
        changed = [
            x if i != index else x.at[:, 1:].add(change) for i, x in enumerate(inputs)
        ]
        after = run(model, *changed)
        assert jnp.abs(after - before)[0, -1].max() > 1e-3


def test_beyond_the_longest_episode_there_is_no_number():
    model, inputs = make(), windows(batch=1)
    inputs[3] = inputs[3] + 1
    beyond = run(model, *inputs)
    assert jnp.isnan(beyond[0, -1]).all()


@pytest.mark.parametrize(
    ("place", "shape", "message"),
    [
        (0, (2, STEPS, 2), r"returns: expected \[B, T, C\]=\(2, 6, 1\)"),
        (1, (2, STEPS - 1, STATE), r"states: expected \[B, T, C\]=\(2, 6, 4\)"),
        (3, (2,), r"times: expected \[B, T\]"),
    ],
)
def test_refusals(place, shape, message):
    inputs = windows()
    inputs[place] = jnp.zeros(shape, inputs[place].dtype)
    with pytest.raises(ValueError, match=message):
        make()(*inputs)
    with pytest.raises(ValueError, match=r"is_causal: expected True for actions"):
        config = ModelConfig(mechanism="linear", **SIZES)
        DecisionTransformer(STATE, ACTION, 9, config=config, rngs=nnx.Rngs(0))
