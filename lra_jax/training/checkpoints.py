"""Checkpoints with Orbax: the latest two, and the best on validation.

``checkpoints/latest/STEP`` holds the whole state and the position in the data, to
resume from; ``checkpoints/best/STEP`` the parameters with the best score. An
interrupted save leaves a temporary folder that Orbax ignores and removes. A run resumes
from the newest intact checkpoint, and moves damaged ones to ``checkpoints/damaged``.
"""

import contextlib
import errno
import functools
import gc
import logging
import math
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint
from flax import nnx
from orbax.checkpoint import v1 as ocp

from lra_jax import seals
from lra_jax.configs.base import BestBy
from lra_jax.errors import InputError, expected, known, on_one_line
from lra_jax.training import hosts
from lra_jax.training.step import TrainState, scored_params
from lra_jax.training.workdir import identify

_TREES = ("state", "params")
# The files of a checkpoint other than its arrays, with room to spare.
_METADATA_BYTES = 1_000_000
_ORBAX = orbax.checkpoint.__path__[0]

_logger = logging.getLogger(__name__)


class Progress(NamedTuple):
    """The loop's own state.

    Attributes:
      best_step: step of the best checkpoint, or -1 if there is none yet.
      best_accuracy: its validation accuracy, in [0, 1], or the score in its place.
      best_loss: its validation loss, in nats.
      seconds: time spent training so far, over all sessions.
    """

    best_step: int = -1
    best_accuracy: float = -math.inf
    best_loss: float = math.inf
    seconds: float = 0.0

    def is_improved_by(self, means: dict[str, float], best_by: BestBy) -> bool:
        """Whether validation scores are better than the best checkpoint's."""
        if best_by == "loss":
            return means["loss"] < self.best_loss
        return means["accuracy"] > self.best_accuracy


def check_space(folder: Path, needed: int) -> None:
    """Raises `OSError` unless a folder's disk has room for this many bytes of arrays.

    On a full disk Orbax would leave parts, and messages of its own.
    """
    needed += _METADATA_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        reason = f"{os.strerror(errno.ENOSPC)}, {needed:,} bytes needed, {free:,} free"
        raise OSError(errno.ENOSPC, reason, str(folder))


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """False for Orbax's messages: it logs every step of its work, and its failures are
    raised as well."""
    return record.levelno >= logging.CRITICAL or _ORBAX not in record.pathname


@functools.cache
def _leave_out_late_writes() -> None:
    """Keeps Python from reporting writes that end after their save has failed, with a
    traceback each about a closed event loop."""
    report = sys.unraisablehook

    def report_others(args: "sys.UnraisableHookArgs") -> None:
        if str(args.exc_value) != "Event loop is closed":
            report(args)

    sys.unraisablehook = report_others


class Checkpoints:
    """The checkpoints of one run directory.

    ``clean`` removes the remains of interrupted saves; not for a reader, since another
    process may be running the run.

    Attributes:
      seal: the values in the restored checkpoint's seal; empty if there is none.
    """

    def __init__(self, workdir: Path, clean: bool = True):
        logging.getLogger("absl").addFilter(_is_not_of_orbax)
        _leave_out_late_writes()
        self._folder, self._clean = workdir.absolute() / "checkpoints", clean
        self._run = identify(workdir)
        self.seal: dict[str, Any] = {}
        self._failed = False
        self._opened: list[Any] = []
        if clean:  # A reader opens only what it reads.
            _ = self._latest, self._best

    @functools.cached_property
    def _latest(self) -> Any:
        return self._open("latest", 2)

    @functools.cached_property
    def _best(self) -> Any:
        return self._open("best", 1)

    def _open(self, name: str, count: int) -> Any:
        """The newest checkpoints of one kind; Orbax would make a missing folder."""
        folder = self._folder / name
        if not self._clean and not folder.is_dir():
            raise expected(str(folder), "a checkpoint", "none yet")
        training: Any = ocp.training  # Its annotations refuse its own policies.
        opened = training.Checkpointer(
            folder,
            preservation_policy=training.preservation_policies.LatestN(count),
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=self._clean,
        )
        self._opened.append(opened)
        return opened

    @property
    def latest_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return self._latest.latest.step if self._latest.latest else None

    @property
    def best_step(self) -> int | None:
        """Step of the best checkpoint; None if there is none."""
        return self._best.latest.step if self._best.latest else None

    def save_latest(
        self,
        step: int,
        state: TrainState,
        progress: Progress,
        data: Any,
        about: dict[str, Any],
    ) -> None:
        """Saves everything that a later session needs to resume.

        ``about`` is for the seal of the checkpoint. A step is saved again only if it
        was saved before its validation, which is now done.

        Raises:
          OSError: it cannot be written; `save_best` raises this too.
        """
        if self.latest_step == step:
            before, _ = seals.read(Path(self._latest.latest.path))
            if (before or {}).get("validated", False) or not about.get("validated"):
                return
        items = {"state": _items(state), "progress": progress._asdict(), "data": data}
        self._save(self._latest, step, items, about)

    def save_best(self, step: int, params: nnx.State) -> None:
        """Saves parameters as the best so far, replacing earlier ones."""
        # A session that died after this save repeats the same steps bit for bit.
        best = self._best.latest
        if best is not None and best.step >= step:
            _, damage = seals.read(Path(best.path))
            if best.step > step or not damage:
                return
        self._save(self._best, step, {"params": params}, {})

    def _save(
        self, kept: Any, step: int, items: dict[str, Any], about: dict[str, Any]
    ) -> None:
        try:
            arrays = [x for x in jax.tree.leaves(items) if isinstance(x, jax.Array)]
            check_space(self._folder, sum(x.nbytes for x in arrays))
            kept.save_checkpointables(step, items, force=True, overwrite=True)
            if hosts.is_writer():
                _check_written(kept.latest, step, items)
                seals.write(Path(kept.latest.path), run=self._run, **about)
        except Exception as error:  # Orbax' parts report a full disk in many ways.
            self._failed = True
            if hosts.lost_process(error):
                raise
            raise OSError(
                f"{kept.directory}: the checkpoint of step {step} cannot be written, "
                f"earlier ones are kept: {on_one_line(error)}"
            ) from error

    def restore(self, state: TrainState, data: Any) -> tuple[TrainState, Progress]:
        """Loads the newest intact checkpoint in the shapes and placement of ``state``.

        Sets the position of ``data``, unless it is None. There is an error if the best
        checkpoint is lost.
        """
        items = {"state": _abstract(_items(state)), "progress": Progress()._asdict()}
        if data is not None:
            items["data"] = data
        loaded, step, self.seal = self._load(self._latest, items)
        if not self.seal:  # Killed before it was sealed; an earlier one says by whom.
            others = (seals.read(Path(c.path))[0] for c in self._latest.checkpoints)
            known = [about for about in others if about and "origins" in about]
            self.seal = {"origins": known[-1]["origins"]} if known else {}
        progress = Progress(**loaded["progress"])
        self._set_aside([c.path for c in self._latest.checkpoints if c.step > step])
        if progress.best_step >= 0:
            self._check_best(progress.best_step)
        return TrainState(**loaded["state"]), progress

    def _check_best(self, step: int) -> None:
        """Detects a lost best checkpoint; one of a later step will be saved again."""
        best = self._best.latest
        if best is None or best.step < step:
            requirement = f"the checkpoint of step {step}"
            got = "none" if best is None else f"that of step {best.step}"
            raise expected(str(self._best.directory), requirement, got)
        if best.step > step:
            return
        about, damage = seals.read(Path(best.path))
        self._check_run(best.path, about)
        if damage:
            raise expected(str(best.path), "a whole checkpoint", damage)

    def load_params(
        self, which: Literal["best", "last"], state: TrainState
    ) -> tuple[nnx.State, int]:
        """Loads the parameters that are scored, and their step, from a checkpoint."""
        known("checkpoint", which, ("best", "last"))
        if which == "best":
            loaded, step, _ = self._load(
                self._best, {"params": _abstract(state.params)}
            )
            return loaded["params"], step
        loaded, step, _ = self._load(self._latest, {"state": _abstract(_items(state))})
        return scored_params(TrainState(**loaded["state"])), step

    def _load(
        self, kept: Any, items: dict[str, Any]
    ) -> tuple[dict[str, Any], int, dict[str, Any]]:
        """Loads the newest intact checkpoint; also returns its step and seal."""
        damaged = []
        for checkpoint in reversed(kept.checkpoints):
            about, reason = seals.read(Path(checkpoint.path))
            if hosts.agree(bool(reason)) and not reason:
                reason = "damage that another process has seen"
            loaded = None
            if not reason:
                self._check_run(checkpoint.path, about)
                if "data" in items:
                    _check_processes(Path(checkpoint.path))
                loaded, reason = _try_load(kept, checkpoint, items)
            if loaded is not None:
                for line in damaged:
                    _logger.warning("%s; going back to step %d", line, checkpoint.step)
                return loaded, checkpoint.step, about or {}
            error = expected(str(checkpoint.path), "a whole checkpoint", reason)
            damaged.append(error)
        if damaged:
            first, *others = damaged
            raise InputError(first.name, "; ".join([first.problem, *map(str, others)]))
        raise expected(str(kept.directory), "a checkpoint", "none yet")

    def _check_run(self, path: Any, about: dict[str, Any] | None) -> None:
        """Refuses a checkpoint of other settings; one without a seal is accepted."""
        run = (about or {}).get("run", "")
        if run and self._run and run != self._run:
            got = "one of other settings or data"
            raise expected(str(path), "a checkpoint of the run in config.json", got)

    def _set_aside(self, damaged: Sequence[Any]) -> None:
        """Moves damaged checkpoints away, since their steps will be repeated."""
        if not damaged:
            return
        if hosts.is_writer():
            for path in damaged:
                place = self._folder / "damaged" / f"{path.name}-{time.time_ns()}"
                place.parent.mkdir(exist_ok=True)
                Path(path).rename(place)
        hosts.agree(0)
        self._latest.reload()

    def close(self) -> None:
        """Waits for pending saves."""
        with contextlib.ExitStack() as stack:
            if self._failed:  # Orbax reports the failure again.
                stack.enter_context(contextlib.suppress(Exception))
            for opened in self._opened:
                stack.callback(opened.close)


def _check_written(checkpoint: Any, step: int, items: dict[str, Any]) -> None:
    """Detects arrays without the manifest by which Orbax finds them."""
    for tree in items.keys() & set(_TREES):
        manifest = Path(checkpoint.path) / tree / "manifest.ocdbt"
        if checkpoint.step != step or not manifest.exists():
            raise FileNotFoundError(f"{manifest} was not written")


def _items(state: TrainState) -> dict[str, Any]:
    """The parts of a state, without an average that is not kept."""
    return {name: x for name, x in state._asdict().items() if x is not None}


def _abstract(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=x.sharding), tree
    )


def _check_processes(checkpoint: Path) -> None:
    """Refuses data positions saved by another number of processes."""
    here = jax.process_count()
    names = (path.name for path in (checkpoint / "data").glob("process_*"))
    matches = (re.fullmatch(r"process_\d+-of-(\d+)\.json", name) for name in names)
    saved = {int(match[1]) for match in matches if match}
    if saved and here not in saved:
        words = [f"{n} process{'es' if n > 1 else ''}" for n in (here, max(saved))]
        got = f"one by {words[1]}; start as many to resume"
        raise expected(str(checkpoint), f"a checkpoint by {words[0]}", got)


def _try_load(
    kept: Any, checkpoint: Any, items: dict[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """A checkpoint's contents, after checking that it is of this model; or why not."""
    try:
        with _silence_leftovers():
            saved = kept.checkpointables_metadata(checkpoint.step).metadata
            shapes = {item: _shapes(saved[item]) for item in saved if item in _TREES}
            if not all(shapes.get(item) for item in items if item in _TREES):
                return None, "none of its arrays"
            for item in shapes.keys() & items.keys():
                _check(str(checkpoint.path), shapes[item], _shapes(items[item]))
            return kept.load_checkpointables(checkpoint.step, items), ""
    except InputError:  # It is of another model.
        raise
    # Orbax and its parts raise many kinds of errors on a damaged file.
    except Exception as error:
        if hosts.lost_process(error):
            raise
        reason = on_one_line(error)
    with _silence_leftovers():
        gc.collect()  # Now that nothing references the error.
    return None, reason


@contextlib.contextmanager
def _silence_leftovers() -> Iterator[None]:
    """Keeps Python from reporting tasks that Orbax leaves behind when a load fails.

    They may end later, so after an error asyncio's log stays silent.
    """
    tasks = logging.getLogger("asyncio")
    level = tasks.level
    tasks.setLevel(logging.CRITICAL + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield
    tasks.setLevel(level)


def _check(checkpoint: str, have: dict[str, Any], want: dict[str, Any]) -> None:
    for name in sorted(have.keys() | want.keys()):
        if have.get(name) != want.get(name):
            raise expected(
                f"checkpoint {checkpoint}",
                f"{name} of shape {want.get(name, 'none')}",
                f"{have.get(name, 'none')}; it is of another model or version of "
                "lra_jax: train in another --workdir",
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shape of each array, by the names on its path, without a final "value"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = (jax.tree_util.keystr(k, simple=True, separator=".") for k, _ in leaves)
    return {
        name.removesuffix(".value"): tuple(leaf.shape)
        for name, (_, leaf) in zip(names, leaves, strict=True)
    }
