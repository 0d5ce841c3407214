"""Draws the measurements of `causal.py`.

    python benchmarks/causal_figure.py results/causal.json results/causal.png

Time and extra memory per token: linear cost is a horizontal line. Our forms are black,
the peers grey, with different markers and dashes. A line ends at the last length at
which its form ran.
"""

import json
import sys
from pathlib import Path
from typing import Any

PASSES = ("forward", "forward+backward")
STYLES = {
    "linear": ("black", "o", "-"),
    "cosformer": ("black", "s", "-"),
    "flow": ("black", "^", "-"),
    "softmax": ("black", "d", "-."),
    "attnax": ("dimgrey", "D", "--"),
    "fast_transformers": ("dimgrey", "v", "--"),
    "fla": ("dimgrey", "P", "--"),
    "buckets": ("dimgrey", "x", ":"),
    "prefix_sum": ("darkgrey", "*", "-."),
    "jax_softmax": ("darkgrey", "<", "-."),
    "torch_softmax": ("darkgrey", ">", "-."),
}


def draw(report: dict[str, Any], file: Path) -> None:
    """Writes the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 8), sharex=True, sharey="col")
    for row, name in zip(axes, PASSES, strict=True):
        for axis, allocator in zip(row, ("default", "tuned"), strict=False):
            rows = [x for x in report["times"] if x["allocator"] == allocator]
            _lines(axis, report, rows, name, "fastest_ms", 1e3)
            axis.set_title(f"{name}, {allocator} allocator")
            axis.set_ylabel("time a token, µs")
        _lines(row[2], report, report["memory"], name, "extra_mb", 1e3)
        row[2].set_title(f"{name}, extra memory")
        row[2].set_ylabel("extra memory a token, kB")
    for axis in axes[1]:
        axis.set_xlabel("length, tokens")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, frameon=False)
    settings = "batch 1, 8 heads of 64, float32"
    figure.suptitle(f"Causal attention, {settings}, {report['device']}")
    figure.tight_layout(rect=(0, 0.1, 1, 0.99))
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _lines(
    axis: Any,
    report: dict[str, Any],
    rows: list[dict[str, Any]],
    name: str,
    key: str,
    unit: float,
) -> None:
    """Draws ``unit * row[key]`` per token over the length, a line for each form."""
    for form, described in report["forms"].items():
        points = [
            (row["length"], unit * row[key] / row["length"])
            for row in rows
            if row["form"] == form and row["pass"] == name and row.get(key, 0) > 0
        ]
        if points:
            color, marker, dashes = STYLES[form]
            axis.plot(
                *zip(*points, strict=True),
                color=color,
                marker=marker,
                linestyle=dashes,
                markersize=5,
                label=described["title"],
            )
    lengths = sorted({row["length"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(
        lengths, [f"{x // 1024}K" if x >= 1024 else str(x) for x in lengths]
    )
    axis.grid(color="gainsboro", linewidth=0.5)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
