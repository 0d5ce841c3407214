"""Environments to act in, several episodes at a time, and policies found by search.

pendulum is our own: a rod is to be swung up and balanced by a torque that is too weak
to lift it at once, in 100 steps of 0.05 s, with the constants of the classic task.
hopper, halfcheetah and walker2d are gymnasium's Hopper-v5, HalfCheetah-v5 and
Walker2d-v5, of 1,000 steps; they need the extra control.

Policies are linear in features of the state, and found by augmented random search
(Mania, Guy and Recht 2018, arXiv:1803.07055, V2-t): a policy moves along random
directions by the difference of the returns on both sides; the best few directions
count, divided by the deviation of their returns, and states are standardised.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lra_jax.errors import expected

Act = Callable[[int, np.ndarray, np.ndarray], np.ndarray]
"""``(step, states [n, S], last rewards [n]) -> actions [n, A]``, from -1 to 1."""


class Environment(abc.ABC):
    """Episodes that advance together.

    Attributes:
      state_dim, action_dim: sizes S and A.
      horizon: the longest episode, in steps.
      scale: a model sees returns divided by this.
      bonus: the reward of each step for not having ended, which a search leaves out.
      target: the return to ask of a model that was trained on D4RL's data; None = there
        are none.
      references: the returns of D4RL's random and expert policies.
    """

    state_dim: int
    action_dim: int
    horizon: int
    scale: float
    bonus: float = 0.0
    target: float | None = None
    references: tuple[float, float] | None = None

    @abc.abstractmethod
    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        """Begins an episode for each seed, and returns the states `[n, S]`."""

    @abc.abstractmethod
    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next states `[n, S]`, the rewards `[n]`, and which episodes ended."""

    def features(self, states: np.ndarray) -> np.ndarray:
        """The features `[n, F]` of the searched policies: here, the state."""
        return states


class Pendulum(Environment):
    """``w' = w + dt (3 g / 2 sin(x) + 3 u)``, ``x' = x + dt w'``, x = 0 upright.

    With g = 10, dt = 0.05, a torque u of at most 2, and a speed w of at most 8. The
    reward is ``-(x^2 + 0.1 w^2 + 0.001 u^2)`` with x in [-pi, pi]; the state is
    ``(cos x, sin x, w / 8)``; episodes begin within 0.5 of hanging, at speeds up to 1.
    """

    state_dim, action_dim, horizon, scale = 3, 1, 100, 300.0

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        draws = [np.random.default_rng(seed).uniform(-1, 1, 2) for seed in seeds]
        angle, self._speed = np.array(draws).T
        self._angle = np.pi + angle / 2
        return self._state()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        torque = 2 * np.clip(actions[:, 0], -1, 1)
        angle = (self._angle + np.pi) % (2 * np.pi) - np.pi
        rewards = -(angle**2 + 0.1 * self._speed**2 + 0.001 * torque**2)
        push = 15 * np.sin(self._angle) + 3 * torque
        self._speed = np.clip(self._speed + 0.05 * push, -8, 8)
        self._angle = self._angle + 0.05 * self._speed
        return self._state(), rewards, np.zeros(len(actions), bool)

    def features(self, states: np.ndarray) -> np.ndarray:
        """The state and products of its parts: no linear policy can swing it up."""
        cos, sin, speed = states.T
        products = cos * sin, cos * speed, sin * speed, speed * np.abs(speed)
        return np.stack([cos, sin, speed, *products], 1)

    def _state(self) -> np.ndarray:
        parts = np.cos(self._angle), np.sin(self._angle), self._speed / 8
        return np.stack(parts, 1)


class Gymnasium(Environment):
    """An environment of gymnasium, with one simulator per episode; a ``ValueError`` if
    it or mujoco is not installed."""

    horizon, scale = 1_000, 1_000.0  # As in the code of Chen et al. 2021.

    def __init__(self, name: str, bonus: float, target: float, references: Any):
        try:
            import gymnasium

            self._make = lambda: gymnasium.make(name)
            self._simulators: list[Any] = [self._make()]
        except ImportError as error:
            needed = "pendulum, or `pip install lra_jax[control]` for the others"
            raise expected("--data.environment", needed, name) from error
        one = self._simulators[0]
        (self.state_dim,) = one.observation_space.shape
        (self.action_dim,) = one.action_space.shape
        self.bonus, self.target, self.references = bonus, target, references

    def reset(self, seeds: Sequence[int]) -> np.ndarray:
        while len(self._simulators) < len(seeds):
            self._simulators.append(self._make())
        starts = zip(self._simulators, seeds, strict=False)
        self._states = np.stack([one.reset(seed=seed)[0] for one, seed in starts])
        self._ended = np.zeros(len(seeds), bool)
        return self._states.copy()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See the base class; an episode that has ended stays as it is."""
        rewards = np.zeros(len(actions))
        actions = np.clip(actions, -1, 1).astype(np.float32)
        for index in np.flatnonzero(~self._ended):
            after = self._simulators[index].step(actions[index])
            self._states[index], rewards[index], *ends = after[:4]
            self._ended[index] = any(ends)
        return self._states.copy(), rewards, self._ended.copy()


# The name in gymnasium; bonus, target and references of `Environment`.
_GYMNASIUM: dict[str, tuple[str, float, float, tuple[float, float]]] = {
    "hopper": ("Hopper-v5", 1.0, 3_600.0, (-20.272305, 3234.3)),
    "halfcheetah": ("HalfCheetah-v5", 0.0, 12_000.0, (-280.178953, 12135.0)),
    "walker2d": ("Walker2d-v5", 1.0, 5_000.0, (1.629008, 4592.3)),
}


def make(name: str) -> Environment:
    """An environment by its name; for errors, see `Gymnasium`."""
    return Pendulum() if name == "pendulum" else Gymnasium(*_GYMNASIUM[name])


class Episodes(NamedTuple):
    """Episodes that were played."""

    states: np.ndarray  # [n, T, S]
    actions: np.ndarray  # [n, T, A]
    rewards: np.ndarray  # [n, T], 0 after the end
    lengths: np.ndarray  # [n], steps until the end

    @property
    def returns(self) -> np.ndarray:
        """The sum of the rewards of each, `[n]`."""
        return self.rewards.sum(1)

    @property
    def real(self) -> np.ndarray:
        """Which steps come before the end, `[n, T]`."""
        return np.arange(self.rewards.shape[1]) < self.lengths[:, None]


def play(environment: Environment, act: Act, seeds: Sequence[int]) -> Episodes:
    """Plays an episode for each seed."""
    states, rewards = environment.reset(seeds), np.zeros(len(seeds))
    goes_on, lengths = np.ones(len(seeds), bool), np.zeros(len(seeds), int)
    played = []
    for step in range(environment.horizon):
        actions = act(step, states, rewards)
        after, rewards, ended = environment.step(actions)
        rewards = np.where(goes_on, rewards, 0)
        played.append((states, actions, rewards))
        lengths += goes_on
        states, goes_on = after, goes_on & ~ended
        if not goes_on.any():
            break
    states, actions, rewards = (np.stack(x, 1) for x in zip(*played, strict=True))
    return Episodes(states, actions, rewards, lengths)


class Search(NamedTuple):
    """The settings of a search."""

    updates: int
    directions: int  # tried for each update
    best: int  # of the directions, which make the update
    step: float  # size of an update
    noise: float  # size of a direction
    episodes: int = 1  # for each side of a direction


SEARCHES = {
    "pendulum": Search(60, 16, 8, step=0.2, noise=0.5, episodes=4),
    # Sizes of the paper's Table 9; fewer updates.
    "hopper": Search(300, 8, 4, step=0.01, noise=0.025),
    "halfcheetah": Search(100, 32, 4, step=0.02, noise=0.03),
    "walker2d": Search(150, 40, 30, step=0.03, noise=0.025),
}


def apply_policies(environment: Environment, weights: np.ndarray) -> Act:
    """Acts by linear policies, one for each episode: ``weights`` is `[n, A, F + 1]`."""

    def act(step: int, states: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        features = environment.features(states)[:, None]
        # A sum, not a product of matrices, which libraries round in their own ways.
        return np.clip((weights[..., :-1] * features).sum(-1) + weights[..., -1], -1, 1)

    return act


def fold(weights: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Weights of standardised features as those of plain ones and a constant; ``sums``
    `[3, F]` are those of 1, of the features and of their squares."""
    count, total, squares = sums
    mean = total / count
    scaled = weights / np.sqrt(np.maximum(squares / count - mean**2, 1e-8))
    return np.concatenate([scaled, -(scaled * mean).sum(-1, keepdims=True)], -1)


def search(
    environment: Environment, settings: Search, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Augmented random search for a policy of a high return.

    Returns:
      The policies in order, `[updates, A, F + 1]`, of which the last column is
      constant, and the mean return of the directions around each, `[updates]`.
    """
    rng = np.random.default_rng(seed)
    size = environment.features(environment.reset([0])).shape[1]
    policy = np.zeros((environment.action_dim, size))
    sums = np.stack([np.ones(size), np.zeros(size), np.ones(size)])
    kept, returns = [], []
    for _ in range(settings.updates):
        moves = rng.standard_normal((settings.directions, *policy.shape))
        sides = policy + settings.noise * np.concatenate([moves, -moves])
        weights = np.repeat(fold(sides, sums), settings.episodes, 0)
        seeds = rng.integers(2**31, size=len(weights)).tolist()
        episodes = play(environment, apply_policies(environment, weights), seeds)
        kept.append(fold(policy, sums))
        returns.append(episodes.returns.mean())
        scores = episodes.returns - environment.bonus * episodes.lengths
        plus, minus = scores.reshape(2, settings.directions, -1).mean(-1)
        best = np.argsort(-np.maximum(plus, minus), kind="stable")[: settings.best]
        spread = np.concatenate([plus[best], minus[best]]).std() + 1e-8
        gain = (plus - minus)[best, None, None] * moves[best]
        policy = policy + settings.step / (settings.best * spread) * gain.sum(0)
        rows = environment.features(episodes.states[episodes.real])
        sums += [np.full(size, len(rows)), rows.sum(0), (rows**2).sum(0)]
    return np.stack(kept), np.array(returns)
