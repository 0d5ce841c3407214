"""Learning curves in a report."""

import json
from pathlib import Path

import pytest

from lra_jax.reports import charts, curves
from reports.made_runs import groups_in


def test_curves_are_means_at_the_steps_that_all_seeds_have(runs: Path) -> None:
    metrics = runs / "a1" / "metrics.jsonl"
    more = {"step": 3000, "split": "valid", "accuracy": 0.3}
    metrics.write_text(metrics.read_text() + json.dumps(more) + "\n")
    changed = runs / "a2" / "metrics.jsonl"
    changed.write_text(changed.read_text().replace("0.1,", "0.4,"))
    first, second = curves.learning_curves(groups_in(runs))
    assert first.label == "cosformer, compact" and list(first.x) == [1000, 2000]
    assert first.y == pytest.approx([20, 20])
    assert [len(x) for x, _ in first.faint] == [2, 3, 2]
    assert list(second.y) == pytest.approx([10, 20]) and not second.faint


def test_runs_of_other_lengths_are_not_on_one_axis() -> None:
    lines = [
        charts.Line(str(last), [last // 2, last], [1.0, 2.0])
        for last in (4000, 100, 1000, 200)
    ]
    panels = curves.by_length(lines)
    labels = [[line.label for line in panel] for panel in panels]
    assert labels == [["100", "200"], ["4000", "1000"]]
    assert panels[1][0].style == 0
