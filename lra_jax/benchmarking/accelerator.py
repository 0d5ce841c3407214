"""The accelerator's view: all parts one after another, with a JSON and a page.

The folder holds ``accelerator.json`` and ``accelerator.md``, rewritten after each part,
and ``parts/`` with files of the parts' processes: their logs, the references, the runs.
A part that is done is not repeated; a training that was cut short resumes from its last
checkpoint.
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
from lra_jax.files import expand_home, lock, read_json, write_json

_NAME = "accelerator"
# The same for all parts of one page.
_IDENTITY = ("commit", "device", "versions", "settings")
# Settings of a training with --quick.
_QUICK = {
    "listops": (
        "--data.min_length=10",
        "--data.max_length=60",
        "--data.num_train=200",
        "--data.num_valid=40",
        "--data.num_test=40",
        "--train.steps=10",
        "--model.num_layers=1",
    ),
    "lm": (
        f"--data.path={Path(asyncio.__file__).parent}",
        "--data.pattern=*.py",
        "--data.max_length=64",
        "--train.steps=10",
        "--train.eval_batch_size=64",
        "--model.num_layers=1",
    ),
}
# The values of a training's result that are kept.
_OF_A_RUN = (
    "task",
    "attention",
    "preset",
    "test_accuracy_best",
    "test_examples",
    "test_bits_per_byte_best",
    "test_perplexity_best",
    "steps",
    "steps_per_second",
    "seconds",
    "parameters",
    "peak_memory_bytes",
    "peak_memory_kind",
    "data",
    "official_data",
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
        self._folder = expand_home(config.out or "", "--out")
        self._parts = self._folder / "parts"
        self._parts.mkdir(parents=True, exist_ok=True)
        self._json = self._folder / f"{_NAME}.json"
        self.page = self._json.with_suffix(".md")
        self.values: dict[str, Any] = {"command": command}

    def run(self, say: Callable[[str], None]) -> None:
        """Runs the remaining parts.

        Raises:
          KeyboardInterrupt: a signal was received; finished parts are kept.
        """
        with lock(self._parts / "lock", wait=False):
            outcomes = self._begin()
            say(self.values["device"])
            for part in parts.PARTS:
                if outcomes.get(part.name, {}).get("status") == "done":
                    say(f"{part.name}: done before")
                    continue
                say(f"{part.name}: up to {part.seconds:g} s ...")
                outcomes[part.name] = self._do(part)
                self._write(outcomes)
                say(f"{part.name}: {accelerator_page.outcome(outcomes[part.name])}")

    @property
    def failed(self) -> list[str]:
        """The parts that did not succeed."""
        return [x["name"] for x in self.values["parts"] if x["status"] != "done"]

    def _begin(self) -> dict[str, Any]:
        """Finds out which device there is; returns the outcomes of parts done on it."""
        device = self._do(parts.DEVICE)
        if device["reason"] is not None:
            raise expected("device", "one that jax can use", device["reason"])
        settings = dataclasses.asdict(self.config) | {"out": None}
        self.values |= device["found"] | {"complete": False, "settings": settings}
        before = self._before()
        others = [x for x in _IDENTITY if before and before[x] != self.values[x]]
        if others:
            fit = "a new folder, or one of the same settings and machine"
            got = f"{self._json}, which differs in {' and '.join(others)}"
            raise expected("--out", fit, got)
        outcomes = {part["name"]: part for part in before.get("parts", ())}
        self._write(outcomes)
        return outcomes

    def _before(self) -> dict[str, Any]:
        if not self._json.exists():
            return {}
        try:
            before = read_json(self._json)
            return {name: before[name] for name in (*_IDENTITY, "parts")}
        except (ValueError, KeyError, TypeError) as error:
            got = f"{self._json}, of another kind"
            raise expected("--out", "a folder of this view", got) from error

    def _do(self, part: parts.Part) -> dict[str, Any]:
        """Runs a part's process; returns its outcome and its results so far."""
        file = file_of(self.config, part.name)
        if part.task is None:
            settings = dataclasses.asdict(self.config) | {"part": part.name}
            flags = [f"--{name}={x}" for name, x in settings.items() if x is not None]
            command = ["lra_jax.benchmark", *flags]
        else:
            quick = _QUICK[part.task] if self.config.quick else ()
            workdir = self._parts / f"{part.name}-run"
            file = workdir / "result.json"
            command = ["lra_jax.train", f"--task={part.task}", f"--workdir={workdir}"]
            command += quick
        log = self._parts / f"{part.name}.log"
        start = time.monotonic()
        program = [sys.executable, "-m", *command]
        reason = parts.run(program, part.environment, log, part.seconds)
        results = json.loads(file.read_text("utf-8")) if file.exists() else {}
        if part.task is not None:
            results = {name: results[name] for name in _OF_A_RUN if name in results}
        return {
            "name": part.name,
            "status": "done" if reason is None else "failed",
            "reason": reason,
            "seconds": round(time.monotonic() - start, 1),
            "limit_seconds": part.seconds,
            "found": results,
        }

    def _write(self, outcomes: dict[str, Any]) -> None:
        names = [part.name for part in parts.PARTS]
        self.values["parts"] = [outcomes[name] for name in names if name in outcomes]
        complete = len(self.values["parts"]) == len(names) and not self.failed
        self.values["complete"] = complete
        write_json(self._json, self.values)
        accelerator_page.make(self.values, self._folder).write(_NAME, kinds=("md",))


def file_of(config: BenchmarkConfig, part: str) -> Path:
    """The file in which the process of a part leaves its results."""
    return expand_home(config.out or "", "--out") / "parts" / f"{part}.json"
