"""Checkpoints with Orbax: the latest one, and the best on validation.

``checkpoints/latest/STEP`` holds the whole state and the position in the data, to go
on from; ``checkpoints/best/STEP`` the parameters that scored best. An interrupted save
leaves a temporary folder that Orbax ignores and removes.
"""

import contextlib
import logging
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from orbax.checkpoint import v1 as ocp

from lra_jax.training.step import TrainState


class Progress(NamedTuple):
    """What the loop itself has to remember.

    Attributes:
      best_step: step of the best validation accuracy, or -1 before the first.
      best_accuracy: that accuracy, in [0, 1].
      seconds: time spent training so far, over all sessions.
    """

    best_step: int = -1
    best_accuracy: float = -1.0
    seconds: float = 0.0


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
        folder = workdir.absolute() / "checkpoints"
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
        """Loads the newest checkpoint into the shapes and places of ``state``."""
        items = {
            "state": _abstract(state._asdict()),
            "progress": Progress()._asdict(),
            "data": data,
        }
        loaded = self._latest.load_checkpointables(None, items)
        return TrainState(**loaded["state"]), Progress(**loaded["progress"])

    def load_best(self, params: nnx.State) -> nnx.State:
        """Loads the best parameters into the shapes and places of ``params``."""
        items = {"params": _abstract(params)}
        return self._best.load_checkpointables(None, items)["params"]

    def load_last(self, state: TrainState) -> nnx.State:
        """Loads the newest parameters alone."""
        items = {"state": _abstract(state._asdict())}
        return self._latest.load_checkpointables(None, items)["state"]["params"]

    def close(self) -> None:
        """Waits for saves under way."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._latest.close)
            stack.callback(self._best.close)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=x.sharding), tree
    )
