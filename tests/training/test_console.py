"""The lines in which a run tells its progress."""

import re
import sys
import time

import pytest

from lra_jax.training.console import RunConsole


def test_time_left_goes_by_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(8)
    console.work = [0, 1, 2, 3, 4, 14, 24, 34, 44].__getitem__
    with console:
        for step, speed in ((4, 1 / 3), (6, 1 / 30), (8, 1 / 30)):
            console.training(step, 1.0, 0.5, speed)
    lines = capsys.readouterr().out.splitlines()
    # 3 s a unit.
    assert [line.split("  ")[-1] for line in lines] == [
        "2:00 left",
        "1:00 left",
        "0:00 left",
    ]
    assert lines[0].startswith("step 4/8  loss 1.0000  accuracy 50.00 %  0.33 steps/s")


def test_the_bar_fits_into_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    console = RunConsole(96_000)
    with console:
        console.doing("compiling for batches of 32 x 16384")
        console.doing("training")
        console.training(90_000, 1.0, 0.5, 12.34)
        assert list(console.track("ab", 2)) == ["a", "b"]
        console.doing("training")
    shown = capsys.readouterr().out
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    figures = r"90000/96000 loss 1.00  accuracy 50.0 %  12.34 steps/s  \S+ left"
    assert re.search(figures, words) and "…" not in words
    assert max(map(len, re.split(r"[\r\n]+", words))) <= 80


def test_an_evaluation_after_training_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr("sys.__stdout__", sys.stdout)
    for _ in RunConsole(1).track("abc", 3):
        now += 3
    for _ in RunConsole(1, quiet=True).track("abc", 3):
        now += 3
    assert capsys.readouterr().out.splitlines() == ["1 of 3 evaluation batches"]
