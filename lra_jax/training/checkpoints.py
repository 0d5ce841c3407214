"""Checkpoints with Orbax: the latest one, and the best on validation.

``checkpoints/latest/STEP`` holds the whole state and the position in the data, to go
on from; ``checkpoints/best/STEP`` the parameters that scored best. An interrupted save
leaves a temporary folder that Orbax ignores and removes.
"""

import contextlib
import logging
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from orbax.checkpoint import v1 as ocp

from lra_jax.configs.base import BestBy
from lra_jax.training.step import TrainState


class Progress(NamedTuple):
    """What the loop itself has to remember.

    Attributes:
      best_step: step of the best checkpoint, or -1 before the first.
      best_accuracy: its validation accuracy, in [0, 1].
      best_loss: its validation loss, in nats.
      seconds: time spent training so far, over all sessions.
    """

    best_step: int = -1
    best_accuracy: float = -1.0
    best_loss: float = math.inf
    seconds: float = 0.0

    def improved(self, means: dict[str, float], best_by: BestBy) -> bool:
        """Whether validation scores are better than those of the best checkpoint."""
        if best_by == "loss":
            return means["loss"] < self.best_loss
        return means["accuracy"] > self.best_accuracy


class Checkpoints:
    """The checkpoints of one run directory.

    Args:
      workdir: the run directory.
      clean: remove what interrupted saves left; not for a reader, since the run may be
        under way in another process.
    """

    def __init__(self, workdir: Path, clean: bool = True):
        # Orbax reports every step of its work; what matters is printed by the loop.
        logging.getLogger("absl").setLevel(logging.ERROR)
        training: Any = ocp.training  # Its annotations refuse its own policies.
        keep_one = training.preservation_policies.LatestN(1)
        always = training.save_decision_policies.FixedIntervalPolicy(1)
        self._folder = folder = workdir.absolute() / "checkpoints"
        self._latest, self._best = (
            training.Checkpointer(
                folder / name,
                preservation_policy=keep_one,
                save_decision_policy=always,
                cleanup_tmp_directories=clean,
            )
            for name in ("latest", "best")
        )

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None if there is none."""
        return self._latest.latest.step if self._latest.latest else None

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint, None if there is none."""
        return self._best.latest.step if self._best.latest else None

    def save_latest(
        self, step: int, state: TrainState, progress: Progress, data: Any
    ) -> None:
        """Saves all that a later session needs to go on."""
        if self.latest_step == step:
            return
        items = {"state": state._asdict(), "progress": progress._asdict(), "data": data}
        self._latest.save_checkpointables(step, items, force=True)

    def save_best(self, step: int, params: nnx.State) -> None:
        """Saves parameters as the best so far, in place of earlier ones."""
        # A session that died after this save repeats the same steps to the same bits.
        if self.best_step is not None and self.best_step >= step:
            return
        self._best.save_checkpointables(step, {"params": params}, force=True)

    def restore(self, state: TrainState, data: Any) -> tuple[TrainState, Progress]:
        """Loads the newest checkpoint into the shapes and places of ``state``.

        Raises:
          ValueError: it does not hold such a state; so do the loaders below.
        """
        items = {
            "state": _abstract(state._asdict()),
            "progress": Progress()._asdict(),
            "data": data,
        }
        loaded = _load(self._latest, items)
        return TrainState(**loaded["state"]), Progress(**loaded["progress"])

    def load_params(
        self, which: Literal["best", "last"], state: TrainState
    ) -> tuple[nnx.State, int]:
        """Loads the parameters of a checkpoint, and says of which step they are.

        Raises:
          ValueError: there is no such checkpoint.
        """
        step = self.best_step if which == "best" else self.latest_step
        if step is None:
            raise ValueError(f"{self._folder.parent} holds no {which} checkpoint yet")
        if which == "best":
            items = {"params": _abstract(state.params)}
            return _load(self._best, items)["params"], step
        items = {"state": _abstract(state._asdict())}
        return _load(self._latest, items)["state"]["params"], step

    def close(self) -> None:
        """Waits for saves under way."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._latest.close)
            stack.callback(self._best.close)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=x.sharding), tree
    )


def _load(kept: Any, items: dict[str, Any]) -> dict[str, Any]:
    """Loads the newest checkpoint, once it is known to hold what is asked for."""
    saved = kept.checkpointables_metadata(None).metadata
    for item in ("state", "params"):
        if item in items:
            _check(f"{kept.directory}/{kept.latest.step}", saved[item], items[item])
    return kept.load_checkpointables(None, items)


def _check(checkpoint: str, saved: Any, wanted: Any) -> None:
    have, want = _shapes(saved), _shapes(wanted)
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise ValueError(
                f"checkpoint {checkpoint}: expected {name} of shape "
                f"{want.get(name, 'none')}, got {have.get(name, 'none')}; it is of "
                "another model or version of lra_jax: train in another --workdir"
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each array, by the names on its way; they differ in a last "value"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = (jax.tree_util.keystr(k, simple=True, separator=".") for k, _ in leaves)
    return {
        name.removesuffix(".value"): tuple(leaf.shape)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }
