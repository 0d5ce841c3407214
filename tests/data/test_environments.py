"""Environments, and the search for policies that act in them."""

import importlib.util
import math
import sys
from typing import Any

import numpy as np
import pytest

from lra_jax.data import environments
from lra_jax.data.environments import SEARCHES, Pendulum, play, search

QUICK = SEARCHES["pendulum"]._replace(updates=12)
needs_gymnasium = pytest.mark.skipif(
    not importlib.util.find_spec("mujoco"), reason="needs the extra control"
)


def still(step, states, rewards):
    return np.zeros((len(states), 1))


def test_a_step_of_the_pendulum():
    pendulum = Pendulum()
    cos, sin, speed = pendulum.reset([7])[0].tolist()
    angle, speed = math.atan2(sin, cos), 8 * speed
    assert abs(speed) <= 1 and math.pi - abs(angle) <= 0.5
    (state,), (reward,), (ended,) = pendulum.step(np.array([[0.5]]))
    assert reward == pytest.approx(-(angle**2 + 0.1 * speed**2 + 0.001 * 1.0**2))
    faster = speed + 0.05 * (15 * math.sin(angle) + 3 * 1.0)
    after = angle + 0.05 * faster
    np.testing.assert_allclose(state, [math.cos(after), math.sin(after), faster / 8])
    assert not ended


@needs_gymnasium
@pytest.mark.filterwarnings("ignore")
def test_the_pendulum_moves_as_that_of_gymnasium():
    import gymnasium

    theirs: Any = gymnasium.make("Pendulum-v1", g=10.0).unwrapped
    ours = Pendulum()
    cos, sin, speed = ours.reset([1])[0].tolist()
    theirs.reset(seed=0)
    theirs.state = np.array([math.atan2(sin, cos), 8 * speed])
    for action in np.random.default_rng(0).uniform(-1, 1, (30, 1)):
        state, reward, *_ = theirs.step(2 * action)
        (mine,), (got,), _ = ours.step(action[None])
        np.testing.assert_allclose(mine * [1, 1, 8], state, atol=1e-5)
        assert got == pytest.approx(reward)


def test_episodes_depend_on_their_own_seed_alone():
    several = play(Pendulum(), still, [3, 4, 5])
    one = play(Pendulum(), still, [4])
    assert several.states.shape == (3, 100, 3) and several.lengths.tolist() == [100] * 3
    np.testing.assert_array_equal(several.states[1], one.states[0])
    np.testing.assert_allclose(several.returns[1], one.returns[0])
    assert len({*several.returns.tolist()}) == 3


def test_a_search_is_reproducible_and_finds_better_policies():
    once, twice = (search(Pendulum(), QUICK, seed=3) for _ in range(2))
    assert once[0].shape == (12, 1, 8) and once[1].shape == (12,)
    np.testing.assert_array_equal(once[0], twice[0])
    assert once[1][-1] > once[1][0] + 200
    assert not np.array_equal(search(Pendulum(), QUICK, seed=4)[0], once[0])


def test_policies_see_standardised_features():
    pendulum, rows = Pendulum(), np.random.default_rng(0).normal(3, 5, (10_000, 7))
    sums = np.stack([np.full(7, len(rows)), rows.sum(0), (rows**2).sum(0)])
    weights = np.ones((1, 1, 7)) * 0.01
    folded = environments.fold(weights, sums)
    standardised = 0.01 * ((rows - rows.mean(0)) / rows.std(0)).sum(1)
    pendulum.features = lambda states: states
    act = environments.apply_policies(pendulum, np.repeat(folded, len(rows), 0))
    acted = act(0, rows, np.zeros(len(rows)))[:, 0]
    np.testing.assert_allclose(acted, standardised, atol=1e-2)


@needs_gymnasium
@pytest.mark.filterwarnings("ignore")
def test_an_episode_of_gymnasium_ends_and_can_be_repeated():
    hopper = environments.make("hopper")
    assert (hopper.state_dim, hopper.action_dim) == (11, 3)

    def act(step, states, rewards):
        return np.full((len(states), 3), 0.1)

    once, twice = (play(hopper, act, seeds) for seeds in ([5, 6], [6]))
    length = twice.lengths[0]
    assert 1 < length < 1_000
    np.testing.assert_array_equal(once.states[1, :length], twice.states[0])
    np.testing.assert_allclose(once.returns[1], twice.returns[0])
    assert not once.rewards[1, length:].any()


def test_an_environment_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"--data\.environment: .*lra_jax\[control\]"):
        environments.make("walker2d")
