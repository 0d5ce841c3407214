"""The processes of the accelerator's view."""

import sys

import pytest

from lra_jax.benchmarking import parts
from lra_jax.benchmarking.settings import BenchmarkConfig, make_cases, timing


@pytest.mark.parametrize(
    ("script", "seconds", "expected"),
    [
        ("print('fine')", 60, None),
        ("print('error: full'); raise SystemExit(3)", 60, "exit code 3: full"),
        ("import os; os.abort()", 60, "ended by SIGABRT: no output"),
        ("import time; time.sleep(60)", 0.2, "ended after 0.2 s, its time limit"),
    ],
)
def test_how_a_process_ends(tmp_path, script, seconds, expected) -> None:
    command = [sys.executable, "-c", script]
    assert parts.run(command, {}, tmp_path / "log", seconds) == expected


def test_ctrl_c_ends_the_process_too(tmp_path) -> None:
    """Or this test would take a minute."""
    script = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); "
    command = [sys.executable, "-c", f"{script}time.sleep(60)"]
    with pytest.raises(KeyboardInterrupt):
        parts.run(command, {}, tmp_path / "log", 60)


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
