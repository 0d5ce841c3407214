"""The command: errors of one line, its files, Ctrl-C."""

import dataclasses
import json
import re
import signal

import helpers

from lra_jax import benchmark
from lra_jax.benchmarking.programs import Program
from lra_jax.benchmarking.settings import BenchmarkConfig

TINY = ("--quick=True", "--batch-size=1", "--heads=1", "--head-dim=4")


def outcome(capsys, *args: str) -> tuple[object, str, str]:
    """Exit code, output and errors of the command."""
    code: object = 0
    try:
        benchmark.main(list(args))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def test_no_picture(capsys, tmp_path) -> None:
    flags = ("--attention=linear", "--lengths=8", "--work=forward", "--picture=False")
    code, _, err = outcome(capsys, f"--out={tmp_path}", *TINY, *flags)
    assert code == 0, err
    assert [file.name for file in tmp_path.iterdir()] == ["attention.json"]


def test_no_case_measured_is_a_failure(capsys, tmp_path) -> None:
    """The row says why, and so does the error."""
    flags = ("--attention=fnet", "--work=decode", "--lengths=8")
    code, out, err = outcome(capsys, *TINY, *flags, f"--out={tmp_path}")
    helpers.assert_one_error(code, err, 1, "no case was measured", "no stream")
    assert "not supported: no stream to decode with" in out
    assert [file.name for file in tmp_path.iterdir()] == ["attention.json"]
    # The figures of an earlier run are not replaced by none.
    (tmp_path / "attention.json").write_text("earlier")
    (tmp_path / "attention.png").write_text("earlier")
    code, out, err = outcome(capsys, *TINY, *flags, f"--out={tmp_path}")
    assert code == 1 and "attention.incomplete.json" in out
    for name in ("attention.json", "attention.png"):
        assert (tmp_path / name).read_text() == "earlier"
    flags = ("--attention=fnet,linear", "--work=decode", "--lengths=8")
    assert outcome(capsys, *TINY, *flags)[0] == 0


def test_figures_and_picture(capsys, tmp_path) -> None:
    flags = (
        "--attention=linear,linformer[features=4]",
        "--lengths=8,16",
        "--work=forward",
        "--dtypes=float32,bfloat16",
    )
    code, out, err = outcome(capsys, *TINY, *flags, f"--out={tmp_path}/deep/x.json")
    assert code == 0, err
    assert "Gflop/s" in out and "| linformer[features=4]" in out and "T^" in out
    report = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert report["command"].startswith("python -m lra_jax.benchmark --quick=True")
    assert report["complete"] and len(report["rows"]) == 8
    assert {"jax", "numpy", "python"} <= set(report["versions"])
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", report["commit"])
    assert report["roofline"]["bytes_per_second"] > 0
    assert len(report["exponents"]) == 4
    # As in Python, which writes nothing.
    config = BenchmarkConfig(attention="linear", lengths="8", work="forward")
    sizes = {"quick": True, "batch_size": 1, "heads": 1, "head_dim": 4}
    again = benchmark.run(dataclasses.replace(config, dtypes="float32", **sizes))
    assert again.keys() == report.keys()
    assert again["rows"][0].keys() == report["rows"][0].keys()
    assert (tmp_path / "deep" / "x.png").stat().st_size > 10_000


def test_ctrl_c_keeps_the_figures(capsys, tmp_path, monkeypatch) -> None:
    sample = Program.sample

    def interrupted(self: Program) -> float:
        if self.case.length == 16:
            # A kill would leave this.
            report = json.loads((tmp_path / "attention.incomplete.json").read_text())
            assert not report["complete"]
            assert [row["length"] for row in report["rows"]] == [8]
            raise KeyboardInterrupt
        return sample(self)

    monkeypatch.setattr(Program, "sample", interrupted)
    flags = ("--attention=linear", "--lengths=8,16", "--work=forward")
    flags = (*TINY, *flags, f"--out={tmp_path}", "--picture=False")
    code, out, err = outcome(capsys, *flags)
    helpers.assert_one_error(code, err, 128 + signal.SIGINT, "kept")
    assert "| linear" in out
    report = json.loads((tmp_path / "attention.json").read_text())
    assert not report["complete"]
    assert [row["length"] for row in report["rows"]] == [8]
    assert [path.name for path in tmp_path.iterdir()] == ["attention.json"]
    # The figures of an earlier run are not replaced by fewer.
    (tmp_path / "attention.json").write_text("earlier")
    code, out, err = outcome(capsys, *flags)
    helpers.assert_one_error(code, err, 128 + signal.SIGINT, "kept")
    kept = tmp_path / "attention.incomplete.json"
    assert f"wrote {kept}\n" in out
    assert (tmp_path / "attention.json").read_text() == "earlier"
    assert len(json.loads(kept.read_text())["rows"]) == 1
