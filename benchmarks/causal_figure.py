"""Draws the measurements of `causal.py`.

    python benchmarks/causal_figure.py results/causal.json results/causal.png

Time and extra memory per token: linear cost is a horizontal line. A line ends at the
last length at which its form ran.
"""

import json
import sys
from pathlib import Path
from typing import Any

from common import PASSES

from lra_jax.reports import charts


def draw(report: dict[str, Any], file: Path) -> None:
    """Writes the picture."""
    with charts.style():
        size = (4.6, 4.2)
        figure, axes = charts.figure(2, 3, size=size, sharex=True, sharey="col")
        for row, name in zip(axes, PASSES, strict=True):
            for axis, allocator in zip(row, ("default", "tuned"), strict=False):
                times = [x for x in report["times"] if x["allocator"] == allocator]
                lines = _lines(report, times, name, "fastest_ms")
                title = f"{name}, {allocator} allocator"
                charts.draw(axis, lines, title=title, ylabel="time per token, µs")
            lines = _lines(report, report["memory"], name, "extra_mb")
            title, unit = f"{name}, extra memory", "extra memory per token, kB"
            charts.draw(row[2], lines, title=title, ylabel=unit)
            for axis in row:
                charts.log_lengths(axis, [x["length"] for x in report["times"]])
                charts.log_scale(axis)
        for axis in axes[1]:
            axis.set_xlabel("length, tokens")
        settings = "batch 1, 8 heads of 64, float32"
        figure.suptitle(f"Causal attention, {settings}, {report['device']}")
        charts.legend(figure, axes)
        file.write_bytes(charts.to_png(figure))


def _lines(
    report: dict[str, Any], rows: list[dict[str, Any]], name: str, key: str
) -> list[charts.Line]:
    """For each form that ran, ``1000 row[key]`` per token over the length."""
    lines = []
    for index, (form, described) in enumerate(report["forms"].items()):
        points = [
            (row["length"], 1e3 * row[key] / row["length"])
            for row in rows
            if row["form"] == form and row["pass"] == name and (row.get(key) or 0) > 0
        ]
        if points:
            xs, ys = zip(*points, strict=True)
            lines.append(charts.Line(described["title"], xs, ys, style=index))
    return lines


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
