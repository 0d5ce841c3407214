"""The accelerator's view: all parts one after another, with a JSON and a page.

The folder holds ``accelerator.json`` and ``accelerator.md``, rewritten after each part,
and ``parts/`` with files of the parts' processes: their logs, the references, the runs.
A part that is done, or has nothing to do on this device, is not repeated; one that was
cut short keeps its rows, and a training resumes from its last checkpoint.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lra_jax.benchmarking import accelerator_page, parts
from lra_jax.benchmarking.settings import BenchmarkConfig
from lra_jax.errors import expected
from lra_jax.files import locked, write_json

_NAME = "accelerator"
_ENDED_WELL = ("done", "skipped")
# The same for all parts of one page.
_IDENTITY = ("commit", "device", "versions", "settings")
# Settings of a training with --quick.
_QUICK = {
    "listops": (
        *("--data.min_length=10", "--data.max_length=60", "--data.num_train=200"),
        *("--data.num_valid=40", "--data.num_test=40", "--train.steps=10"),
        "--model.num_layers=1",
    ),
    "lm": (
        f"--data.path={Path(asyncio.__file__).parent}",
        *("--data.pattern=*.py", "--data.max_length=64", "--train.steps=10"),
        *("--train.eval_batch_size=64", "--model.num_layers=1"),
    ),
}
_OF_A_RUN = (
    *("task", "attention", "preset", "test_accuracy_best", "test_examples"),
    *("test_bits_per_byte_best", "test_perplexity_best", "steps", "steps_per_second"),
    *("seconds", "parameters", "peak_memory_bytes", "peak_memory_kind", "data"),
    *("official_data",),
)


class Accelerator:
    """One folder of the view.

    Args:
      config: the settings; ``out`` is the folder.
      command: what the user typed.

    Attributes:
      values: the contents of the JSON.
      page: the file of the page.

    Raises:
      ValueError: the folder belongs to another device or other settings, or the device
        cannot be used.
      OSError: the folder cannot be written, or another process uses it.
    """

    def __init__(self, config: BenchmarkConfig, command: str):
        self.config = config
        self._folder = Path(config.out or "").expanduser()
        self._parts = self._folder / "parts"
        self._parts.mkdir(parents=True, exist_ok=True)
        self._json = self._folder / f"{_NAME}.json"
        self.page = self._json.with_suffix(".md")
        self.values: dict[str, Any] = {"command": command}

    def run(self, say: Callable[[str], None]) -> None:
        """Runs the remaining parts.

        Raises:
          Stopped: a signal was received; finished parts are kept.
        """
        with locked(self._parts / "lock", wait=False):
            self._begin()
            say(self.values["device"])
            for part in parts.PARTS:
                if self._outcomes.get(part.name, {}).get("status") in _ENDED_WELL:
                    say(f"{part.name}: {self._outcomes[part.name]['status']} before")
                    continue
                say(f"{part.name}: up to {part.seconds:g} s ...")
                self._do(part)
                ended = accelerator_page.outcome(self._outcomes[part.name])
                say(f"{part.name}: {ended}")

    @property
    def failed(self) -> list[str]:
        """The parts that did not succeed."""
        return [
            part["name"]
            for part in self.values["parts"]
            if part["status"] not in _ENDED_WELL
        ]

    def _begin(self) -> None:
        """Finds out which device there is, and which parts are done on it."""
        reason, _ = self._process(parts.DEVICE)
        found = self._found(parts.DEVICE)
        if reason is not None:
            raise expected("device", "one that jax can use", reason)
        settings = dataclasses.asdict(self.config) | {"out": None}
        now = {**self.values, **found, "complete": False, "settings": settings}
        before = self._before()
        others = [name for name in _IDENTITY if before and before[name] != now[name]]
        if others:
            wanted = "a new folder, or one of the same settings and machine"
            got = f"{self._json}, of another {' and '.join(others)}"
            raise expected("--out", wanted, got)
        outcomes = before["parts"] if before else []
        self._outcomes: dict[str, Any] = {part["name"]: part for part in outcomes}
        self.values = now
        self._write()

    def _before(self) -> dict[str, Any]:
        if not self._json.exists():
            return {}
        try:
            before = json.loads(self._json.read_text(encoding="utf-8"))
            return {name: before[name] for name in (*_IDENTITY, "parts")}
        except (ValueError, KeyError, TypeError) as error:
            wanted = "a folder of this view, or a new one"
            raise expected("--out", wanted, f"{self._json}, of another kind") from error

    def _do(self, part: parts.Part) -> None:
        reason, seconds = self._process(part)
        found = self._found(part)
        status = "done" if reason is None else "failed"
        skipped = found.pop("skipped", None)
        if skipped is not None:
            status, reason = "skipped", skipped
        self._outcomes[part.name] = {
            **{"name": part.name, "status": status, "reason": reason},
            **{"seconds": round(seconds, 1), "limit_seconds": part.seconds},
            "found": found,
        }
        self._write()

    def _process(self, part: parts.Part) -> tuple[str | None, float]:
        """Runs a part's process: why it failed, None if it did not, and its seconds."""
        if part.task is None:
            given = dataclasses.asdict(self.config) | {"part": part.name}
            flags = [f"--{name}={x}" for name, x in given.items() if x is not None]
            command = ["lra_jax.benchmark", *flags]
        else:
            quick = _QUICK[part.task] if self.config.quick else ()
            folder = f"--workdir={self._run(part)}"
            command = ["lra_jax.train", f"--task={part.task}", folder, *quick]
        log = self._parts / f"{part.name}.log"
        begun = time.monotonic()
        program = [sys.executable, "-m", *command]
        reason = parts.run(program, part.environment, log, part.seconds)
        return reason, time.monotonic() - begun

    def _run(self, part: parts.Part) -> Path:
        return self._parts / f"{part.name}-run"

    def _file(self, part: parts.Part) -> Path:
        if part.task is not None:
            return self._run(part) / "result.json"
        return file_of(self.config, part.name)

    def _found(self, part: parts.Part) -> dict[str, Any]:
        """The results of a part, complete or not."""
        file = self._file(part)
        found = json.loads(file.read_text("utf-8")) if file.exists() else {}
        if part.task is not None:
            return {name: found[name] for name in _OF_A_RUN if name in found}
        return found

    def _write(self) -> None:
        order = [part.name for part in parts.PARTS]
        done = [self._outcomes[name] for name in order if name in self._outcomes]
        self.values["parts"] = done
        self.values["complete"] = len(done) == len(order) and not self.failed
        write_json(self._json, self.values)
        accelerator_page.make(self.values, self._folder).write(_NAME, kinds=("md",))


def file_of(config: BenchmarkConfig, part: str) -> Path:
    """The file in which the process of a part leaves its results."""
    return Path(config.out or "").expanduser() / "parts" / f"{part}.json"
