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


def test_the_exponents_of_the_package_are_those_of_the_results() -> None:
    """After a change: python benchmarks/cost_exponent.py --publish."""
    report = json.loads(SCRIPT.RESULT.read_text())
    measured = {n: row["time_exponent"] for n, row in report["mechanisms"].items()}
    assert json.loads(SCRIPT.EXPONENTS.read_text()) == measured
    assert list(measured) == list(registry.names())
