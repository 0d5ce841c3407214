"""Lines that say how far long work is."""

import itertools

import pytest

from lra_jax import progress


def _output(monkeypatch, capsys, seconds: list[float]) -> list[str]:
    """The lines of work whose items take so many seconds."""
    now = 0.0
    monkeypatch.setattr(progress.sys, "__stdout__", progress.sys.stdout)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    items = progress.track(range(len(seconds)), "rows", len(seconds))
    for index, _ in enumerate(items):
        now += seconds[index]
    return capsys.readouterr().out.splitlines()


def test_quick_work_is_silent(monkeypatch, capsys):
    assert _output(monkeypatch, capsys, [0.1] * 15) == []


def test_the_start_is_no_part_of_the_time_left(monkeypatch, capsys):
    lines = _output(monkeypatch, capsys, [10, *[1.0] * 9])
    assert lines == ["1 of 10 rows", "5 of 10 rows, about 5 s left"]


@pytest.mark.parametrize(("terminal", "longest"), [(True, 5), (False, 10)])
def test_no_silence_is_long(terminal, longest, monkeypatch, capsys):
    monkeypatch.setattr(progress.sys.stdout, "isatty", lambda: terminal)
    lines = _output(monkeypatch, capsys, [1.0] * 200)
    done = [int(line.partition(" ")[0]) for line in lines]
    gaps = [b - a for a, b in itertools.pairwise(done)]
    assert len(gaps) > 10 and max(gaps) == longest
