"""Draws time and memory against the length, both logarithmic, with their slopes."""

from collections.abc import Mapping
from typing import Any

from lra_jax.reports import charts

_TIME = ("time", "median_ms", 1.0, "time of a call, ms")
_GIGABYTES = ("memory", "peak_bytes", 1e-9, "peak memory, GB")
_MEGABYTES = ("memory", "peak_bytes", 1e-6, "peak memory, MB")


def draw(report: Mapping[str, Any]) -> Any:
    """The picture of a report, with one column of panels for each kind of work.

    A line is one mechanism in one dtype; it ends where the next length did not fit or
    would have taken too long. T^x at its end is its slope, over the lengths from 4,096
    tokens on if there are two; where lines share colours, only the text has it.
    """
    rows = [row for row in report["rows"] if row["status"] == "measured"]
    works = list(dict.fromkeys(row["work"] for row in rows))
    slopes = {
        (x["attention"], x["work"], x["dtype"]): x for x in report.get("exponents", [])
    }
    size = (5.0, 3.2)
    figure, axes = charts.figure(2, max(len(works), 1), size=size, sharex="col")
    lines = list(dict.fromkeys((row["attention"], row["dtype"]) for row in rows))
    small = min((row["peak_bytes"] for row in rows), default=0) < 1_000_000
    panels = _TIME, _MEGABYTES if small else _GIGABYTES
    for column, work in zip(axes.T, works, strict=False):
        for axis, (name, key, unit, label) in zip(column, panels, strict=True):
            drawn, powers = [], []
            for index, (attention, dtype) in enumerate(lines):
                points = sorted(
                    (row["length"], unit * row[key])
                    for row in rows
                    if (row["attention"], row["work"], row["dtype"])
                    == (attention, work, dtype)
                )
                if points:
                    title = attention if dtype == "float32" else f"{attention}, {dtype}"
                    slope = slopes.get((attention, work, dtype))
                    powers.append(f"$T^{{{slope[name]:.2f}}}$" if slope else "")
                    xs, ys = zip(*points, strict=True)
                    drawn.append(charts.Line(title, xs, ys, style=index))
            charts.draw(axis, drawn, ylabel=label)
            charts.log_lengths(axis, [x for line in drawn for x in line.x])
            charts.log_scale(axis)
            if len(lines) <= charts.COLOURS:
                charts.end_labels(axis, drawn, powers)
        column[0].set_title(work)
        column[1].set_xlabel("tokens")
    charts.legend(figure, axes)
    figure.suptitle(_title(report, "\n" if len(works) < 2 else "; "))
    return figure


def _title(report: Mapping[str, Any], between: str) -> str:
    row = report["rows"][0] if report["rows"] else {}
    sizes = f"batch {row.get('batch_size', '-')}"
    if "heads" in row:
        sizes += f", {row['heads']} heads of {row['head_dim']}"
        sizes += ", causal" if row["causal"] else ""
    return f"{sizes}{between}{report['device']}, jax {report['versions']['jax']}"
