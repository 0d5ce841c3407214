"""The rows of a report for other programs: CSV, JSON, and LaTeX to paste."""

import csv
import io
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from lra_jax.reports.runs import Group, differing_settings
from lra_jax.tasks import get_task
from lra_jax.training.scores import standard_error

Row = dict[str, Any]
# What a spreadsheet takes for the start of a formula.
_OF_FORMULAS = ("=", "+", "-", "@")
# Of language models.
_OF_TEXTS = ("bits_per_byte", "perplexity")
# Characters that are special in LaTeX.
_MARKS = {ord(mark): f"\\{mark}" for mark in "&%$#_{}"} | {
    ord("\\"): r"\textbackslash{}",
    ord("~"): r"\textasciitilde{}",
    ord("^"): r"\textasciicircum{}",
}


def rows(groups: Sequence[Group]) -> list[Row]:
    """One row for runs that differ only in their seed; accuracies are in percent."""
    return [
        _row(group) | {"settings": differing_settings(group, groups)}
        for group in groups
    ]


def _row(group: Group) -> Row:
    config, first = group.config, group.results[0]
    task, mean = get_task(config.task), group.mean(group.accuracy)
    # Several answers in an example are not independent trials.
    error = None
    if not (task.packs_rows or task.per_position):
        error = standard_error(mean, first["test_examples"])
    peak, kind = group.peak_memory
    return {
        "task": config.task,
        "attention": config.mixers,
        "preset": config.preset,
        "test_accuracy": mean,
        "checkpoint": "last" if group.last_only else "best",
        "seeds": len(group.runs),
        "deviation_over_seeds": group.deviation(group.accuracy),
        "standard_error_of_examples": error,
        "test_accuracy_last": group.mean("test_accuracy_last"),
        "mean_over_parts": _mean_over_parts(group) if task.by_parts else None,
        **_scores_of_texts(group),
        "official_data": group.official,
        "official_protocol": group.by_protocol,
        "test_examples": first["test_examples"],
        "steps": first["steps"],
        "steps_per_second": group.mean("steps_per_second"),
        "steps_per_second_kind": group.speed_kind,
        "parameters": first["parameters"],
        "peak_memory_bytes": peak,
        "peak_memory_kind": kind,
        "device": group.said("device"),
        "commit": group.said("commit"),
        "command": first.get("command"),
    }


def _mean_over_parts(group: Group) -> float | None:
    """None if the parts were not recorded."""
    if not all(result.get("test_accuracy_by_length") for result in group.results):
        return None
    accuracy = get_task(group.config.task).accuracy_of
    return statistics.fmean(map(accuracy, group.results))


def _scores_of_texts(group: Group) -> Row:
    """Mean and deviation over seeds of the scores that only language models have; None
    for others."""
    found: Row = {}
    for name in _OF_TEXTS:
        key = f"test_{name}_best"
        there = all(key in result for result in group.results)
        found[name] = group.mean(key) if there else None
        found[f"{name}_deviation"] = group.deviation(key) if there else None
    return found


def to_csv(found: Sequence[Row]) -> str:
    """A table with a header; an empty cell is a number that was not recorded.

    Spreadsheets would compute text that begins like a formula, so it gets a quote.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
    writer.writeheader()
    for row in found:
        writer.writerow({name: _without_formula(cell) for name, cell in row.items()})
    return text.getvalue()


def _without_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in _OF_FORMULAS else cell


def to_json(found: Sequence[Row]) -> str:
    """A list of objects."""
    return json.dumps(found, indent=2) + "\n"


def to_latex(found: Sequence[Row]) -> str:
    """Tables for each task, in the style of booktabs: first the runs by the LRA's
    protocol, comparable with published rows, then those with other training or models,
    then those on other data."""
    tables: dict[str, list[Row]] = {}
    for row in sorted(found, key=_rank):
        tables.setdefault(_caption(row), []).append(row)
    return "\n".join(_table(caption, rows) for caption, rows in tables.items())


def _rank(row: Row) -> tuple[str, bool, bool]:
    return row["task"], not row["official_protocol"], not row["official_data"]


def _caption(row: Row) -> str:
    """The task of a row, and why it cannot be compared with published ones."""
    whose = "the LRA's" if get_task(row["task"]).suite is None else "the suite's"
    if row["official_protocol"]:
        return row["task"]
    if row["official_data"]:
        return f"{row['task']}, not {whose} protocol"
    return f"{row['task']}, not {whose} data settings"


def _table(caption: str, found: Sequence[Row]) -> str:
    """Of language models with the scores of texts in place of the accuracy."""
    scores = [name for name in _OF_TEXTS if any(row[name] is not None for row in found)]
    heads = [name.replace("_", " ") for name in scores] or [r"test accuracy, \%"]
    lines = []
    for row in found:
        own = [_score(row, name) for name in scores] or [_accuracy(row)]
        cells = (_escaped(_name(row)), *own, row["seeds"], f"{row['parameters']:,}")
        lines.append(rf"{' & '.join(map(str, cells))} & {_speed(row)} \\")
    head = rf"model & {' & '.join(heads)} & seeds & parameters & steps/s \\"
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\begin{{tabular}}{{l{'r' * len(heads)}rrr}}",
            *(r"\toprule", head, r"\midrule", *lines, r"\bottomrule"),
            r"\end{tabular}",
            "\\end{table}\n",
        ]
    )


def _name(row: Row) -> str:
    more = f" ({row['settings']})" if row["settings"] else ""
    return f"{row['attention']}, {row['preset']}{more}"


def _score(row: Row, name: str) -> str:
    """Mean and deviation over seeds; words have no bits per byte."""
    if row[name] is None:
        return "--"
    deviation = row[f"{name}_deviation"]
    if deviation is None:
        return f"${row[name]:.3f}$"
    return rf"${row[name]:.3f} \pm {deviation:.3f}$ (sd)"


def _accuracy(row: Row) -> str:
    """Mean and deviation over seeds; for one seed its examples' standard error, where
    examples have one answer each."""
    if row["mean_over_parts"] is not None:
        return f"${row['mean_over_parts']:.2f}$ (mean over its parts)"
    mean, deviation = row["test_accuracy"], row["deviation_over_seeds"]
    if deviation is not None:
        return rf"${mean:.2f} \pm {deviation:.2f}$ (sd)"
    error = row["standard_error_of_examples"]
    return f"${mean:.2f}$" if error is None else f"${mean:.2f}$ (se ${error:.2f}$)"


def _speed(row: Row) -> str:
    return f"{row['steps_per_second']:.2f} ({row['steps_per_second_kind']})"


def _escaped(text: str) -> str:
    return text.translate(_MARKS)


FORMATS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "latex": ("report.tex", to_latex),
    "csv": ("report.csv", to_csv),
    "json": ("report.json", to_json),
}
