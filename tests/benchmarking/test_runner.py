"""The cases that are measured, refused, and kept when a run is cut short."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from benchmarking.small import case, run
from lra_jax.benchmarking import runner as running
from lra_jax.benchmarking.cases import Case
from lra_jax.benchmarking.programs import Program
from lra_jax.benchmarking.runner import expected_seconds, exponent


def test_what_does_not_fit_is_said_and_the_rest_runs() -> None:
    cases = [case("softmax", length=n) for n in (16, 512)] + [
        case("linear", length=512)
    ]
    rows = run(cases, max_gb=1e-3).rows
    statuses = [(r["attention"], r["length"], r["status"]) for r in rows]
    assert ("softmax", 16, "measured") in statuses
    assert ("softmax", 512, "does not fit") in statuses
    assert ("linear", 512, "measured") in statuses
    (refused,) = (row for row in rows if row["status"] == "does not fit")
    assert "GB needed" in refused["reason"] and refused["peak_bytes"] > 4e6


def test_memory_that_runs_out_in_a_call_is_said(monkeypatch) -> None:
    def exhausted(self: Program, min_seconds: float) -> float:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Program, "load", exhausted)
    (row,) = run([case("linear")]).rows
    assert row["status"] == "does not fit" and "Out of memory" in row["reason"]


def test_what_would_take_too_long_is_left_out() -> None:
    lengths = (16, 1 << 20, 1 << 21)
    cases = [case("linear", length=length) for length in lengths]
    rows = run(cases, max_seconds=0.5, max_gb=1e3).rows
    assert [row["status"] for row in rows] == ["measured", "left out", "left out"]
    assert "would take about" in rows[1]["reason"]
    assert "at 1,048,576 tokens" in rows[2]["reason"]
    # The compiler says what it would need all the same.
    assert rows[2]["peak_bytes"] > rows[1]["peak_bytes"] > 1e8


def test_what_was_measured_before_ctrl_c_is_kept(monkeypatch) -> None:
    sample = Program.sample
    calls = []

    def interrupted(self: Program) -> float:
        calls.append(self)
        if len(calls) == 4:  # In the second round of the first length.
            raise KeyboardInterrupt
        return sample(self)

    monkeypatch.setattr(Program, "sample", interrupted)
    names = ("linear", "cosformer")
    runner = run([case(name, length=n) for n in (16, 32) for name in names])
    assert runner.interrupted
    assert [(row["attention"], row["samples"]) for row in runner.rows] == [
        ("linear", 2),
        ("cosformer", 1),
    ]


@pytest.mark.parametrize(
    ("long_seconds", "order"),
    [(0.0, ["linear"] * 3 + ["cosformer"] * 3), (1e3, ["linear", "cosformer"] * 3)],
)
def test_quick_calls_take_turns_and_long_ones_do_not(
    long_seconds: float, order: list[str], monkeypatch
) -> None:
    called, sample = [], Program.sample

    def recorded(self):
        called.append(self.case.attention)
        return sample(self)

    monkeypatch.setattr(Program, "sample", recorded)
    monkeypatch.setattr(running, "_LONG_SECONDS", long_seconds)
    runner = run([case("linear"), case("cosformer")], repeats=3)
    assert called == order
    assert [row["samples"] for row in runner.rows] == [3, 3]


def test_expected_time_follows_the_measured_growth() -> None:
    assert expected_seconds([], 1024) == 0
    assert expected_seconds([(1024, 1.0)], 4096) == 16
    assert expected_seconds([(512, 1.0), (1024, 2.0)], 4096) == pytest.approx(8)
    assert expected_seconds([(512, 1.0), (1024, 4.0)], 2048) == pytest.approx(16)
    # A quick second length says nothing of the third: at least linear.
    assert expected_seconds([(512, 1.0), (1024, 0.1)], 2048) == pytest.approx(0.2)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_the_exponent_of_a_power_is_the_power(power: int) -> None:
    lengths = [1024, 4096, 8192, 16384]
    # Costs below 4,096 are left out where there are two lengths beyond.
    costs = [1e9, *(3.0 * n**power for n in lengths[1:])]
    assert exponent(lengths, costs) == pytest.approx(power, abs=1e-9)
    assert exponent([16, 32], [16.0**power, 32.0**power]) == pytest.approx(power)
    assert exponent([16], [1.0]) is None


def test_an_error_of_one_case_is_its_row(monkeypatch) -> None:
    def broken(case: Case) -> None:
        raise ValueError("blocks of 128 only")

    monkeypatch.setattr(running, "Program", broken)
    (row,) = run([case("linear")]).rows
    assert (row["status"], row["reason"]) == ("failed", "blocks of 128 only")


def test_what_has_not_begun_when_the_work_ends_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after Ctrl-C, which must not wait for a whole group of compilations."""
    begun: list[int] = []
    closed = threading.Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            closed.set()
            super().shutdown(wait=wait)

    def work(item: int) -> int:
        begun.append(item)
        if item > 1:
            closed.wait(60)
        return -item

    monkeypatch.setattr(running, "ThreadPoolExecutor", Pool)
    results = running.side_by_side(work, range(100))
    assert [next(results), next(results)] == [0, -1]
    results.close()
    assert begun in ([0, 1], [0, 1, 2])
    assert list(running.side_by_side(work, range(3))) == [0, -1, -2]
