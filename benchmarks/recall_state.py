"""Recall against the size of the state: python benchmarks/recall_state.py

Draws docs/recall_state.png from finished runs of the task mqar in results/recall_state/
(``python -m lra_jax.sweep --suite=recall --task=mqar --model.num_heads=1,8``, and two
heads, the default, with the mechanisms and rate that docs/suites.md names). A layer of
a given width has the same number of parameters however many heads it has, but a linear
mechanism with N heads of H columns keeps N H^2 numbers: fewer heads, more state.
The left panel has more mechanisms, with two heads, from results/suites/.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from results_tables import most_pairs, named

from lra_jax.reports import charts

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "results" / "recall_state"
OTHERS = tuple(
    ROOT / "results" / "suites" / f"mqar-{name}-rate0.01-seed0.json"
    for name in ("flow", "flow-feature-map-relu", "performer", "retention", "softmax")
)
PICTURE = ROOT / "docs" / "recall_state.png"
SHARED_STATE = 4_096
"""Numbers that linear mechanisms keep in the left panel, about."""


def read() -> dict[str, list[dict[str, Any]]]:
    """The results of each mechanism, the smallest state first."""
    results = [json.loads(file.read_text()) for file in sorted(RUNS.glob("*.json"))]
    found: dict[str, list[dict[str, Any]]] = {}
    for result in sorted(results, key=lambda one: one["state_size"]):
        found.setdefault(named(result), []).append(result)
    return found


def by_pairs(result: dict[str, Any]) -> dict[int, float]:
    """Accuracy in percent by the number of pairs to recall."""
    parts = result["test_accuracy_by_length"]
    return {int(name.rpartition("/")[2]): value for name, value in parts.items()}


def draw(found: dict[str, list[dict[str, Any]]]) -> Any:
    """Left against the pairs, right against the state."""
    figure, axes = charts.figure(1, 2, size=(6.0, 4.2))
    same = {name: _nearest(runs) for name, runs in found.items()}
    others = [json.loads(file.read_text()) for file in OTHERS]
    same |= {named(result): result for result in others}
    pairs = [
        charts.Line(name, list(by_pairs(run)), list(by_pairs(run).values()))
        for name, run in same.items()
    ]
    states = [
        charts.Line(name, [x["state_size"] for x in runs], [*map(most_pairs, runs)])
        for name, runs in found.items()
    ]
    label = "accuracy, %"
    charts.draw(axes[0, 0], pairs, xlabel="pairs to recall", ylabel=label)
    charts.log_lengths(axes[0, 0], sorted({int(x) for line in pairs for x in line.x}))
    wide = "numbers in the state, most pairs"
    charts.draw(axes[0, 1], states, xlabel=wide, ylabel=label)
    charts.log_lengths(axes[0, 1], [1024, 2048, 4096, 8192, 16384])
    charts.legend(figure, axes)
    return figure


def _nearest(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run whose state is nearest to the shared size."""
    return min(runs, key=lambda x: abs(math.log(x["state_size"] / SHARED_STATE)))


def main() -> None:
    """The command line."""
    with charts.style():
        PICTURE.write_bytes(charts.to_png(draw(read())))


if __name__ == "__main__":
    main()
