"""The benchmark of costs: its arithmetic, a tiny run, and what it has published."""

import json

import cost_exponent as SCRIPT
import pytest

from lra_jax.attention import registry


@pytest.mark.parametrize("power", [0, 1, 1.5, 2])
def test_the_slope_is_the_power(power: float) -> None:
    lengths = [2048, 4096, 8192, 16384]
    costs = [3 * length**power for length in lengths]
    assert SCRIPT.slope(lengths, costs) == pytest.approx(power, abs=1e-9)


@pytest.mark.parametrize("name", ["local", "linformer"])
def test_a_tiny_run(name: str) -> None:
    row = SCRIPT.measure(name, [8, 16], (2, 4), 1)
    assert len(row["fastest_ms"]) == len(row["temporary_mb"]) == 2
    report = {
        "lengths": [8, 16],
        "heads": 2,
        "head_dim": 4,
        "mechanisms": {name: row},
        "device": "a machine",
        "versions": {"jax": "1"},
        "command": "python x",
    }
    assert f"| {name} | {row['time_exponent']:.2f} |" in SCRIPT.table(report)


def test_what_stands_between_two_marks_is_replaced() -> None:
    page = SCRIPT.between("one\n<a>\ntwo\n<b>\nthree", "<a>", "2", "<b>")
    assert page == "one\n<a>\n2\n<b>\nthree"


def test_published_figures_are_those_of_the_results() -> None:
    """After a change: python benchmarks/cost_exponent.py --publish."""
    _, _, rest = SCRIPT.PAGE.read_text().partition(SCRIPT.MARKS[0] + "\n")
    shown = rest.partition(SCRIPT.MARKS[1])[0]
    if not SCRIPT.RESULT.exists():
        assert not SCRIPT.EXPONENTS.exists() and not shown
        return
    report = json.loads(SCRIPT.RESULT.read_text())
    assert shown == SCRIPT.table(report) + "\n"
    measured = {n: row["time_exponent"] for n, row in report["mechanisms"].items()}
    assert json.loads(SCRIPT.EXPONENTS.read_text()) == measured
    assert list(measured) == list(registry.names())
