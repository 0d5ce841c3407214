"""The tables of a report, as plain text cells: both HTML and markdown show them."""

import dataclasses
from collections.abc import Sequence

from lra_jax.reporting.collect import Group
from lra_jax.tasks import get_task
from lra_jax.tasks.published import FAILED, FIVE, ROWS, SIX

CHECKPOINTS = (
    "Checkpoint rule: test accuracy is of the checkpoint with the highest accuracy on "
    "the validation split, or the lowest loss where the protocol says so; the last "
    "checkpoint is that of the last step. Where the test "
    "split was also the validation split, as in LRA's code for text, only the last one "
    "counts."
)
AVERAGES = (
    "avg5 is the mean without Path-X; avg6 counts Path-X, a published failure as 50 %. "
    "Ours are given only where every task was run on LRA's data settings. Published "
    "rows are a survey, each of a protocol of its own: compare in a task's table."
)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
      header: names of the columns.
      rows: cells; the first column is text, numbers are in `numeric`.
      numeric: which columns are aligned to the right.
      ours: which rows are our own.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int]
    ours: frozenset[int]


def task_table(task: str, groups: Sequence[Group]) -> Table:
    """Our runs of a task, then floors and published rows."""
    header = (
        *("model", "test accuracy %", "last checkpoint %", "seeds", "steps/s"),
        *("peak memory", "parameters", "protocol or source"),
    )
    ours = [_own_row(group) for group in groups]
    others = []
    official = [group.config for group in groups if group.official]
    if official:
        known = get_task(task)
        beside = (row for c in official for row in known.published_beside(c))
        others = [
            (f"floor: {name}", f"{value:.2f}", *[""] * 5, "computed for LRA's data")
            for name, value in known.floors
        ]
        others += [
            (f"published: {row.model}", f"{row.accuracy:.2f}", *[""] * 5, row.source)
            for row in dict.fromkeys(beside)
        ]
    return Table(
        header,
        (*ours, *others),
        numeric=frozenset(range(1, 7)),
        ours=frozenset(range(len(ours))),
    )


def averages_table(groups: Sequence[Group]) -> Table:
    """A row for each mechanism and preset over all tasks, then the published rows."""
    header = ("model", *SIX, "avg5", "avg6", "source")
    by_model: dict[tuple[str, str], dict[str, float]] = {}
    for group in groups:
        if group.official:
            model = group.config.attention, group.config.preset
            scores = by_model.setdefault(model, {})
            score = group.mean(group.accuracy)
            task = group.config.task
            scores[task] = max(score, scores.get(task, 0.0))
    rows = [
        (
            f"{attention}, {preset}",
            *(_number(scores.get(task)) for task in SIX),
            _number(_mean(scores, FIVE)),
            _number(_mean(scores, SIX)),
            "this report; of several settings the best mean",
        )
        for (attention, preset), scores in by_model.items()
    ]
    published = [
        (
            f"published: {row.model}",
            *(_number(getattr(row, task)) for task in FIVE),
            "failed" if row.pathx == FAILED else _number(row.pathx),
            _number(row.avg5),
            _number(row.avg6),
            row.source,
        )
        for row in ROWS
    ]
    return Table(
        header,
        (*rows, *published),
        numeric=frozenset(range(1, 9)),
        ours=frozenset(range(len(rows))),
    )


def protocol(group: Group) -> str:
    """What was trained, and on what, in a line."""
    config, result = group.config, group.results[0]
    train, model, data = config.train, config.model, config.data
    split = "validation = test" if group.last_only else "own validation split"
    split += ", best by loss" if train.best_by == "loss" else ""
    note = "" if group.official else "; NOT LRA's data settings, do not compare"
    return (
        f"{config.preset}: {train.steps:,} steps of {train.batch_size}, "
        f"{model.num_layers} x {model.embed_dim} wide, {model.pooling} pooling, "
        f"{model.positions} positions, padding {model.padding}; data {data.origin}, "
        f"{split}, {result['test_examples']:,} test examples; "
        f"{result.get('device', 'unknown device')}{note}"
    )


def model_name(group: Group, groups: Sequence[Group]) -> str:
    """The mechanism and its preset, numbered where several groups share them."""
    name = f"{group.config.attention}, {group.config.preset}"
    same = [
        g
        for g in groups
        if (g.config.attention, g.config.preset)
        == (group.config.attention, group.config.preset)
    ]
    if len(same) > 1:
        name += f" ({same.index(group) + 1})"
    return name


def _own_row(group: Group) -> tuple[str, ...]:
    config = group.config
    best = "(saw the test)" if group.last_only else _spread(group, "test_accuracy_best")
    return (
        f"{config.attention}, {config.preset}",
        best,
        _spread(group, "test_accuracy_last"),
        ", ".join(str(run.config.seed) for run in group.runs),
        f"{group.mean('steps_per_second'):.2f}",
        _memory(group),
        f"{group.results[0]['parameters']:,}",
        protocol(group),
    )


def _spread(group: Group, name: str) -> str:
    """Mean and sd over seeds; for one seed the standard error of its test examples."""
    mean, deviation = group.mean(name), group.deviation(name)
    if deviation is not None:
        return f"{mean:.2f} ± {deviation:.2f} (sd, {len(group.runs)} seeds)"
    examples = group.results[0]["test_examples"]
    error = (mean * (100 - mean) / examples) ** 0.5
    return f"{mean:.2f} (1 seed; se {error:.2f})"


def _memory(group: Group) -> str:
    """The greatest peak of the runs, and what was counted."""
    known = [r for r in group.results if r.get("peak_memory_bytes")]
    if not known:
        return "not recorded"
    peak = max(r["peak_memory_bytes"] for r in known)
    kinds = sorted({str(r.get("peak_memory_kind", "")) for r in known})
    return f"{peak / 2**20:,.0f} MiB ({', '.join(kinds)})"


def _mean(scores: dict[str, float], tasks: Sequence[str]) -> float | None:
    if not all(task in scores for task in tasks):
        return None
    return sum(scores[task] for task in tasks) / len(tasks)


def _number(value: float | str | None) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-"
