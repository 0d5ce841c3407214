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


def run(config: BenchmarkConfig, command: str, say: Callable[[str], None]) -> list[str]:
    """Runs the parts that are not done yet.

    Args:
      config: the settings; ``out`` is the folder.
      command: what the user typed, for the record.
      say: shows a line of progress.

    Returns:
      The names of the parts that failed.

    Raises:
      ValueError: the folder belongs to another device or other settings, or the device
        cannot be used.
      OSError: the folder cannot be written, or another process uses it.
      KeyboardInterrupt: a signal was received; finished parts are kept.
    """
    folder = file_of(config, "").parent
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / "lock", wait=False):
        values = _begin(config, command, folder.parent)
        say(values["device"])
        outcomes = {part["name"]: part for part in values["parts"]}
        for part in parts.PARTS:
            if outcomes.get(part.name, {}).get("status") == "done":
                say(f"{part.name}: done before")
                continue
            say(f"{part.name}: up to {part.seconds:g} s ...")
            outcomes[part.name] = _run_part(config, part)
            _write(values, outcomes, folder.parent)
            say(f"{part.name}: {accelerator_page.outcome(outcomes[part.name])}")
    say(f"wrote {folder.parent / _NAME}.md and, next to it, {_NAME}.json")
    return _failed(values)


def _begin(config: BenchmarkConfig, command: str, folder: Path) -> dict[str, Any]:
    """Finds out which device there is; the values with the parts done on it."""
    device = _run_part(config, parts.DEVICE)
    if device["reason"] is not None:
        raise expected("device", "one that jax can use", device["reason"])
    settings = dataclasses.asdict(config) | {"out": None}
    values = {"command": command, **device["found"]}
    values |= {"complete": False, "settings": settings}
    file = folder / f"{_NAME}.json"
    before = _read(file) if file.exists() else {}
    others = [name for name in _IDENTITY if before and before[name] != values[name]]
    if others:
        fit = "a new folder, or one of the same settings and machine"
        got = f"{file}, which differs in {' and '.join(others)}"
        raise expected("--out", fit, got)
    outcomes = {part["name"]: part for part in before.get("parts", ())}
    _write(values, outcomes, folder)
    return values


def _read(file: Path) -> dict[str, Any]:
    try:
        before = read_json(file)
        return {name: before[name] for name in (*_IDENTITY, "parts")}
    except (ValueError, KeyError, TypeError) as error:
        got = f"{file}, of another kind"
        raise expected("--out", "a folder of this view", got) from error


def _run_part(config: BenchmarkConfig, part: parts.Part) -> dict[str, Any]:
    """Runs a part's process; returns its outcome and its results so far."""
    file = file_of(config, part.name)
    if part.task is None:
        settings = dataclasses.asdict(config) | {"part": part.name}
        flags = [f"--{name}={x}" for name, x in settings.items() if x is not None]
        command = ["lra_jax.benchmark", *flags]
    else:
        quick = _QUICK[part.task] if config.quick else ()
        workdir = file.with_name(f"{part.name}-run")
        file = workdir / "result.json"
        command = ["lra_jax.train", f"--task={part.task}", f"--workdir={workdir}"]
        command += quick
    log = file_of(config, part.name).with_suffix(".log")
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


def _write(values: dict[str, Any], outcomes: dict[str, Any], folder: Path) -> None:
    """Adds the outcomes to the values; writes the JSON and the page."""
    names = [part.name for part in parts.PARTS]
    values["parts"] = [outcomes[name] for name in names if name in outcomes]
    values["complete"] = len(values["parts"]) == len(names) and not _failed(values)
    write_json(folder / f"{_NAME}.json", values)
    accelerator_page.make(values, folder).write(_NAME, kinds=("md",))


def _failed(values: dict[str, Any]) -> list[str]:
    return [part["name"] for part in values["parts"] if part["status"] != "done"]


def file_of(config: BenchmarkConfig, part: str) -> Path:
    """The file in which the process of a part leaves its results."""
    return expand_home(config.out or "", "--out") / "parts" / f"{part}.json"
