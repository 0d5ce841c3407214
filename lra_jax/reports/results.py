"""The report of finished runs: our rows with the published ones, and the curves."""

import collections
from collections.abc import Sequence
from pathlib import Path

from lra_jax.configs import TASKS
from lra_jax.reports import curves
from lra_jax.reports.choice import (
    all_settings,
    best_group,
    chosen_groups,
    unequal_budgets,
)
from lra_jax.reports.comparison import differing_code, full_title, title
from lra_jax.reports.page import Items, Page, Part, Section
from lra_jax.reports.protocol import protocol
from lra_jax.reports.runs import Group
from lra_jax.reports.suites import suite_sections
from lra_jax.reports.table import Table, number
from lra_jax.tasks import get_task
from lra_jax.tasks.published import ROWS, SIX, Row
from lra_jax.training.result import standard_error

_CHECKPOINTS = (
    "Checkpoint rule: test accuracy is that of the checkpoint with the highest "
    "accuracy on the validation split, or the lowest loss where the protocol says so; "
    "the last checkpoint is that of the last step. Where the test split was also the "
    "validation split, as in LRA's code for text, only the last one counts."
)
_AVERAGES = (
    "avg5 is the mean without Path-X; avg6 includes it, with a published failure as "
    "50 %. Ours are for runs that follow LRA's protocol, the preset official on LRA's "
    "data. Published rows are a survey, each with its own protocol: to compare, see "
    "the tables of the tasks."
)
_OTHERS = (
    "Runs whose data, model or training differ from LRA's: not comparable with "
    "published rows."
)
_EQUAL = "Comparable with each other: all have the same training budget."
_OTHER_AVERAGES = (
    "The same averages of runs on LRA's data whose model or training does not follow "
    "LRA's protocol: not comparable with published rows, nor with each other where "
    "the training budgets of a task differ, see its tables."
)


def make_page(groups: Sequence[Group], notes: Sequence[str], folder: Path) -> Page:
    """The page of a report, which the caller writes: finished runs, and a line for
    each run that is not shown."""
    page = Page("Long-Range Arena: report of runs", folder)
    runs = _several(sum(len(group.runs) for group in groups), "finished run")
    page.add(
        f"{runs} of {_several(len(groups), 'setting')}. A mechanism has one row for "
        "each preset and set of examples, at the setting with the best validation "
        "score (mean over seeds), and rows are in the order of that score: the test "
        "split neither chooses nor sorts. Where validation was the test split, nothing "
        "is chosen, and every setting has a row. Accuracies are in percent of the "
        "whole test split; ± is the sample standard deviation over seeds. For a single "
        "seed, se is the standard error from the number of test examples alone, which "
        "says nothing about other seeds.",
        _CHECKPOINTS,
        "Steps/s is the median in training, without evaluations and compilation; "
        "(cold) marks a run so short that compilation is included. Peak memory states "
        "what it covers: a device, or the whole process.",
    )
    differing = differing_versions(groups)
    if differing:
        page.add(f"The runs differ in versions: {'; '.join(differing)}.")
    page.add(*suite_sections(groups))
    every, groups = groups, [g for g in groups if get_task(g.config.task).suite is None]
    for task, members in by_task(groups).items():
        page.add(_task_section(task, members))
    if groups:
        other = averages_table(groups, is_official=False)
        parts: list[Part] = [_AVERAGES, averages_table(groups)]
        page.add(Section("All tasks", parts))
        if other.ours:
            page.add(_OTHER_AVERAGES, other)
    page.add(Section("How to reproduce", [Items(commands(every), True)]))
    if notes:
        page.add(Section("Not shown", [Items(notes)]))
    return page


def _task_section(task: str, groups: Sequence[Group]) -> Section:
    """The runs beside published rows, the others, their curves, and all settings."""
    parts: list[Part] = []
    chosen = chosen_groups(groups)
    for is_official in (True, False):
        members = [group for group in chosen if group.by_protocol == is_official]
        if members:
            unequal = unequal_budgets(members)
            parts += [_OTHERS] if members[0].is_apart else []
            parts += [unequal or _EQUAL] if len(members) > 1 else []
            parts.append(task_table(task, members, groups))
    parts += all_settings(groups)
    lines = curves.learning_curves(chosen, groups)
    parts += [curves.chart(task, lines, groups[0].metric)] if lines else []
    return Section(task, parts)


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each task, with tasks in LRA's order."""
    trained = {group.config.task for group in groups}
    tasks = [name for name in TASKS if name in trained] + sorted(trained - {*TASKS})
    return {task: [g for g in groups if g.config.task == task] for task in tasks}


def task_table(
    task: str, groups: Sequence[Group], among: Sequence[Group] = ()
) -> Table:
    """Our runs of a task, then baselines for its data, and the published rows with the
    protocol of one of the runs; names say what differs `among` more groups."""
    head = (
        "model",
        f"test {groups[0].metric} %",
        "last checkpoint %",
        "seeds",
        "steps/s",
        "peak memory",
        "parameters",
        "protocol or source",
    )
    rows = [_our_row(group, among or groups) for group in groups]
    if any(group.official for group in groups):
        info = get_task(task)
        for name, accuracy in info.floors:
            source = "computed for LRA's data"
            rows.append((f"baseline: {name}", f"{accuracy:.2f}", *[""] * 5, source))
        alike = [group.config for group in groups if group.by_protocol]
        for row in dict.fromkeys(x for c in alike for x in info.published_beside(c)):
            accuracy = f"{row.accuracy:.2f}"
            rows.append((f"published: {row.model}", accuracy, *[""] * 5, row.source))
    return Table(head, rows, words=(0, 7), ours=len(groups))


def averages_table(groups: Sequence[Group], is_official: bool = True) -> Table:
    """A row over all tasks for each mechanism.

    Those of runs by the LRA's protocol, and then the published rows; or those of the
    other runs on LRA's data, by preset.
    """
    ours = _averages([g for g in groups if g.official and g.by_protocol == is_official])
    published = [row._replace(model=f"published: {row.model}") for row in ROWS]
    rows = [*ours, *(published if is_official else ())]
    head = ("model", *SIX, "avg5", "avg6", "source")
    cells = [
        (row.model, *map(_average, (*row[1:7], row.avg5, row.avg6)), row.source)
        for row in rows
    ]
    return Table(head, cells, words=(0, 9), ours=len(ours))


def _averages(groups: Sequence[Group]) -> list[Row]:
    """A row for each model; of several settings, the best by validation counts."""
    tried: dict[str, dict[str, list[Group]]] = {}
    for group in groups:
        if group.config.task in SIX:
            model = ", ".join((title(group), *differing_code(group, groups)))
            of_task = tried.setdefault(model, {}).setdefault(group.config.task, [])
            of_task.append(group)
    source = "this report; of several settings the best by validation"
    rows = []
    for model, by_task in tried.items():
        best = [best_group(by_task.get(task, [])) for task in SIX]
        means = (
            None if group is None else group.mean(group.accuracy) for group in best
        )
        rows.append(Row._make((model, *means, source, None)))
    return rows


def _average(value: float | str | None) -> str:
    """Some published cells are words."""
    return value if isinstance(value, str) else number(value, ".2f")


def commands(groups: Sequence[Group]) -> list[str]:
    """The command of every run, with the versions and the commit that it used."""
    lines = []
    for result in (result for group in groups for result in group.results):
        commits = []
        for commit in (result.commit or "unknown").split("; "):
            number, dash, dirty = commit.partition("-")
            commits.append(f"{number[:12]}{dash}{dirty}")
        command = result.command or "lra_jax.train.run(config)"
        origin = f"jax {result.versions.get('jax', '?')}, commit {'; '.join(commits)}"
        lines.append(f"{command}  # {origin}")
    return lines


def differing_versions(groups: Sequence[Group]) -> list[str]:
    """The packages whose versions differ between runs, and how many runs used each."""
    counts: dict[str, collections.Counter[str]] = {}
    for result in (result for group in groups for result in group.results):
        for name, version in result.versions.items():
            counts.setdefault(name, collections.Counter())[version] += 1
    return [
        f"{name} {', '.join(f'{version} ({n})' for version, n in sorted(used.items()))}"
        for name, used in counts.items()
        if len(used) > 1
    ]


def _our_row(group: Group, groups: Sequence[Group]) -> tuple[str, ...]:
    best = _spread(group, "test_accuracy_best")
    best += " chosen on the test split" if group.last_only else ""
    # Marked if a run was too short to exclude compilation.
    cold = " (cold)" if group.speed_kind == "cold" else ""
    peak, kind = group.peak_memory
    return (
        full_title(group, groups),
        best,
        _spread(group, "test_accuracy_last"),
        str(len(group.runs)),
        f"{group.mean('steps_per_second'):.2f}{cold}",
        f"{peak / 2**20:,.0f} MiB ({kind})",
        f"{group.results[0].parameters:,}",
        protocol(group),
    )


def _spread(group: Group, name: str) -> str:
    """Mean and sd over seeds; for one seed the standard error of its test examples."""
    mean, deviation = group.mean(name), group.deviation(name)
    if deviation is not None:
        return f"{mean:.2f} ± {deviation:.2f}"
    if group.metric != "accuracy":
        return f"{mean:.2f}"
    error = standard_error(mean, group.results[0].test_examples)
    return f"{mean:.2f} (se {error:.2f})"
