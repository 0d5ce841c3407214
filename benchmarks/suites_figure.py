"""Draws docs/suites.png from results/suites/: python benchmarks/suites_figure.py

Left a heat map of mechanisms by tests; right the accuracy on the needle, and on parity,
against the length of the sequence.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from results_tables import best_of_tests, score

from lra_jax.reports import charts
from lra_jax.tasks import get_task, suites

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "suites"
PICTURE = ROOT / "docs" / "suites.png"
SUITES = ("recall", "mad", "state")
LEAST = 10
"""Tests that a row of the heat map has at least."""
LINES = {
    "needle": ("softmax", "cosformer", "linear", "retention", "gla", "delta", "hgrn"),
    "parity": ("softmax", "delta", "delta, beta_range=2", "hgrn, rotates=true"),
}


def _heat_map(figure: Any, axis: Any, best: dict[str, dict[str, Any]]) -> None:
    tests = [task.name for suite in SUITES for task in suites()[suite]]
    rows = {
        name: [score(row[test]) if test in row else np.nan for test in tests]
        for name, row in best.items()
        if len(row) >= LEAST
    }
    names = sorted(rows, key=lambda name: -np.nanmean(rows[name]))
    words = [f"{t} (scaled)" if get_task(t).is_scaled else t for t in tests]
    charts.heat_map(figure, axis, [rows[name] for name in names], names, words)


def _lines(axis: Any, best: dict[str, dict[str, Any]], test: str) -> None:
    lines = []
    for name in LINES[test]:
        parts = best[name][test]["test_accuracy_by_length"]
        lines.append(charts.Line(name, [*map(int, parts)], [*parts.values()]))
    labels = {"xlabel": "tokens", "ylabel": "accuracy, %"}
    charts.draw(axis, lines, title=test, **labels)
    charts.log_lengths(axis, [int(x) for x in lines[0].x])
    charts.own_legend(axis)


def main() -> None:
    """The command line."""
    results = [json.loads(file.read_text()) for file in sorted(RUNS.glob("*.json"))]
    best = best_of_tests(results)
    with charts.style():
        figure, axes = charts.figure(
            1, 3, size=(6.0, 4.4), gridspec_kw={"width_ratios": [2, 1, 1]}
        )
        _heat_map(figure, axes[0, 0], best)
        for axis, test in zip(axes[0, 1:], LINES, strict=True):
            _lines(axis, best, test)
        PICTURE.write_bytes(charts.to_png(figure))


if __name__ == "__main__":
    main()
