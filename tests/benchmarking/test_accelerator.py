"""The accelerator's view, with a CPU as the device."""

import json
import signal
from pathlib import Path
from typing import Any

import helpers
import jax
import pytest

from benchmarking.small import config
from lra_jax import benchmark, train
from lra_jax.benchmarking import accelerator, correctness, parts
from lra_jax.configs import Config
from lra_jax.tasks import get_task
from lra_jax.training.machine import describe_devices
from lra_jax.training.result import write_result

TINY = (
    "--view=accelerator",
    "--quick",
    "--attention=linear",
    "--lengths=8",
    "--batch-size=1",
    "--heads=2",
    "--head-dim=4",
    "--dtypes=float32",
    "--work=forward",
)


def read(folder: Path) -> dict:
    return json.loads((folder / "accelerator.json").read_text())


def run_here(command: list[str], environment: dict, log: Path, seconds: float) -> None:
    """Stands for `parts.run`: the work of a part, in this process."""
    _, _, program, *flags = command
    assert seconds > 0 and log.parent.is_dir()
    with jax.enable_x64(environment.get("JAX_ENABLE_X64") == "1"):
        {"lra_jax.benchmark": benchmark, "lra_jax.train": train}[program].main(flags)


def skip_training(config: Config, *_: Any) -> None:
    """Stands for `train._main`: leaves the result of a run that can be started."""
    assert config.workdir is not None
    get_task(config.task).check(config)
    names = {name: getattr(config, name) for name in ("task", "attention", "preset")}
    Path(config.workdir).mkdir()
    write_result(
        Path(config.workdir), helpers.result(**names, steps=config.train.steps)
    )


def test_every_part_and_then_none_again(tmp_path, monkeypatch, capsys) -> None:
    command = [*TINY, f"--out={tmp_path}"]
    monkeypatch.setattr(parts, "run", run_here)
    monkeypatch.setattr(train, "_main", skip_training)
    benchmark.main(command)
    capsys.readouterr()
    values = read(tmp_path)
    by_name = {part["name"]: part for part in values["parts"]}
    assert list(by_name) == [part.name for part in parts.PARTS]
    assert values["complete"]
    errors = by_name["correctness"]["found"]["rows"]
    assert [(x["causal"], x["dtype"]) for x in errors] == [
        (causal, dtype) for causal in (False, True) for dtype in correctness.TOLERANCES
    ]
    assert all(row["holds"] and row["output"] > 0 for row in errors)
    (row,) = by_name["times-causal"]["found"]["rows"]
    assert row["status"] == "measured" and row["causal"]
    runs = [by_name[task]["found"] for task in ("listops", "lm")]
    assert [(run["task"], run["steps"]) for run in runs] == [
        ("listops", 10),
        ("lm", 10),
    ]
    page = (tmp_path / "accelerator.md").read_text()
    assert "which holds for 4 of 4 comparisons" in page
    assert str(tmp_path / "parts") not in page

    benchmark.main(command)
    assert capsys.readouterr().out.count(" before\n") == len(parts.PARTS)
    assert read(tmp_path) == values
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*command, "--heads=1"])
    expected = ("--out: expected a new folder", "which differs in settings")
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, *expected)


def test_a_part_that_ends_badly_costs_itself_alone(tmp_path, monkeypatch) -> None:
    """tests/benchmarking/test_parts.py ends processes in every way."""
    reason = "ended by SIGSEGV: no output"

    def run(command: list[str], *others: Any) -> str | None:
        return reason if "--part=reference" in command else run_here(command, *others)

    few = (parts.Part("reference", 60), parts.Part("correctness", 60))
    monkeypatch.setattr(parts, "run", run)
    monkeypatch.setattr(parts, "PARTS", few)
    failed = accelerator.run(config(tmp_path), "python -m ...", print)
    values = read(tmp_path)
    assert failed == ["reference"] and not values["complete"]
    first, second = values["parts"]
    assert (first["reason"], second["status"]) == (reason, "done")
    page = (tmp_path / "accelerator.md").read_text()
    assert "The same command repeats them" in page


def test_ctrl_c_says_one_line_and_keeps_what_is_there(
    tmp_path, monkeypatch, capsys
) -> None:
    """The first part is a process as it is, which says what device there is."""
    run = parts.run

    def interrupted(command: list[str], *others: Any) -> str | None:
        if "--part=reference" in command:
            raise KeyboardInterrupt
        return run(command, *others)

    monkeypatch.setattr(parts, "run", interrupted)
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*TINY, f"--out={tmp_path}"])
    advice, err = "interrupted; the same command resumes", capsys.readouterr().err
    helpers.assert_one_error(stop.value.code, err, 128 + signal.SIGINT, advice)
    values = read(tmp_path)
    assert values["parts"] == [] and values["device"] == describe_devices()


def test_a_python_caller_is_told_that_it_is_a_command() -> None:
    with pytest.raises(ValueError, match="view: expected any other than accelerator"):
        benchmark.run(config("x"))
