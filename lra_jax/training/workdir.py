"""The run directory: who it belongs to, and whether it can be gone on with.

config.json      the resolved config, and the fingerprint of the data
metrics.jsonl    one line for each report
checkpoints/     latest and best
events/          TensorBoard, if tensorboardX is installed
result.json      at the end
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lra_jax.configs import Config
from lra_jax.errors import expected
from lra_jax.files import locked, write_json


def open_workdir(workdir: Path, config: Config, fingerprint: str) -> None:
    """Claims an empty directory, or checks that it holds this very run.

    Raises:
      ValueError: it belongs to a run of other settings or data, or cannot be written.
    """
    path = workdir / "config.json"
    if not path.exists():
        values = config.to_dict() | {"data_fingerprint": fingerprint}
        with _writable(workdir):
            write_json(path, values)
        return
    theirs, their_fingerprint = read_config(workdir)
    old, new = theirs.identity(), config.identity()
    differing = [
        f"{n}={old.get(n)!r} (now {new[n]!r})" for n in new if old.get(n) != new[n]
    ]
    if differing:
        raise ValueError(
            f"--workdir={workdir} holds a run of another config: "
            f"{', '.join(differing)}. Give another --workdir, or delete it"
        )
    if their_fingerprint != fingerprint:
        raise ValueError(
            f"--workdir={workdir} holds a run on other data (fingerprint "
            f"{their_fingerprint}, now {fingerprint}). Give another --workdir"
        )


def read_config(workdir: Path) -> tuple[Config, str]:
    """The config and the data fingerprint of a run directory.

    Raises:
      ValueError: there is no readable ``config.json``.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise ValueError(f"--workdir={workdir} is no run directory: no config.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        fingerprint = values.pop("data_fingerprint")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a config of this project: {error!r}"
        ) from error
    return Config.from_dict(values), fingerprint


def read_result(workdir: Path) -> dict[str, Any] | None:
    """The result of a finished run, None for one that is not.

    Raises:
      ValueError: it is damaged.
    """
    path = workdir / "result.json"
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, delete it: {error}") from error


def check_space(workdir: Path, needed: int) -> None:
    """Refuses to start a run whose checkpoints cannot be held.

    Raises:
      ValueError: fewer than ``needed`` bytes are free.
    """
    free = shutil.disk_usage(workdir).free
    if free < needed:
        raise ValueError(
            f"--workdir={workdir} needs {needed / 1e6:.0f} MB for checkpoints, "
            f"{free / 1e6:.0f} MB are free"
        )


@contextlib.contextmanager
def exclusive(workdir: Path) -> Iterator[None]:
    """Makes the directory and holds its lock, so that no two processes train in it.

    Raises:
      ValueError: another process holds it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with _writable(workdir):
            workdir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(workdir / ".lock", wait=False))
        yield


@contextlib.contextmanager
def _writable(workdir: Path) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise expected(
            "--workdir",
            "a directory of its own",
            f"{workdir}, which is in use by another process",
        ) from error
    except OSError as error:
        raise ValueError(
            f"--workdir={workdir} cannot be written: {error.strerror}"
        ) from error
