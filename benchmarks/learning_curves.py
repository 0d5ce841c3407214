"""Draws the validation curves of the runs in results/learning/ and results/pathfinder/.

    python benchmarks/learning_curves.py

Each run there consists of its `result.json` and the validation lines of its
`metrics.jsonl`, both as the trainer wrote them. The pictures are docs/learning.png and
docs/pathfinder.png.
"""

import json
from pathlib import Path
from typing import Any

from results_tables import flag, mixers, taught

from lra_jax.reports import charts

ROOT = Path(__file__).parents[1]

# Constant lines of each picture. The published rows are of the Long-Range Arena, for
# models trained only on the task's own labels.
PICTURES = {
    "learning": {"cosFormer, published": 37.9, "Flowformer, published": 38.7},
    "pathfinder": {"chance": 50.0},
}
TITLES = {"learning": "ListOps", "pathfinder": "Pathfinder, 32 x 32 pixels"}


def main() -> None:
    """Writes the pictures."""
    for name, levels in PICTURES.items():
        lines = _lines(ROOT / "results" / name)
        last = max(max(line.x) for line in lines)
        lines += [
            charts.Line(label, [0, last], [value, value])
            for label, value in levels.items()
        ]
        with charts.style():
            figure, axes = charts.figure(1, 1, size=(10, 4))
            labels = {"xlabel": "training step", "ylabel": "validation accuracy, %"}
            charts.draw(axes[0, 0], lines, title=TITLES[name], **labels)
            charts.whole_numbers(axes[0, 0])
            charts.legend(figure, axes)
            target = ROOT / "docs" / f"{name}.png"
            target.write_bytes(charts.to_png(figure))


def _lines(folder: Path) -> list[charts.Line]:
    """A validation curve for each run of a folder."""
    lines = []
    for file in sorted(folder.glob("*.metrics.jsonl")):
        result = json.loads((folder / f"{file.name.split('.')[0]}.json").read_text())
        points = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [point["step"] for point in points]
        accuracy = [100 * point["accuracy"] for point in points]
        lines.append(charts.Line(_name(result), steps, accuracy))
    return lines


def _name(result: dict[str, Any]) -> str:
    """The label of a run's curve."""
    first, size = taught(result), flag(result, "train.batch_size")
    whole = result["task"] == "pathfinder" and not flag(result, "model.patch")
    parts = (
        mixers(result),
        flag(result, "data.level"),
        f"{result['steps']:,} steps",
        f"{first} first" if first else "",
        "no patches" if whole else "",
        f"batches of {size}" if size not in ("", "32") else "",
        f"seed {result['seed']}" if result["seed"] else "",
    )
    return ", ".join(filter(None, parts))


if __name__ == "__main__":
    main()
