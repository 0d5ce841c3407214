"""The rows of a report for other programs: CSV, JSON, and LaTeX to paste."""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from lra_jax.reports.comparison import differing_settings
from lra_jax.reports.runs import Group
from lra_jax.reports.table import Table
from lra_jax.tasks import get_task
from lra_jax.training.result import shared_scores, standard_error

Row = dict[str, Any]
# Of language models.
_OF_TEXTS = ("bits_per_byte", "perplexity")


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
    if group.metric == "accuracy" and not (task.packs_rows or task.per_position):
        error = standard_error(mean, first.test_examples)
    peak, kind = group.peak_memory
    return {
        "task": config.task,
        "attention": config.mixers,
        "preset": config.preset,
        "metric": group.metric,
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
        "test_examples": first.test_examples,
        "steps": first.steps,
        "steps_per_second": group.mean("steps_per_second"),
        "steps_per_second_kind": group.speed_kind,
        "parameters": first.parameters,
        "peak_memory_bytes": peak,
        "peak_memory_kind": kind,
        "device": group.text("device"),
        "commit": group.text("commit"),
        "command": first.command,
    }


def _mean_over_parts(group: Group) -> float | None:
    """None if the parts were not recorded."""
    if not all(result.test_accuracy_by_length for result in group.results):
        return None
    accuracy = get_task(group.config.task).accuracy_of
    return statistics.fmean(accuracy(result.to_dict()) for result in group.results)


def _scores_of_texts(group: Group) -> Row:
    """Mean and deviation over seeds of the scores that only language models have; None
    for others."""
    scores: Row = {}
    for name in _OF_TEXTS:
        key = f"test_{name}_best"
        there = f"{name}_best" in shared_scores(group.results)
        scores[name] = group.mean(key) if there else None
        scores[f"{name}_deviation"] = group.deviation(key) if there else None
    return scores


def to_csv(rows: Sequence[Row]) -> str:
    """A table with a header; an empty cell is a number that was not recorded."""
    return Table(list(rows[0]), [list(row.values()) for row in rows]).csv()


def to_json(rows: Sequence[Row]) -> str:
    """A list of objects."""
    return json.dumps(rows, indent=2) + "\n"


def to_latex(rows: Sequence[Row]) -> str:
    """Tables for each task, in the style of booktabs: first the runs by the LRA's
    protocol, comparable with published rows, then those with other training or models,
    then those on other data."""
    tables: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_rank):
        tables.setdefault(_caption(row), []).append(row)
    return "\n".join(_table(caption, members) for caption, members in tables.items())


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


def _table(caption: str, rows: Sequence[Row]) -> str:
    """Of language models with the scores of texts in place of the accuracy."""
    scores = [name for name in _OF_TEXTS if any(row[name] is not None for row in rows)]
    heads = [name.replace("_", " ") for name in scores] or [
        f"test {rows[0]['metric']}, %"
    ]
    lines = []
    for row in rows:
        cells = [
            _mean_and_deviation(row[name], row[f"{name}_deviation"], 3)
            for name in scores
        ]
        speed = f"{row['steps_per_second']:.2f} ({row['steps_per_second_kind']})"
        more = f" ({row['settings']})" if row["settings"] else ""
        model = f"{row['attention']}, {row['preset']}{more}"
        numbers = (row["seeds"], f"{row['parameters']:,}", speed)
        lines.append((model, *(cells or [_accuracy(row)]), *numbers))
    head = ("model", *heads, "seeds", "parameters", "steps/s")
    return Table(head, lines).latex(caption)


def _accuracy(row: Row) -> Markup:
    """Mean and deviation over seeds; for one seed its examples' standard error, where
    examples have one answer each."""
    if row["mean_over_parts"] is not None:
        return Markup(f"${row['mean_over_parts']:.2f}$ (mean over its parts)")
    deviation, error = row["deviation_over_seeds"], row["standard_error_of_examples"]
    shown = _mean_and_deviation(row["test_accuracy"], deviation, 2)
    if deviation is None and error is not None:
        return shown + Markup(f" (se ${error:.2f}$)")
    return shown


def _mean_and_deviation(
    mean: float | None, deviation: float | None, digits: int
) -> Markup:
    """Words have no bits per byte, and a single seed no deviation."""
    if mean is None:
        return Markup("--")
    if deviation is None:
        return Markup(f"${mean:.{digits}f}$")
    return Markup(rf"${mean:.{digits}f} \pm {deviation:.{digits}f}$ (sd)")


FORMATS: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "latex": ("report.tex", to_latex),
    "csv": ("report.csv", to_csv),
    "json": ("report.json", to_json),
}
