"""Draws time and memory against the length, both logarithmic, with their slopes."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
_COLORS += ("#8c564b", "#000000", "#9467bd")
_MARKERS = "os^vDP*X<>"


def check_library() -> None:
    """Raises ``ValueError`` where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "the picture needs matplotlib: install the extra 'plot' "
            "(pip install 'lra-jax[plot]'), or give --picture=False for the JSON alone"
        )


def draw(report: Mapping[str, Any], file: Path) -> None:
    """Writes the picture of a report, one column of panels for each work.

    A line is one mechanism in one dtype; it ends where the next length did not fit or
    would have taken too long. T^x is its slope, from 4,096 tokens on where it has two
    such lengths.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in report["rows"] if row["status"] == "measured"]
    works = list(dict.fromkeys(row["work"] for row in rows))
    slopes = {
        (x["attention"], x["work"], x["dtype"]): x for x in report.get("exponents", [])
    }
    lines = list(dict.fromkeys((row["attention"], row["dtype"]) for row in rows))
    size = (5.5 * max(len(works), 1) + 0.5, 7.5 + 0.18 * len(lines))
    figure, panels = pyplot.subplots(
        2, max(len(works), 1), figsize=size, squeeze=False, sharex="col"
    )
    for column, work in enumerate(works):
        for panel, key, slope in zip(
            panels[:, column],
            ("median_ms", "peak_bytes"),
            ("time", "memory"),
            strict=True,
        ):
            for index, line in enumerate(lines):
                points = [
                    (row["length"], row[key] / (1e9 if key == "peak_bytes" else 1))
                    for row in rows
                    if (row["attention"], row["dtype"]) == line and row["work"] == work
                ]
                if points:
                    found = slopes.get((line[0], work, line[1]))
                    _line(panel, points, index, line, found and found[slope])
            _axes(panel, [row["length"] for row in rows if row["work"] == work])
        panels[0, column].set_title(work)
        panels[1, column].set_xlabel("tokens")
    panels[0, 0].set_ylabel("time of a call, ms")
    panels[1, 0].set_ylabel("peak memory of the compiled call, GB")
    figure.suptitle(_title(report), fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def _line(
    panel: Any,
    points: list[tuple[int, float]],
    index: int,
    line: tuple[str, str],
    slope: float | None,
) -> None:
    label = line[0] if line[1] == "float32" else f"{line[0]}, {line[1]}"
    panel.plot(
        *zip(*sorted(points), strict=True),
        color=_COLORS[index % len(_COLORS)],
        marker=_MARKERS[index % len(_MARKERS)],
        linestyle="--" if line[0].startswith("softmax") else "-",
        markersize=5,
        linewidth=1.3,
        label=label if slope is None else f"{label}  T^{slope:.2f}",
    )


def _axes(panel: Any, lengths: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    ticks = sorted(set(lengths))
    names = [f"{x // 1024}K" if x % 1024 == 0 else str(x) for x in ticks]
    panel.set_xticks(ticks, names)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(color="gainsboro", linewidth=0.5)
    panel.legend(fontsize=7, frameon=False)


def _title(report: Mapping[str, Any]) -> str:
    row = report["rows"][0] if report["rows"] else {}
    sizes = f"batch {row.get('batch_size', '-')}"
    if "heads" in row:
        sizes += f", {row['heads']} heads of {row['head_dim']}"
        sizes += ", causal" if row["causal"] else ""
    return f"{sizes}; {report['device']}, jax {report['versions']['jax']}"
