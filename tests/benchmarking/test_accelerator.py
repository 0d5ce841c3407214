"""The accelerator's view, with a CPU as the device."""

import dataclasses
import itertools
import json
import signal
import sys
from pathlib import Path

import helpers
import jax
import numpy as np
import pytest

from lra_jax import benchmark
from lra_jax.benchmarking import (
    accelerator_page,
    correctness,
    one_part,
    parts,
)
from lra_jax.benchmarking.accelerator import Accelerator
from lra_jax.benchmarking.settings import BenchmarkConfig, make_cases, timing

SIZES = {"heads": 2, "head_dim": 4, "attention": "linear", "lengths": "8"}
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


def config(folder: Path | str, **changes) -> BenchmarkConfig:
    return BenchmarkConfig(view="accelerator", out=str(folder), **SIZES | changes)


def read(folder: Path) -> dict:
    return json.loads((folder / "accelerator.json").read_text())


def test_all_parts_and_then_none_again(tmp_path, monkeypatch, capsys) -> None:
    command = [*TINY, f"--out={tmp_path}"]
    # The data that ListOps generates.
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    # Of those that are skipped on a CPU, one will do.
    skipped = ("kernel-times", "kernel-times-causal")
    few = tuple(part for part in parts.PARTS if part.name not in skipped)
    monkeypatch.setattr(parts, "PARTS", few)
    benchmark.main(command)
    capsys.readouterr()
    values = read(tmp_path)
    found = {part["name"]: part for part in values["parts"]}
    assert list(found) == [part.name for part in parts.PARTS]
    assert values["complete"] and found["kernels"]["status"] == "skipped"
    assert "on this machine" in found["kernels"]["reason"]
    errors = found["correctness"]["found"]["rows"]
    assert [(x["causal"], x["dtype"]) for x in errors] == [
        (causal, dtype) for causal in (False, True) for dtype in correctness.TOLERANCES
    ]
    assert all(row["holds"] and row["output"] > 0 for row in errors)
    for name in ("times", "times-causal"):
        rows = found[name]["found"]["rows"]
        assert [row["status"] for row in rows] == ["measured"]
        assert {row["causal"] for row in rows} == {name == "times-causal"}
    assert found["listops"]["found"]["steps"] == 10
    assert found["lm"]["found"]["test_bits_per_byte_best"] > 0
    page = (tmp_path / "accelerator.md").read_text()
    assert "bits per byte" in page and "which holds for 4 of 4 comparisons" in page
    assert str(tmp_path / "parts") not in page

    benchmark.main(command)
    assert capsys.readouterr().out.count(" before\n") == len(parts.PARTS)
    assert read(tmp_path) == values
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*command, "--heads=1"])
    wanted = ("--out: expected a new folder", "of another settings")
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, *wanted)


def test_a_part_that_ends_badly_costs_itself_alone(tmp_path, monkeypatch) -> None:
    few = (parts.Part("reference", 0.1), parts.Part("kernels", 60))
    monkeypatch.setattr(parts, "PARTS", few)
    view = Accelerator(config(tmp_path), "python -m ...")
    view.run(print)
    assert view.failed == ["reference"] and not view.values["complete"]
    first, second = read(tmp_path)["parts"]
    assert first["reason"] == "ended after 0.1 s, its time limit"
    assert second["status"] == "skipped" and "on this machine" in second["reason"]
    assert "The same command repeats them" in view.page.read_text()


def test_ctrl_c_says_one_line_and_keeps_what_is_there(tmp_path) -> None:
    command = ("-m", "lra_jax.benchmark", *TINY, f"--out={tmp_path}")
    process = helpers.start(*command)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("reference: up to"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    advice = "interrupted; the same command resumes"
    helpers.assert_one_error(process.returncode, err, 128 + signal.SIGINT, advice)
    assert read(tmp_path)["parts"] == []


def test_a_part_goes_on_from_its_rows(tmp_path, monkeypatch) -> None:
    """The times of the first length, and the machine's, are not taken again."""
    chosen = config(tmp_path, quick=True, lengths="8,16", dtypes="float32")
    chosen = dataclasses.replace(chosen, part="times", work="forward")
    file = tmp_path / "parts" / "times.json"
    one_part.run(chosen, file, print)
    whole = json.loads(file.read_text())
    assert [row["length"] for row in whole["rows"]] == [8, 16]
    cut = whole | {"rows": whole["rows"][:1]}
    file.write_text(json.dumps(cut))
    monkeypatch.setattr("lra_jax.benchmarking.report.measure_roofline", None)
    one_part.run(chosen, file, print)
    again = json.loads(file.read_text())
    assert again["rows"][0] == whole["rows"][0]
    assert [row["length"] for row in again["rows"]] == [8, 16]
    assert again["rows"][1] != whole["rows"][1]
    assert again["roofline"] == whole["roofline"]


@pytest.mark.parametrize(
    ("script", "seconds", "wanted"),
    [
        ("print('fine')", 60, None),
        (
            "print('error: full'); raise SystemExit(3)",
            60,
            "exit code 3: full",
        ),
        ("import os; os.abort()", 60, "ended by SIGABRT: no output"),
        ("import time; time.sleep(60)", 0.2, "ended after 0.2 s, its time limit"),
    ],
)
def test_how_a_process_ends(tmp_path, script, seconds, wanted) -> None:
    command = [sys.executable, "-c", script]
    assert parts.run(command, {}, tmp_path / "log", seconds) == wanted


def test_processes_leave_memory_on_the_device_alone(tmp_path, monkeypatch) -> None:
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", f"import os; print(os.environ[{name!r}])"]
    parts.run(command, {}, tmp_path / "log", 60)
    assert (tmp_path / "log").read_text() == "false\n"


def test_all_parts_have_twenty_minutes() -> None:
    assert sum(part.seconds for part in (parts.DEVICE, *parts.PARTS)) <= 1200
    cases = make_cases(timing(BenchmarkConfig(view="accelerator"), True), on_cpu=False)
    assert {1024, 65536} <= {case.length for case in cases}
    assert {(case.dtype, case.causal) for case in cases} == {("bfloat16", True)}


def test_errors_are_those_of_the_device(tmp_path) -> None:
    """A reference that is off by a thousandth is told from rounding."""
    chosen = config(tmp_path)
    cases = correctness.make_cases(chosen)
    assert [case.causal for case in cases] == [False, True]
    with jax.enable_x64(True):
        correctness.write_references(cases, tmp_path, print)
    row = correctness.compare(cases[0], tmp_path, "float32")
    assert row["holds"] and 0 < row["output"] < 1e-5
    file = correctness.file_of(cases[0], tmp_path)
    with np.load(file) as arrays:
        changed = dict(arrays)
    changed["of key"] *= 1.001
    np.savez(file, **changed)
    row = correctness.compare(cases[0], tmp_path, "float32")
    assert not row["holds"] and row["worst_gradient"] == "key"
    assert row["gradients"] == pytest.approx(1e-3, rel=0.1)


def test_kernels_are_compared_with_padding_too(tmp_path) -> None:
    chosen = config(tmp_path)
    kernels = correctness.kernel_cases(chosen)
    assert {kernel.attention for kernel in kernels} == {"linear[implementation=pallas]"}
    with jax.enable_x64(True):
        correctness.write_references(
            correctness.reference_cases(chosen), tmp_path, print
        )
    outputs = []
    for kernel in kernels:
        row = correctness.compare(kernel, tmp_path, "float32")
        assert row["status"] == "not supported" and "on this machine" in row["reason"]
        plain = dataclasses.replace(kernel, attention="linear")
        row = correctness.compare(plain, tmp_path, "float32")
        assert row["holds"] and row["rows"] == kernel.rows
        with np.load(correctness.file_of(kernel, tmp_path)) as arrays:
            outputs.append(arrays["of output"])
    assert len(outputs) == 2 * 2
    for one, other in itertools.combinations(outputs, 2):
        assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ((), ["--out: expected a folder for --view=accelerator", "None"]),
        (("--out=x.json",), ["--out: expected a folder", "'x.json'"]),
        (("--out=x", "--part=tims"), ["--part", "did you mean 'times'"]),
        (("--out=FILE/x",), ["FILE"]),
    ],
)
def test_bad_flags(capsys, tmp_path, monkeypatch, flags, wanted) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    with pytest.raises(SystemExit) as stop:
        benchmark.main(["--view=accelerator", *flags])
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, *wanted)
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


def test_a_python_caller_is_told_that_it_is_a_command() -> None:
    with pytest.raises(ValueError, match="view: expected any other than accelerator"):
        benchmark.run(config("x"))


def time_row(attention: str, milliseconds: float, **changes) -> dict:
    (case, *_) = make_cases(timing(config("x"), causal=True), on_cpu=False)
    measured = {"status": "measured", "median_ms": milliseconds}
    return case.to_dict() | measured | {"attention": attention} | changes


def test_the_page(tmp_path) -> None:
    """Of made-up figures, with all that a device can have."""
    error = {"attention": "flow", "causal": True, "rows": "padded"}
    error |= {"status": "measured"}
    error |= {"output": 1e-6, "gradients": 2e-6}
    found = {
        "correctness": {
            "tolerances": correctness.TOLERANCES,
            "rows": [
                error | {"dtype": "float32", "holds": True},
                error | {"dtype": "bfloat16", "gradients": 0.3, "holds": False},
            ],
        },
        "times-causal": {
            "softmax_fused": {"bfloat16": "cudnn"},
            "roofline": {
                "bytes_per_second": 4e12,
                "flops_per_second": {"bfloat16": 7e14},
            },
            "rows": [
                time_row("softmax-fused", 6.0, roofline_share=0.5),
                time_row("linear", 2.0, roofline_share=0.25),
                time_row("flow", 0.0, status="does not fit", reason="9 GB"),
            ],
        },
        "kernel-times-causal": {
            "rows": [
                time_row("linear[implementation=xla]", 2.0),
                time_row("linear[implementation=pallas]", 0.5),
            ]
        },
    }
    ended = {"status": "done", "reason": None, "seconds": 3.0}
    listed = [{"name": name, "found": x} | ended for name, x in found.items()]
    listed.append(
        {"name": "lm", "status": "failed", "reason": "ended by SIGSEGV: x"}
        | {"seconds": 9.0, "found": {}}
    )
    values = {"command": "python -m x", "commit": "c0ffee", "device": "1 x H200"}
    values |= {"versions": {"jax": "1.2"}, "complete": False, "parts": listed}
    text = accelerator_page.make(values, tmp_path).markdown()
    for wanted in (
        "# lra_jax on 1 x H200",
        "failed: ended by SIGSEGV: x (9 s)",
        "causal, padded",
        "bfloat16 beyond the tolerance",
        "which holds for 1 of 2 comparisons",
        "copied at 4,000 GB/s",
        "2 (3x, 25 %)",
        "does not fit",
        "0.5 (4x)",
        "(cudnn)",
    ):
        assert wanted in text, text


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_published_pages_are_made_from_their_results(name: str, tmp_path) -> None:
    folder = Path(__file__).parents[2] / "results" / "accelerator"
    values = json.loads((folder / f"{name}.json").read_text())
    page = accelerator_page.make(values, tmp_path).markdown()
    assert page == (folder / f"{name}.md").read_text()


def test_errors_of_late_positions_are_not_small_beside_the_first() -> None:
    wanted = np.ones((1, 130, 1, 4))
    wanted[:, 64:] = 0.01
    got = wanted.copy()
    got[:, 129] *= 1.1
    assert correctness.relative_error(got, wanted) == pytest.approx(1e-3)
    assert correctness.output_error(got, wanted) == pytest.approx(0.1)
