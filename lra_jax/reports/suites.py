"""The suites in a report: which mechanism solves which test.

Of the learning rates that were tried for a mechanism, and of the values of whatever
else its protocol tunes, the best by validation is used. A model that differs in another
setting has a row of its own. Runs on other examples, such as longer sequences, are
another test.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel
from lra_jax.reports.choice import (
    all_settings,
    best_group,
    find_families,
    unequal_budgets,
)
from lra_jax.reports.comparison import (
    data_unlike_preset,
    differing_code,
    differing_data,
    differing_starts,
    model_name,
)
from lra_jax.reports.page import Items, Part, Section
from lra_jax.reports.runs import Group
from lra_jax.reports.table import Table, number
from lra_jax.tasks import Task, get_task, suites
from lra_jax.training.result import shared_scores

Best = dict[str, dict[str, Group]]
"""The best group, by model and by the name of a test."""


class Test(NamedTuple):
    """A task on one set of examples.

    Attributes:
      name: the task's, with a number if there are several sets.
      task: the task.
      words: the data settings that distinguish it; empty if it is the only one.
      groups: the runs.
    """

    name: str
    task: Task
    words: str
    groups: list[Group]

    @property
    def data(self) -> Any:
        """Its data settings."""
        return self.groups[0].config.data


_WORDS = (
    "Settings that lack some of the seeds are not compared. Where a test is scaled, 0 "
    "is chance and 100 all correct. State is the count of numbers that all layers keep "
    "from one position to the next, for softmax at the longest sequence."
)
_PUBLISHED = (
    "Published rows have a larger model and longer training than the preset quick, and "
    "some are means over several settings: they show which order to expect."
)


def suite_sections(groups: Sequence[Group]) -> list[Section]:
    """A section for each suite and preset that has runs."""
    sections = []
    for name, tasks in suites().items():
        names = {task.name for task in tasks}
        for preset in dict.fromkeys(group.config.preset for group in groups):
            chosen = [
                group
                for group in groups
                if group.config.task in names and group.config.preset == preset
            ]
            if chosen:
                tests = find_tests(tasks, chosen)
                sections.append(_suite_section(f"{name}, preset {preset}", tests))
    return sections


def _suite_section(title: str, tests: Sequence[Test]) -> Section:
    published = any(test.task.published for test in tests)
    parts: list[Part] = [f"{_WORDS} {_PUBLISHED}" if published else _WORDS]
    longer = ", ".join(test.name for test in tests if test.task.by_parts)
    if longer:
        parts.append(
            f"Of {longer}: the mean over the lengths that are tested separately."
        )
    several = [f"{test.name}: {test.words}" for test in tests if test.words]
    if several:
        parts += ["Runs on other examples count as another test:", Items(several)]
    parts += _describe_examples(tests)
    best, slug = best_groups(tests), title.replace(", preset ", "-")
    values = {
        model: {name: score(group) for name, group in row.items()}
        for model, row in best.items()
    }
    caption = f"Suite {title}: accuracy of each mechanism, chance is 0 where scaled."
    parts.append(heat_map(f"suite-{slug}", values, tests, caption))
    parts += [*_unequal_tests(best, tests), suite_table(best, tests)]
    scores = scores_table(best, tests)
    if scores.ours:
        parts += ["The tests' own scores, of the same checkpoints:", scores]
    parts += all_settings([group for test in tests for group in test.groups])
    by_length = (chart_of_parts(test, best, slug) for test in tests)
    parts += [chart for chart in by_length if chart.panels[0].lines]
    return Section(f"Suite {title}", parts)


def _describe_examples(tests: Sequence[Test]) -> list[Part]:
    """How many examples were tested, and which are not the preset's."""
    parts: list[Part] = []
    counts = [
        f"{test.name} {test.groups[0].results[0].test_examples:,}"
        for test in tests
        if test.task.scores is None  # The examples of others are rows of many answers.
    ]
    if counts:
        parts.append(
            f"Test examples: {', '.join(counts)}. The standard error of an accuracy on "
            "n examples is at most 50 / sqrt(n) points, before scaling."
        )
    changes = {test.name: data_unlike_preset(test.groups[0]) for test in tests}
    changed = [
        f"{name}: {', '.join(words)}" for name, words in changes.items() if words
    ]
    if changed:
        parts += ["These examples are NOT the preset's:", Items(changed)]
    return parts


def _unequal_tests(best: Best, tests: Sequence[Test]) -> list[Part]:
    """The tests whose rows had unequal training budgets."""
    lines = []
    for test in tests:
        groups = [row[test.name] for row in best.values() if test.name in row]
        unequal = unequal_budgets(groups)
        lines += [f"{test.name}: {unequal}"] if unequal else []
    return [Items(lines)] if lines else []


def find_tests(tasks: Sequence[Task], groups: Sequence[Group]) -> list[Test]:
    """The tests that the groups ran, in the order of the tasks."""
    tests = []
    for task in tasks:
        of_task = [group for group in groups if group.config.task == task.name]
        by_data: dict[str, list[Group]] = {}
        for group in of_task:
            by_data.setdefault(differing_data(group, of_task), []).append(group)
        for place, words in enumerate(sorted(by_data), start=1):
            name = f"{task.name} {place}" if len(by_data) > 1 else task.name
            tests.append(Test(name, task, words, by_data[words]))
    return tests


def best_groups(tests: Sequence[Test]) -> Best:
    """The best group by validation of each model and test; models by the mean of their
    validation accuracies, or by name where validation was the test split."""
    best: Best = {}
    every = [group for test in tests for group in test.groups]
    for test in tests:
        for groups, _ in find_families(test.groups):
            name, group = model_name(groups[0]), best_group(groups)
            alike = [other for other in test.groups if model_name(other) == name]
            presets = {other.config.preset for other in alike}
            preset = [groups[0].config.preset] if len(presets) > 1 else []
            starts = differing_starts(groups[0], alike)
            words = (name, *preset, *starts, *differing_code(groups[0], every))
            if group is not None:
                best.setdefault(", ".join(words), {})[test.name] = group
    by_name = any(group.last_only for group in every)

    def rank(item: tuple[str, Mapping[str, Group]]) -> tuple[float, str]:
        model, row = item
        valid = statistics.fmean(x.mean("valid_accuracy_best") for x in row.values())
        return (0.0 if by_name else -valid, model)

    return dict(sorted(best.items(), key=rank))


def score(group: Group) -> float:
    """Test accuracy in percent, above chance if the test is scaled."""
    return _scale(get_task(group.config.task), group.config.data, group.score)


def _scale(task: Task, data: Any, accuracy: float) -> float:
    scaled = task.rescale(data, accuracy) if task.is_scaled else None
    return accuracy if scaled is None else 100 * scaled


def _mean(row: Mapping[str, Group]) -> float:
    return statistics.fmean(map(score, row.values()))


def suite_table(best: Best, tests: Sequence[Test]) -> Table:
    """A row for each model, then chance if a test has one, then published rows."""
    names = [test.name for test in tests]
    head = ("model", *names, "mean", "state", "parameters", "seeds", "source")
    rows = [
        (
            model,
            *(
                number(score(row[name]) if name in row else None, ".1f")
                for name in names
            ),
            number(_mean(row) if len(row) == len(names) else None, ".1f"),
            _span(group.results[0].state_size for group in row.values()),
            _span(group.results[0].parameters for group in row.values()),
            _span(len(group.runs) for group in row.values()),
            "",
        )
        for model, row in best.items()
    ]
    chances = [
        _scale(t.task, t.data, t.task.chance(t.data)) if t.task.chance else None
        for t in tests
    ]
    others = _published_rows(tests)
    if any(x is not None for x in chances):
        others = [("chance", *(number(x, ".1f") for x in chances), *[""] * 5), *others]
    return Table(head, [*rows, *others], words=(0, len(head) - 1), ours=len(rows))


def scores_table(best: Best, tests: Sequence[Test]) -> Table:
    """The scores besides the accuracy, such as bits per byte, of each model; means over
    seeds."""
    columns = [
        (test.name, key)
        for test in tests
        for key in shared_scores([x for group in test.groups for x in group.results])
    ]
    rows = [
        (
            model,
            *(
                number(row[n].mean(f"test_{key}"), ".3f") if n in row else "-"
                for n, key in columns
            ),
        )
        for model, row in best.items()
        if any(name in row for name, _ in columns)
    ]
    heads = (
        f"{name}, {key.removesuffix('_best').replace('_', ' ')}"
        for name, key in columns
    )
    return Table(("model", *heads), rows, ours=len(rows))


def _published_rows(tests: Sequence[Test]) -> list[tuple[str, ...]]:
    """The published rows; for tests on other examples than the preset's, or on files
    that are not the published ones, none."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    for test in tests:
        task = test.task
        other = bool(data_unlike_preset(test.groups[0]))
        other |= test.data.from_files and not test.groups[0].official
        for row in () if other else task.published:
            data = task.presets["official"]("softmax").data
            cells = rows.setdefault((row.model, row.source), {})
            cells[test.name] = _scale(task, data, row.accuracy)
    lines = []
    for (model, source), cells in rows.items():
        accuracies = (number(cells.get(test.name), ".1f") for test in tests)
        lines.append((f"published: {model}", *accuracies, *[""] * 4, source))
    return lines


def _span(numbers: Iterable[float | None]) -> str:
    """The least and the greatest number, as they may differ between tests."""
    values = {number for number in numbers if number is not None}
    ends = dict.fromkeys((min(values), max(values))) if values else ()
    return " to ".join(f"{value:,}" for value in ends) or "-"


def heat_map(
    name: str,
    values: Mapping[str, Mapping[str, float]],
    tests: Sequence[Test],
    caption: str,
) -> Chart:
    """The scores of each model in each test as shades with numbers."""
    models = list(values)
    cells = [[values[m].get(test.name, np.nan) for test in tests] for m in models]
    labels = [f"{t.name} (scaled)" if t.task.is_scaled else t.name for t in tests]
    # Room for the names: a row's is level, a column's sloping.
    wide, high = (max(map(len, texts)) for texts in (models, labels))
    size = (
        1.2 + 0.95 * len(tests) + max(1.4, 0.085 * wide),
        0.7 + 0.24 * len(models) + max(0.6, 0.055 * high),
    )

    metrics = {test.groups[0].metric for test in tests}
    metric = metrics.pop() if len(metrics) == 1 else "score"
    panel = charts.heat_map(cells, models, labels, f"{metric}, %")
    return Chart(name, [panel], caption, values, size=size)


def chart_of_parts(test: Test, best: Best, slug: str) -> Chart:
    """Accuracy against the lengths, or the numbers of pairs, of the parts: the mean
    over seeds, for models with such results."""
    lines, parts = [], "length of sequences"
    for model, row in best.items():
        means = row[test.name].parts if test.name in row else {}
        # Parts are named LENGTH, or LENGTH/PAIRS, unless somebody changed the file.
        if means and all(name[-1:].isdecimal() for name in means):
            if any("/" in name for name in means):
                parts = "number of pairs"
            places = [float(name.rpartition("/")[2]) for name in means]
            heights = [_scale(test.task, test.data, mean) for mean in means.values()]
            lines.append(charts.Line(model, places, heights))
    caption, label = f"{test.name}: test accuracy against the {parts}", "accuracy, %"
    if test.task.is_scaled:
        caption += "; 0 is chance, 100 all correct"
        label = "accuracy (scaled: 0 is chance), %"
    lengths = sorted({int(x) for line in lines for x in line.x})
    settings = {"xlabel": parts, "ylabel": label}
    panel = Panel(lines, lengths=lengths, settings=settings)
    name = f"lengths-{test.name.replace(' ', '-')}-{slug}"
    return Chart(name, [panel], f"{caption}.", size=(8, 4))
