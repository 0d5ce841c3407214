"""The lines in which a run tells its progress."""

import time

import pytest

from lra_jax.training.console import RunConsole


def test_time_left_goes_by_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    console = RunConsole(8)
    console.work = [0, 1, 2, 3, 4, 14, 24, 34, 44].__getitem__
    console.start = 2
    with console:
        for seconds, step in ((6.0, 4), (60.0, 6), (60.0, 8)):
            now += seconds
            console.training(step, 1.0, 0.5, 2.0)
    lines = capsys.readouterr().out.splitlines()
    # 3 s a unit, then as measured: 66 s for 22 units.
    assert [line.split("  ")[-1] for line in lines] == [
        "2:00 left",
        "1:00 left",
        "0:00 left",
    ]
    assert lines[0].startswith("step 4/8  loss 1.0000  accuracy 50.00 %  2.00 steps/s")
