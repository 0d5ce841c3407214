"""Windows of an environment's episodes, for a decision transformer.

The episodes are those of a file, or made first: see `lra_jax.data.control_files`.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from lra_jax.data import checks, control_files, environments
from lra_jax.data.dataset import SPLITS, Rows, SequenceDataset, fingerprint
from lra_jax.data.memory import stream_of
from lra_jax.data.series import describe
from lra_jax.errors import expected

_HELD_OUT = 20  # One episode in this many for validation, and one for the test.


class ControlDataset(SequenceDataset):
    """Windows of an environment's episodes, with the interface of a dataset.

    A window is ``context`` steps of an episode, or all of a shorter one. Training has
    every window, validation and test those side by side. States are standardised by the
    training episodes, and returns are divided by the environment's scale.

    Args:
      name: name of the dataset.
      environment: the one in which its model acts.
      arrays: those of whole episodes, as `control_files.read` returns them.
      context: steps of a window.
      returns: False hides the returns.
      acting, target: see `lra_jax.configs.control.ControlData`.
      seed: fixes which episodes are held out.

    Raises:
      ValueError: fewer than three episodes.
    """

    metric, step_parts = "return", ("return", "state", "action")

    def __init__(
        self,
        name: str,
        environment: environments.Environment,
        arrays: Mapping[str, np.ndarray],
        *,
        context: int,
        returns: bool,
        acting: str,
        target: float | None,
        seed: int,
    ):
        self.name, self.environment = name, environment
        self.context, self.acting, self._shows_returns = context, acting, returns
        self.references = tuple(float(arrays[x]) for x in control_files.REFERENCES)
        if target is None:
            is_d4rl = self.references == environment.references
            target = (is_d4rl and environment.target) or self.references[1]
        self.target = target
        self.max_length = 3 * context
        self.vocab_size, self.num_classes = environment.state_dim, 0
        self.token_shape, self.token_dtype = (self.vocab_size,), np.dtype(np.float32)
        self.decode = describe
        ends = np.flatnonzero(arrays["terminals"] | arrays["timeouts"]) + 1
        sizes = np.diff(ends, prepend=0)
        starts = ends - sizes
        split = _split_episodes(len(sizes), seed)
        self._first = np.repeat(starts, sizes)
        self._actions = arrays["actions"].astype(np.float32)
        totals = [x[::-1].cumsum()[::-1] for x in np.split(arrays["rewards"], starts)]
        self._returns = self.show_returns(np.concatenate(totals))[:, None]
        states = arrays["observations"].astype(np.float64)
        train = states[np.isin(self._first, starts[split["train"]])]
        self.mean, self.deviation = train.mean(0), train.std(0) + 1e-6
        self._states = self.standardise(states)
        self._windows = {
            x: _cut(starts[ids], sizes[ids], context, 1 if x == "train" else context)
            for x, ids in split.items()
        }
        self._lengths, self._labels, self._sources = {}, {}, {}
        for x, (_, lengths) in self._windows.items():
            self._lengths[x] = 3 * lengths.astype(np.int32)
            self._labels[x] = np.zeros((len(lengths), 0), int)
            rows = functools.partial(self._states_of, x)
            self._sources[x] = Rows(len(lengths), rows)
        self.raw = {
            "kind": "vectors",
            "mean": self.mean.tolist(),
            "deviation": self.deviation.tolist(),
            "return_scale": returns / environment.scale,
            "target": target,
        }
        self.fingerprint = fingerprint(
            self._states,
            self._actions,
            self._returns,
            self._first,
            *self._windows.values(),
            np.array(self.references),
        )

    def standardise(self, states: np.ndarray) -> np.ndarray:
        """States of the environment as the model sees them."""
        return ((states - self.mean) / self.deviation).astype(np.float32)

    def show_returns(self, returns: np.ndarray) -> np.ndarray:
        """Returns as the model sees them; 0 if they are hidden."""
        shown = returns / self.environment.scale * self._shows_returns
        return shown.astype(np.float32)

    def normalise(self, episode_return: float) -> float:
        """A return on the scale from 0, random, to 1, expert."""
        random, expert = self.references
        return (episode_return - random) / (expert - random)

    def batch(self, split: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        """See the base class: windows of steps, with zeros after the last."""
        starts, lengths = self._windows[self._check_split(split)][:, ids]
        places = starts[:, None] + np.arange(self.context)
        real = np.arange(self.context) < lengths[:, None]
        places = np.where(real, places, 0)
        returns, states, actions = (
            np.where(real[:, :, None], rows[places], 0)
            for rows in (self._returns, self._states, self._actions)
        )
        return {
            "returns": returns,
            "states": states,
            "actions": actions,
            "times": np.where(real, places - self._first[places], 0).astype(np.int32),
            "lengths": lengths.astype(np.int32),
        }

    def answer(self, split: str, index: int) -> str:
        start, length = self._windows[self._check_split(split)][:, index]
        first = start - self._first[start]
        return f"steps {first} to {first + length - 1} of an episode"

    def _states_of(self, split: str, index: int) -> dict[str, np.ndarray]:
        window = self.batch(split, np.array([index]))
        return {"tokens": window["states"][0, : window["lengths"][0]]}


def _split_episodes(count: int, seed: int) -> dict[str, np.ndarray]:
    """The episodes of each split, in random order."""
    if count < 3:
        raise expected("--data.path", "3 episodes or more", count)
    order = stream_of(seed, "valid").permutation(count)
    held = max(1, count // _HELD_OUT)
    return dict(zip(SPLITS, np.split(order, [-2 * held, -held]), strict=True))


def _cut(
    starts: np.ndarray, sizes: np.ndarray, context: int, stride: int
) -> np.ndarray:
    """The first steps and the lengths of the windows of episodes, `[2, n]`."""
    counts = -(-np.maximum(sizes - context, 0) // stride) + 1
    number = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    offsets = stride * number
    lengths = np.minimum(np.repeat(sizes, counts) - offsets, context)
    return np.stack([np.repeat(starts, counts) + offsets, lengths])


def prepare(
    *,
    data_dir: str | os.PathLike[str] | None,
    path: str | os.PathLike[str] | None,
    environment: str,
    quality: str,
    episodes: int,
    seed: int,
    **settings: Any,
) -> ControlDataset:
    """Reads the episodes of a file, or plays them first; for the settings, see
    `lra_jax.configs.control.ControlData`, and for errors `control_files`."""
    world = environments.make(environment)
    if path is None:
        files = control_files.make(environment, quality, episodes, seed, data_dir)
        name = f"{environment}-{quality}"
    else:
        files = [checks.existing_path(path)]
        name = files[0].stem
    arrays = control_files.read(files, world)
    return ControlDataset(name, world, arrays, seed=seed, **settings)
