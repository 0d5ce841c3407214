"""Draws time and memory against the length, both logarithmic, with their slopes."""

from collections.abc import Mapping
from typing import Any

from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel


def draw(report: Mapping[str, Any]) -> Chart:
    """The picture of a report, with one column of panels for each kind of work.

    A line is one mechanism in one dtype; it ends where the next length did not fit or
    would have taken too long. T^x in a panel's legend is the slope, over the lengths
    from 4,096 tokens on if there are two. Many lines have one legend without it.
    """
    rows = [row for row in report["rows"] if row["status"] == "measured"]
    works = list(dict.fromkeys(row["work"] for row in rows))
    names = list(dict.fromkeys((row["attention"], row["dtype"]) for row in rows))
    slopes = {
        (x["attention"], x["work"], x["dtype"]): x for x in report.get("exponents", [])
    }
    is_alone = len(names) <= charts.COLOURS
    small = min((row["peak_bytes"] for row in rows), default=0) < 1_000_000
    unit, name = (1e-6, "MB") if small else (1e-9, "GB")
    kinds = (
        ("time", "median_ms", 1.0, "time of a call, ms"),
        ("memory", "peak_bytes", unit, f"peak memory, {name}"),
    )
    panels = []
    for kind, key, unit, label in kinds:
        for work in works:
            lines = []
            for style, (attention, dtype) in enumerate(names):
                line = attention, work, dtype
                points = sorted(
                    (row["length"], unit * row[key])
                    for row in rows
                    if (row["attention"], row["work"], row["dtype"]) == line
                )
                if points:
                    title = attention if dtype == "float32" else f"{attention}, {dtype}"
                    if is_alone and line in slopes:
                        title += f", $T^{{{slopes[line][kind]:.2f}}}$"
                    xs, ys = zip(*points, strict=True)
                    lines.append(charts.Line(title, xs, ys, style=style))
            settings = {"ylabel": label}
            settings |= {"title": work} if kind == "time" else {"xlabel": "tokens"}
            lengths = [x for line in lines for x in line.x]
            looks: Any = {"lengths": lengths, "legend": is_alone}
            panels.append(Panel(lines, is_log=True, settings=settings, **looks))
    return Chart(
        "benchmark",
        panels,
        columns=len(works),
        size=(6.2 if is_alone else 5.0, 3.2),
        layout={"sharex": "col"},
        title=_title(report, "\n" if len(works) < 2 else "; "),
    )


def _title(report: Mapping[str, Any], between: str) -> str:
    row = report["rows"][0] if report["rows"] else {}
    sizes = f"batch {row.get('batch_size', '-')}"
    if "heads" in row:
        sizes += f", {row['heads']} heads of {row['head_dim']}"
        sizes += ", causal" if row["causal"] else ""
    return f"{sizes}{between}{report['device']}, jax {report['versions']['jax']}"
