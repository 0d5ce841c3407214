"""Files of episodes: what D4RL publishes, and what policies found by a search play.

A file has the arrays of D4RL (Fu et al. 2020, arXiv:2004.07219), step after step:
``observations`` `[N, S]`, ``actions`` `[N, A]` from -1 to 1, ``rewards`` `[N]`, and
``terminals`` and ``timeouts`` `[N]`, True at the last step of an episode; ``.hdf5`` as
D4RL has them, or ``.npz``. Steps after the last end are left out. ``random_return``
and ``expert_return`` are the returns that count as 0 and 1; without them they are
D4RL's.

Without a file, episodes are played by random actions and by policies that a search
found, and kept: see the qualities in docs/control.md.
"""

import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lra_jax.data import checks, environments
from lra_jax.data.environments import Environment, Episodes
from lra_jax.errors import expected, reason, within, writable
from lra_jax.files import check_regular, expand_home, lock

REFERENCES = ("random_return", "expert_return")

_ARRAYS = ("observations", "actions", "rewards", "terminals", "timeouts")
_NOISE = 0.3  # Standard deviation of what is added to a policy's actions.
_MEASURED = 100  # Episodes from which the return of the best policy is estimated.


def read(
    files: Sequence[pathlib.Path], environment: Environment
) -> dict[str, np.ndarray]:
    """The episodes of files, one after the other, with the references of the first.

    Raises:
      ValueError: a file is malformed, or of another environment; the message names it
        and the array.
      OSError: it cannot be read.
    """
    parts = []
    for file in files:
        is_hdf5 = file.suffix == ".hdf5"
        kind = "an .hdf5 or .npz file"
        arrays = _read_hdf5(file) if is_hdf5 else checks.read_npz(file, kind)
        try:
            parts.append(_check(arrays, environment))
        except ValueError as error:
            raise within(str(file), error) from None
    joined = {name: np.concatenate([part[name] for part in parts]) for name in _ARRAYS}
    return joined | {name: parts[0][name] for name in REFERENCES}


def _read_hdf5(file: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        import h5py
    except ImportError as error:
        needed = "an .npz file, or `pip install lra_jax[control]` for .hdf5"
        raise expected("--data.path", needed, file) from error
    check_regular(file)
    try:
        with h5py.File(file) as archive:
            names = [name for name in (*_ARRAYS, *REFERENCES) if name in archive]
            return {name: np.asarray(archive[name]) for name in names}
    except Exception as error:  # A damaged file raises whatever its parser meets.
        raise expected(str(file), "an .hdf5 file", reason(error)) from error


def _check(
    arrays: Mapping[str, np.ndarray], environment: Environment
) -> dict[str, np.ndarray]:
    """The arrays of whole episodes, with both references; refuses others."""
    count = len(np.atleast_1d(arrays.get("observations", ())))
    widths = {"observations": [environment.state_dim]}
    widths |= {"actions": [environment.action_dim]}
    for name in _ARRAYS:
        shape = [count, *widths.get(name, ())]
        is_number = name in _ARRAYS[:3]
        needed = f"{'numbers' if is_number else 'booleans'} {shape} of this environment"
        array = checks.take(arrays, name, needed, "fiu" if is_number else "b", shape)
        most, needed = 1e30, "finite numbers"
        if name == "actions":
            most, needed = 1, "numbers from -1 to 1"
        if not np.abs(array).max(initial=0) <= most:
            raise expected(name, needed, "others")
    ends = np.flatnonzero(arrays["terminals"] | arrays["timeouts"]) + 1
    longest = int(np.diff(ends, prepend=0).max(initial=0))
    if not 0 < longest <= environment.horizon:
        needed = f"an end of each episode, after at most {environment.horizon} steps"
        raise expected("timeouts", needed, f"{longest} steps" if longest else "none")
    kept = dict(
        zip(REFERENCES, map(np.array, environment.references or ()), strict=False)
    )
    kept |= {name: arrays[name] for name in REFERENCES if name in arrays}
    for name in REFERENCES:
        if name not in kept or kept[name].shape or not np.isfinite(kept[name]):
            raise expected(name, "a number", kept.get(name))
    if not kept["random_return"] < kept["expert_return"]:
        needed = f"more than random_return={kept['random_return']}"
        raise expected("expert_return", needed, kept["expert_return"])
    return kept | {name: arrays[name][: ends[-1]] for name in _ARRAYS}


def make(
    name: str,
    quality: str,
    episodes: int,
    seed: int,
    data_dir: str | os.PathLike[str] | None = None,
) -> list[pathlib.Path]:
    """The files of a quality; those of all qualities are made first if need be. For
    errors, see `lra_jax.data.builder.prepare` and `environments.make`."""
    root = data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    root = expand_home(root, "--data.dir").absolute() / "control"
    folder = root / f"{name}-{episodes}-seed{seed}"
    with writable("--data.dir", "a folder", root):
        root.mkdir(parents=True, exist_ok=True)
    with lock(root / ".lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=root) as unfinished:
                partial = pathlib.Path(unfinished, folder.name)
                partial.mkdir()
                for stage, arrays in _play_all(name, episodes, seed).items():
                    np.savez_compressed(partial / f"{stage}.npz", **arrays)
                partial.rename(folder)
    stages = ("medium", "expert") if quality == "medium-expert" else (quality,)
    return [folder / f"{stage}.npz" for stage in stages]


def _play_all(name: str, count: int, seed: int) -> dict[str, Any]:
    """The arrays of each file."""
    environment = environments.make(name)
    weights, returns = environments.search(
        environment, environments.SEARCHES[name], seed
    )
    rng = np.random.default_rng((seed, 1))
    seeds = rng.integers(2**31, size=max(count, _MEASURED)).tolist()
    size = environment.action_dim

    def play(weights: np.ndarray, noise: float = _NOISE) -> Episodes:
        linear = environments.apply_policies(environment, weights)

        def act(step: int, states: np.ndarray, rewards: np.ndarray) -> np.ndarray:
            actions = linear(step, states, rewards)
            return actions + noise * rng.standard_normal((len(states), size))

        return environments.play(environment, act, seeds[: len(weights)])

    def uniform(step: int, states: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        return rng.uniform(-1, 1, (len(states), size))

    drawn = environments.play(environment, uniform, seeds[:count])
    low, best = drawn.returns.mean(), returns.argmax()
    high = play(weights[np.full(_MEASURED, best)], noise=0.0).returns.mean()
    # The first policy halfway from random to the best.
    half = int((returns >= (low + returns.max()) / 2).argmax())
    policies = {
        "medium": np.full(count, half),
        "expert": np.full(count, best),
        "medium-replay": np.arange(count) * (half + 1) // count,
    }
    stages = {"random": drawn} | {x: play(weights[y]) for x, y in policies.items()}
    references = dict(zip(REFERENCES, (low, high), strict=True))
    return {stage: _flat(x, environment) | references for stage, x in stages.items()}


def _flat(episodes: Episodes, environment: Environment) -> dict[str, np.ndarray]:
    """Episodes as D4RL has them, step after step."""
    real, lengths = episodes.real, episodes.lengths[:, None]
    last = np.arange(real.shape[1]) == lengths - 1
    in_time = lengths < environment.horizon
    return {
        "observations": episodes.states[real].astype(np.float32),
        "actions": np.clip(episodes.actions[real], -1, 1).astype(np.float32),
        "rewards": episodes.rewards[real],
        "terminals": (last & in_time)[real],
        "timeouts": (last & ~in_time)[real],
    }
