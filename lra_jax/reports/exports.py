"""The rows of a report for other programs: CSV, JSON, and LaTeX to paste."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from lra_jax.reports.choice import (
    chosen_groups,
    describe_settings,
    find_families,
    settings_table,
    unequal_budgets,
)
from lra_jax.reports.comparison import differing_settings, full_title
from lra_jax.reports.protocol import protocol
from lra_jax.reports.runs import Group
from lra_jax.reports.table import Table, to_latex_text
from lra_jax.tasks import get_task
from lra_jax.training.result import shared_scores, standard_error

Row = dict[str, Any]
# Of language models.
_OF_TEXTS = ("bits_per_byte", "perplexity")


def rows(groups: Sequence[Group]) -> list[Row]:
    """One row for runs that differ only in their seed; accuracies are in percent.

    Rows are in the order of `find_families`, and ``chosen`` are those of a table with
    one row for each mechanism.
    """
    return [
        _row(group)
        | {
            "settings": differing_settings(group, groups),
            "settings_tried": len(family.groups),
            "chosen": any(group is one for one in family.chosen),
        }
        for family in find_families(groups)
        for group in family.groups
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
        "chosen_by": None if group.last_only else config.train.best_by,
        "validation_accuracy": group.mean("valid_accuracy_best"),
        "validation_loss": group.mean("valid_loss_best"),
        "test_accuracy": mean,
        "checkpoint": "last" if group.last_only else "best",
        "seeds": len(group.runs),
        "deviation_over_seeds": group.deviation(group.accuracy),
        "standard_error_of_examples": error,
        "test_accuracy_last": group.mean("test_accuracy_last"),
        "mean_over_parts": group.score if task.by_parts and group.parts else None,
        **_scores_of_texts(group),
        "official_data": group.official,
        "official_protocol": group.by_protocol,
        "test_examples": first.test_examples,
        "steps": first.steps,
        "training_examples": group.budget[0],
        "data_fingerprint": group.fingerprint,
        "steps_per_second": group.mean("steps_per_second"),
        "steps_per_second_kind": group.speed_kind,
        "parameters": first.parameters,
        "peak_memory_bytes": peak,
        "peak_memory_kind": kind,
        "device": group.text("device"),
        "commit": group.text("commit"),
        "command": first.command,
        "protocol": protocol(group),
    }


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


def to_latex(groups: Sequence[Group]) -> str:
    """Tables for each task, in the style of booktabs: first the runs by the LRA's
    protocol, comparable with published rows, then those with other training or models,
    then those on other data; and last for each task every setting of the mechanisms
    with several."""
    tables: dict[str, list[Group]] = {}
    for group in sorted(chosen_groups(groups), key=_rank):
        tables.setdefault(_caption(group), []).append(group)
    parts = [_table(caption, members, groups) for caption, members in tables.items()]
    for task in sorted({group.config.task for group in groups}):
        members = [group for group in groups if group.config.task == task]
        if (table := settings_table(members)).rows:
            caption = f"{task}, all settings"
            parts.append(table.latex(caption, [describe_settings(members)]))
    return "\n".join(["% \\usepackage{booktabs, tabularx}", *parts])


def _rank(group: Group) -> tuple[str, bool, bool]:
    return group.config.task, not group.by_protocol, not group.official


def _caption(group: Group) -> str:
    """The task of a group, its score if that is not the accuracy, and why it cannot be
    compared with published ones."""
    task = group.config.task
    name = task if group.metric == "accuracy" else f"{task}, {group.metric}"
    whose = "the LRA's" if get_task(task).suite is None else "the suite's"
    if not group.is_apart:
        return name
    return f"{name}, not {whose} {'protocol' if group.official else 'data settings'}"


def _table(caption: str, groups: Sequence[Group], among: Sequence[Group]) -> str:
    """Of language models with the scores of texts in place of the accuracy."""
    rows = [_row(group) for group in groups]
    names = [name for name in _OF_TEXTS if any(row[name] is not None for row in rows)]
    heads = [name.replace("_", " ") for name in names] or [
        f"test {groups[0].metric}, %"
    ]
    unequal = unequal_budgets(groups, among)
    # No mark where it would choose a setting on the test split.
    tried = {id(x): len(f.groups) for f in find_families(among) for x in f.chosen}
    by_test = any(group.last_only and tried[id(group)] > 1 for group in groups)
    is_marked = len(rows) > 1 and not unequal and not by_test
    columns = [_column(rows, name, is_marked) for name in names or ["accuracy"]]
    protocols = list(dict.fromkeys(row["protocol"] for row in rows))
    lines = []
    for group, row, *cells in zip(groups, rows, *columns, strict=True):
        model = to_latex_text(full_title(group, among))
        if len(protocols) > 1:
            mark = protocols.index(row["protocol"]) + 1
            model = Markup(rf"{model}\textsuperscript{{{mark}}}")
        speed = f"{row['steps_per_second']:.2f} ({group.speed_kind})"
        lines.append((model, *cells, row["seeds"], f"{row['parameters']:,}", speed))
    head = ("model", *heads, "seeds", "parameters", "steps/s")
    bold = "Bold: within one standard error of the best." if is_marked else ""
    note = _note(rows, protocols, unequal or bold)
    return Table(head, lines).latex(caption, note)


def _note(rows: Sequence[Row], protocols: Sequence[str], remark: str) -> list[str]:
    """How to read a table: which checkpoint and setting, errors, and the protocols."""
    words = "Test scores of the checkpoint and the setting that validation prefers"
    if any(row["checkpoint"] == "last" for row in rows):
        words = "Scores of the last checkpoint, as validation was the test split"
    errors = (
        "±: sample standard deviation over seeds; se: standard error of the test "
        "examples of a single seed"
    )
    several = len(protocols) > 1
    lines = [
        f"Protocol{f' {n}' if several else ''}: {protocol}."
        for n, protocol in enumerate(protocols, start=1)
    ]
    return [f"{words}; {errors}. {remark}", *lines]


def _column(rows: Sequence[Row], name: str, is_marked: bool) -> list[Markup]:
    """The cells of a score; bold are those within one standard error of the best."""
    sign = -1 if name in _OF_TEXTS else 1
    scores = [_score(row, name) for row in rows]
    known = [score for score in scores if score is not None]
    best, error, *_ = max(known, key=lambda score: sign * score[0])

    def cell(mean: float, _: float, digits: int, rest: str) -> Markup:
        text = f"{mean:.{digits}f}"
        if is_marked and sign * mean >= sign * best - error:
            text = rf"\mathbf{{{text}}}"
        return Markup(f"${text}{rest}")

    return [Markup("--") if score is None else cell(*score) for score in scores]


def _score(row: Row, name: str) -> tuple[float, float, int, str] | None:
    """The mean of a score, its standard error (0 if that is not known), its digits, and
    the LaTeX after it; None if a row has none, as words have no bits per byte."""
    mean, deviation = row["test_accuracy"], row["deviation_over_seeds"]
    digits, error, rest = 2, row["standard_error_of_examples"], "$"
    if name in _OF_TEXTS:
        digits, error = 3, None
        mean, deviation = row[name], row[f"{name}_deviation"]
    elif row["mean_over_parts"] is not None:
        mean, deviation, error = row["mean_over_parts"], None, None
        rest = "$ (mean over its parts)"
    if mean is None:
        return None
    if deviation is not None:
        error = deviation / math.sqrt(row["seeds"])
        rest = rf" \pm {deviation:.{digits}f}$"
    elif error is not None:
        rest = rf"$ (se ${error:.2f}$)"
    return mean, error or 0.0, digits, rest


Writer = Mapping[str, Callable[[Sequence[Group]], str]]
"""Files of a format, and how each is made of the groups of finished runs."""


def _write(text: Callable[[Sequence[Row]], str], end: str) -> Writer:
    """One file with a row for each mechanism, and one with every setting."""
    return {
        f"report.{end}": lambda groups: text([r for r in rows(groups) if r["chosen"]]),
        f"report-settings.{end}": lambda groups: text(rows(groups)),
    }


FORMATS: dict[str, Writer] = {
    "latex": {"report.tex": to_latex},
    "csv": _write(to_csv, "csv"),
    "json": _write(to_json, "json"),
}
