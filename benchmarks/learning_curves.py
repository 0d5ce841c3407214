"""Draws the validation curves of the runs in results/learning/.

    python benchmarks/learning_curves.py

Each run there consists of its `result.json` and the validation lines of its
`metrics.jsonl`, both as the trainer wrote them. The picture is docs/learning.png.
"""

import json
from pathlib import Path
from typing import Any

from results_tables import taught

from lra_jax.reports import charts

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "learning"
TARGET = ROOT / "docs" / "learning.png"

# Rows of the Long-Range Arena, for models trained only on the task's own labels.
PUBLISHED = {"cosFormer, published": 37.9, "Flowformer, published": 38.7}


def main() -> None:
    """Writes the picture."""
    lines = []
    for file in sorted(FOLDER.glob("*.metrics.jsonl")):
        result = json.loads((FOLDER / f"{file.name.split('.')[0]}.json").read_text())
        points = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [point["step"] for point in points]
        accuracy = [100 * point["accuracy"] for point in points]
        lines.append(charts.Line(_name(result), steps, accuracy))
    last = max(max(line.x) for line in lines)
    lines += [
        charts.Line(name, [0, last], [value, value])
        for name, value in PUBLISHED.items()
    ]
    with charts.style():
        figure, axes = charts.figure(1, 1, size=(10, 4))
        labels = {"xlabel": "training step", "ylabel": "validation accuracy, %"}
        charts.draw(axes[0, 0], lines, title="ListOps", **labels)
        charts.whole_numbers(axes[0, 0])
        charts.legend(figure, axes)
        TARGET.write_bytes(charts.to_png(figure))


def _name(result: dict[str, Any]) -> str:
    """The label of a run's curve."""
    first = taught(result)
    parts = (
        result["attention"],
        f"{result['steps']:,} steps",
        f"{first} first" if first else "",
        f"seed {result['seed']}" if result["seed"] else "",
    )
    return ", ".join(filter(None, parts))


if __name__ == "__main__":
    main()
