"""Learning curves: those of a run in its own directory, and those of a report."""

import contextlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel
from lra_jax.reports.comparison import full_title
from lra_jax.reports.runs import Group
from lra_jax.training.metrics import read_metrics

_LONGER = 4  # A run may have this many times the steps of others in its panel.


def draw_run(workdir: Path, title: str, metric: str = "accuracy") -> Path | None:
    """Writes ``curves.png``: loss and accuracy, or the metric in its place, in training
    and validation.

    Returns:
      Its path; None without metrics, or if it cannot be written, since a missing
      picture must not fail the run.
    """
    metrics = read_metrics(workdir)
    if not metrics:
        return None
    splits = {"train": "training", "valid": "validation"}
    kinds = (("loss", 1, "loss"), ("accuracy", 100, f"{metric}, %"))
    panels = []
    for name, unit, label in kinds:
        points = {
            words: _points(metrics, x, name, unit)
            for x, words in splits.items()
            # Of training only what each batch measures.
            if x == "valid" or name == "loss" or metric in ("accuracy", "f1")
        }
        lines = [
            charts.Line(words, list(some), list(some.values()))
            for words, some in points.items()
            if some
        ]
        labels = {"xlabel": "training step", "ylabel": label}
        panels.append(Panel(lines, integers="x", settings=labels))
    file = workdir / "curves.png"
    with contextlib.suppress(OSError):
        Chart("curves", panels, size=(4.6, 3.2), title=title).save(file)
        return file
    return None


def _points(
    metrics: Iterable[Mapping[str, Any]], split: str, name: str, unit: float
) -> dict[int, float]:
    """A metric of a split by step, in a unit."""
    of_split = (line for line in metrics if line["split"] == split)
    return {line["step"]: unit * line[name] for line in of_split if name in line}


def learning_curves(
    groups: Sequence[Group], among: Sequence[Group] = ()
) -> list[charts.Line]:
    """Validation accuracy in percent of each group that has any: the mean over seeds at
    the steps common to all, and each seed. Names say what differs `among` more groups.
    """
    lines = []
    for group in groups:
        seeds = [_points(run.metrics, "valid", "accuracy", 100) for run in group.runs]
        steps = sorted(set.intersection(*map(set, seeds)))
        if not steps:
            continue
        values = [[seed[step] for seed in seeds] for step in steps]
        line = charts.Line(
            full_title(group, among or groups),
            steps,
            list(map(statistics.fmean, values)),
        )
        if len(seeds) > 1:
            faint = [(list(seed), list(seed.values())) for seed in seeds]
            spread = list(map(statistics.stdev, values))
            line = line._replace(spread=spread, faint=faint)
        lines.append(line)
    return lines


def chart(task: str, lines: Sequence[charts.Line], metric: str = "accuracy") -> Chart:
    """The curves of a task, with runs of about the same length in one panel."""
    groups = by_length(lines)
    panels = []
    for members in groups:
        last = max(line.x[-1] for line in members)
        title = task if len(groups) == 1 else f"{task}, up to {last:,} steps"
        settings = {"title": title, "xlabel": "training step"}
        panels.append(Panel(members, integers="x", settings=settings))
    caption = f"Learning curves of {task}: validation {metric} against steps."
    if any(line.faint for line in lines):
        caption += (
            " Thin lines are seeds, the thick one is their mean, the band their "
            "sample standard deviation."
        )
    size = (8 if len(groups) == 1 else 4.6, 4)
    label = f"validation {metric}, %"
    name = f"curves-{task}".replace(":", ".")  # A file, and a relative address.
    return Chart(name, panels, caption, size=size, ylabels=(label,))


def by_length(lines: Sequence[charts.Line]) -> list[list[charts.Line]]:
    """Groups lines whose last steps are within a factor of four; styles follow their
    order."""
    styled = [line._replace(style=n) for n, line in enumerate(lines)]
    panels: list[list[charts.Line]] = []
    for line in sorted(styled, key=lambda line: line.x[-1]):
        if not panels or line.x[-1] > _LONGER * panels[-1][0].x[-1]:
            panels.append([])
        panels[-1].append(line)
    return [sorted(panel, key=lambda line: line.style or 0) for panel in panels]
