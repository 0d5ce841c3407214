"""The rows of a report for other programs: CSV, JSON, and LaTeX to paste."""

import csv
import io
import json
from collections.abc import Callable, Sequence
from typing import Any

from lra_jax.reports.runs import Group, differing_settings
from lra_jax.training.scores import standard_error

Row = dict[str, Any]
# Characters that LaTeX reads as more than text.
_MARKS = {ord(mark): f"\\{mark}" for mark in "&%$#_{}"} | {
    ord("\\"): r"\textbackslash{}",
    ord("~"): r"\textasciitilde{}",
    ord("^"): r"\textasciicircum{}",
}


def rows(groups: Sequence[Group]) -> list[Row]:
    """One row for runs that differ in their seed alone; accuracies are in percent."""
    return [
        _row(group) | {"settings": differing_settings(group, groups)}
        for group in groups
    ]


def _row(group: Group) -> Row:
    config, first = group.config, group.results[0]
    mean = group.mean(group.accuracy)
    return {
        "task": config.task,
        "attention": config.attention,
        "preset": config.preset,
        "test_accuracy": mean,
        "checkpoint": "last" if group.last_only else "best",
        "seeds": len(group.runs),
        "deviation_over_seeds": group.deviation(group.accuracy),
        "standard_error_of_examples": standard_error(mean, first["test_examples"]),
        "test_accuracy_last": group.mean("test_accuracy_last"),
        "official_data": group.official,
        "test_examples": first["test_examples"],
        "steps": first["steps"],
        "steps_per_second": group.mean("steps_per_second"),
        "parameters": first["parameters"],
        "peak_memory_bytes": first.get("peak_memory_bytes"),
        "device": first.get("device"),
        "commit": first.get("commit"),
        "command": first.get("command"),
    }


def to_csv(found: Sequence[Row]) -> str:
    """A table with a head; an empty cell is a number that was not recorded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def to_json(found: Sequence[Row]) -> str:
    """A list of objects."""
    return json.dumps(found, indent=2) + "\n"


def to_latex(found: Sequence[Row]) -> str:
    """A table for each task, in the style of booktabs; those not on the LRA's data
    settings apart."""
    kinds = list(dict.fromkeys((row["task"], row["official_data"]) for row in found))
    return "\n".join(
        _table(
            task if official else f"{task}, not the LRA's data settings",
            [r for r in found if (r["task"], r["official_data"]) == (task, official)],
        )
        for task, official in kinds
    )


def _table(caption: str, found: Sequence[Row]) -> str:
    lines = [
        f"{_escaped(_name(row))} & {_accuracy(row)} & "
        rf"{row['seeds']} & {row['parameters']:,} & {row['steps_per_second']:.2f} \\"
        for row in found
    ]
    head = r"model & test accuracy, \% & seeds & parameters & steps/s \\"
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escaped(caption)}}}",
            r"\begin{tabular}{lrrrr}",
            *(r"\toprule", head, r"\midrule", *lines, r"\bottomrule"),
            r"\end{tabular}",
            "\\end{table}\n",
        ]
    )


def _name(row: Row) -> str:
    more = f" ({row['settings']})" if row["settings"] else ""
    return f"{row['attention']}, {row['preset']}{more}"


def _accuracy(row: Row) -> str:
    deviation = row["deviation_over_seeds"]
    more = "" if deviation is None else rf" \pm {deviation:.2f}"
    return f"${row['test_accuracy']:.2f}{more}$"


def _escaped(text: str) -> str:
    return text.translate(_MARKS)


FORMATS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "latex": ("report.tex", to_latex),
    "csv": ("report.csv", to_csv),
    "json": ("report.json", to_json),
}
