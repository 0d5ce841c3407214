"""Run directories as the trainer leaves them, with results that were made up."""

import json
from pathlib import Path
from typing import Any

import helpers

from lra_jax.configs import Config, get_preset
from lra_jax.reports.runs import Group, group_runs, read_runs

RESULT = {
    "test_examples": 2000,
    "best_step": 2000,
    "steps": 5000,
    "steps_per_second": 4.0,
    "steps_per_second_kind": "warm",
    "seconds": 100.0,
    "parameters": 123_456,
    "peak_memory_bytes": 300 << 20,
    "peak_memory_kind": "process peak RSS",
    "valid_accuracy_best": 20.0,
    "valid_loss_best": 1.0,
    "official_data": True,
    "data_fingerprint": "ab",
    "device": "2 CPU cores",
    "versions": {"jax": "0.10.2"},
    "commit": "0123456789abcdef",
    "command": "python -m lra_jax.train --task=listops",
}


def compact(attention: str = "cosformer", **changes: Any) -> Config:
    """ListOps' preset compact, with changes."""
    return get_preset("listops", "compact", attention).replace(**changes)


def make_run(
    folder: Path,
    accuracy: float = 30.0,
    config: Config | None = None,
    *,
    last: float | None = None,
    finished: bool = True,
    **result: Any,
) -> Path:
    """Makes a run directory; returns it.

    Args:
      folder: the directory.
      accuracy: that of the best checkpoint on the test.
      config: its settings.
      last: the accuracy of the last checkpoint; by default the same.
      finished: whether it has a result.
      **result: further values of the result.
    """
    config = config or compact()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    lines = [
        {"step": step, "split": split, "accuracy": step / 10_000, "loss": 1.0}
        for step in (1000, 2000)
        for split in ("train", "valid")
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    text += helpers.reports(config, RESULT["steps"]) * finished
    (folder / "metrics.jsonl").write_text(text)
    accuracies = {
        "test_accuracy_best": accuracy,
        "test_accuracy_last": accuracy if last is None else last,
    }
    if finished:
        values = RESULT | accuracies | result
        (folder / "result.json").write_text(json.dumps(values))
    return folder


def make_suite_run(
    folder: Path,
    task: str,
    attention: str,
    accuracy: float,
    valid: float,
    examples: str = "ab",
    preset: str = "quick",
    **changes: Any,
) -> Path:
    """Makes a run of a suite's test, which has two lengths; returns its directory.

    Args:
      folder: the directory.
      task: the test.
      attention: the mechanism.
      accuracy: of the test, at the shorter length.
      valid: the accuracy on the validation split.
      examples: their hash.
      preset: the preset.
      **changes: of its settings.
    """
    return make_run(
        folder,
        accuracy,
        get_preset(task, preset, attention).replace(**changes),
        valid_accuracy_best=valid,
        valid_loss_best=1 - valid / 100,
        data_fingerprint=examples,
        official_data=False,
        state_size=4096,
        chance=50.0,
        parameters=1234,
        test_examples=500,
        test_accuracy_by_length={"20": accuracy, "128": accuracy - 10},
    )


def change(file: Path, **values: Any) -> None:
    """Changes values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def groups_in(folder: Path) -> list[Group]:
    """The groups of finished runs in a folder."""
    return group_runs(read_runs(folder)[0])
