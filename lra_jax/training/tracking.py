"""Weights & Biases, for runs with ``--wandb=PROJECT``."""

import contextlib
import importlib
import importlib.util
import uuid
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from lra_jax.configs import Config
from lra_jax.errors import expected, on_one_line
from lra_jax.files import read_bytes, write_text


def check(config: Config) -> None:
    """Raises ``ValueError`` if a run needs wandb and it is not installed."""
    if config.wandb is None:
        return
    spec = importlib.util.find_spec("wandb")
    # wandb's log folder in the current folder looks like a package without files.
    if spec is None or spec.origin is None:
        needed = "the package wandb, from: python -m pip install wandb"
        raise expected("--wandb", needed, "none")


class Tracker:
    """A run of Weights & Biases, the same one in every session; use it as a context.

    Its id and its logs are in ``wandb/`` in the run directory. Without a project in the
    config, nothing is imported or written.
    """

    def __init__(self, config: Config, workdir: Path):
        self._run: Any = None
        if config.wandb is None:
            return
        wandb: Any = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=config.wandb,
                id=_identify(workdir),
                resume="allow",
                name=workdir.name,
                dir=workdir,
                config=config.to_dict(),
                # The console is the trainer's, which notices when nobody reads it.
                settings=wandb.Settings(console="off"),
            )
        except wandb.Error as error:
            needed = "a project to report to, or WANDB_MODE=offline"
            raise expected("--wandb", needed, f"{error}") from error
        # wandb's own steps cannot go back, but those of a killed run do.
        self._run.define_metric("*", step_metric="step")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._stop_on_error():
            if self._run is not None:
                self._run.finish(exit_code=0 if kind is None else 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step."""
        with self._stop_on_error():
            if self._run is not None:
                self._run.log({"step": step, **values})

    def result(self, values: Mapping[str, Any]) -> None:
        """Adds the result of the run."""
        with self._stop_on_error():
            if self._run is not None:
                self._run.summary.update(values)

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """Context for sending: after an error no more is sent, and training goes on."""
        try:
            yield
        except Exception as error:
            self._run = None
            words = f"--wandb: no longer reported to, after {on_one_line(error)}"
            warnings.warn(words, stacklevel=4)


def _identify(workdir: Path) -> str:
    """The id of a run directory, generated once."""
    file = workdir / "wandb" / "id"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        write_text(file, uuid.uuid4().hex)
    return read_bytes(file).decode()
