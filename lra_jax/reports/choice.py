"""Which setting of a mechanism a report shows: validation chooses, never the test."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lra_jax.reports.comparison import (
    full_title,
    model_name,
    settings_unlike_preset,
    title,
)
from lra_jax.reports.page import Part
from lra_jax.reports.runs import Group
from lra_jax.reports.table import Table
from lra_jax.tasks import get_task

SETTINGS = (
    "Every setting of the mechanisms with several, the best by validation first; "
    "scores are not scaled."
)


class Family(NamedTuple):
    """The settings of one mechanism, on one set of examples, from one preset.

    Attributes:
      groups: all settings, the chosen one first.
      chosen: those of the rows of a report: one, or all of them where validation was
        the test split, on which nothing may be chosen.
    """

    groups: list[Group]
    chosen: list[Group]


def find_families(groups: Sequence[Group]) -> list[Family]:
    """The families of some groups by task, the best by validation first."""
    tried: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        tried.setdefault(_identify(group), []).append(group)
    families: dict[str, list[Family]] = {}
    for alike in tried.values():
        best, ranked = best_group(alike), rank_groups(alike)
        if best is None:
            family = Family(ranked, ranked)
        else:
            others = [group for group in ranked if group is not best]
            family = Family([best, *others], [best])
        families.setdefault(alike[0].config.task, []).append(family)
    return [
        family
        for of_task in families.values()
        for first in rank_groups([family.groups[0] for family in of_task])
        for family in of_task
        if family.groups[0] is first
    ]


def _identify(group: Group) -> tuple[Any, ...]:
    """The values that all settings of a family share: of a suite's test also those of
    the model, apart from the ones that its protocol tunes."""
    config, data = group.config, group.config.data
    examples = (group.fingerprint, group.official)
    shared = (config.task, config.preset, *examples, group.runs[0].code)
    if get_task(config.task).suite is None:
        return *shared, config.mixers, group.by_protocol
    starts = (getattr(data, name) for name in data.start_fields)
    return *shared, model_name(group), *starts


def chosen_groups(groups: Sequence[Group]) -> list[Group]:
    """The groups that have a row, see `Family`."""
    return [group for family in find_families(groups) for group in family.chosen]


def best_group(groups: Sequence[Group]) -> Group | None:
    """The best of several settings, without a look at the test split.

    Only groups with the most seeds are compared: the missing seeds of a setting may be
    those that failed.

    Returns:
      None if several of them are left, and validation was the test split.
    """
    most = max((len(group.runs) for group in groups), default=0)
    compared = [group for group in groups if len(group.runs) == most]
    if len(compared) > 1 and any(group.last_only for group in compared):
        return None
    return next(iter(rank_groups(compared)), None)


def rank_groups(groups: Sequence[Group]) -> list[Group]:
    """Orders groups by their validation accuracy, or by their loss if that chose all
    their checkpoints.

    Groups of equal accuracy are ordered by their validation loss, and then by their
    settings, the preset's own first. Where validation was the test split, the order is
    that of their names.
    """
    by_name = any(group.last_only for group in groups)
    by_loss = all(group.config.train.best_by == "loss" for group in groups)

    def rank(group: Group) -> tuple[Any, ...]:
        """Lower for better groups."""
        loss = group.mean("valid_loss_best")
        accuracy = group.mean("valid_accuracy_best")
        changed = settings_unlike_preset(group, apart_from=())
        others = len(changed), repr(sorted(group.config.identity().items()))
        if by_name:
            return title(group), *others
        return (loss, *others) if by_loss else (-accuracy, loss, *others)

    return sorted(groups, key=rank)


def settings_table(groups: Sequence[Group]) -> Table:
    """Every setting of the mechanisms with several, with its scores, and with its task
    if there are several."""
    head = ("task", "model", "chosen", "validation", "test score %", "seeds")
    head = (*head, "training examples")
    rows = []
    for family in find_families(groups):
        for group in family.groups if len(family.groups) > 1 else ():
            is_chosen = len(family.chosen) == 1 and group is family.chosen[0]
            score = f"{group.score:.2f}"
            score += " (last checkpoint)" if group.last_only else ""
            name, mark = full_title(group, groups), "yes" if is_chosen else ""
            counts = len(group.runs), f"{group.budget[0]:,}"
            cells = (name, mark, validation(group), score, *counts)
            rows.append((group.config.task, *cells))
    first = 0 if len({group.config.task for group in groups}) > 1 else 1
    return Table(head[first:], [row[first:] for row in rows], words=range(3 - first))


def describe_settings(groups: Sequence[Group]) -> str:
    """The text above the table of all settings, which says if their budgets differ."""
    families = find_families(groups)
    if all(len({group.budget for group in x.groups}) == 1 for x in families):
        return SETTINGS
    return (
        f"{SETTINGS} Settings of unequal numbers of training examples (steps x batch "
        "size) are NOT comparable with each other."
    )


def all_settings(groups: Sequence[Group]) -> list[Part]:
    """The table of all settings, if a mechanism has several."""
    table = settings_table(groups)
    return [describe_settings(groups), table] if table.rows else []


def validation(group: Group) -> str:
    """The validation score that chose the checkpoints, as a mean over seeds."""
    if group.last_only:
        return "the test split"
    if group.config.train.best_by == "loss":
        return f"loss {group.mean('valid_loss_best'):.4f}"
    return f"{group.metric} {group.mean('valid_accuracy_best'):.2f}"


def unequal_budgets(groups: Sequence[Group], among: Sequence[Group] = ()) -> str:
    """Says which rows cannot be compared; empty if all have the same training budget.
    Names say what differs `among` more groups."""
    names: dict[tuple[int, str], dict[str, None]] = {}
    for group in groups:
        of_budget = names.setdefault(group.budget, {})
        of_budget[full_title(group, among or groups)] = None
    if len(names) < 2:
        return ""
    several = len({data for _, data in names}) > 1
    parts = (
        f"{shown:,} examples{f' of data {data[:6]}' if several else ''} for "
        f"{' and '.join(some)}"
        for (shown, data), some in sorted(names.items())
    )
    counts = {shown for shown, _ in names}
    what = "training budgets (steps x batch size)" if len(counts) > 1 else "the data"
    return f"NOT comparable with each other: {what} differ, {'; '.join(parts)}."
