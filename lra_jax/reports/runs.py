"""Reads run directories, and groups runs that differ only in their seed."""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lra_jax import own_code
from lra_jax.configs import Config, get_preset
from lra_jax.errors import expected, renamed
from lra_jax.files import walked
from lra_jax.tasks import get_task
from lra_jax.training.metrics import FILE, missing_reports, read_metrics
from lra_jax.training.workdir import NUMBERS, as_written

_KINDS = {
    **{"versions": dict, "data_fingerprint": str, "official_data": bool},
    **{"steps_per_second_kind": str, "peak_memory_kind": str},
}
_LARGEST = 1e18


@dataclasses.dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
      folder: its path.
      config: its settings.
      result: its final result; None if it is not finished.
      metrics: the lines of its ``metrics.jsonl``.
      code: a hash of the source of a user's own attention; "" for a registered one.
    """

    folder: Path
    config: Config
    result: dict[str, Any] | None
    metrics: tuple[dict[str, Any], ...]
    code: str = ""


@dataclasses.dataclass(frozen=True)
class Group:
    """Finished runs with the same settings and different seeds."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        """The settings that all runs share, apart from the seed."""
        return self.runs[0].config

    @property
    def results(self) -> list[dict[str, Any]]:
        """The result of each run."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def official(self) -> bool:
        """Whether the data are those of the published rows."""
        return all(result["official_data"] for result in self.results)

    @property
    def by_protocol(self) -> bool:
        """Whether the row may be listed with published ones: it has their data and
        follows their protocol, even if no row of the mechanism was published."""
        task = get_task(self.config.task)
        return self.official and task.follows_protocol(self.config)

    @property
    def speed_kind(self) -> str:
        """``warm``, or ``cold`` if a run was so short that its steps/s include
        compilation."""
        kinds = {result["steps_per_second_kind"] for result in self.results}
        return "cold" if "cold" in kinds else "warm"

    def said(self, name: str) -> str | None:
        """A text of the results, such as the device: every different one; None if it
        was not recorded."""
        found = dict.fromkeys(str(x) for r in self.results if (x := r.get(name)))
        return " and ".join(found) or None

    @property
    def peak_memory(self) -> tuple[int, str]:
        """The highest peak of the runs in bytes, and what it covers."""
        kinds = sorted({result["peak_memory_kind"] for result in self.results})
        highest = max(result["peak_memory_bytes"] for result in self.results)
        return highest, ", ".join(kinds)

    @property
    def last_only(self) -> bool:
        """Whether the best checkpoint was chosen on the test split itself."""
        return self.config.data.chosen_on_test

    def mean(self, name: str) -> float:
        """Mean of a number over the results."""
        return statistics.fmean(result[name] for result in self.results)

    def deviation(self, name: str) -> float | None:
        """Sample standard deviation over seeds; None for a single seed."""
        values = [result[name] for result in self.results]
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def accuracy(self) -> str:
        """The accuracy that counts: the best checkpoint's unless it saw the test."""
        return "test_accuracy_last" if self.last_only else "test_accuracy_best"


def read_runs(*folders: Path) -> tuple[list[Run], list[str]]:
    """Reads every run directory in some folders, at any depth; each of them once.

    Returns:
      The runs, ordered by path within a folder, and one line for each directory that
      cannot be read.

    Raises:
      ValueError: a folder does not exist, or contains no run; or none can be read.
    """
    runs, problems = {}, {}
    for folder in folders:
        found, wrong = _read_folder(folder)
        for run in found:
            runs.setdefault(run.folder.resolve(), run)
        problems |= dict.fromkeys(wrong)
    if not runs:
        raise expected("RUNS", "runs that can be read", next(iter(problems)))
    return list(runs.values()), list(problems)


def _read_folder(folder: Path) -> tuple[list[Run], list[str]]:
    if not folder.is_dir():
        found = "a file" if folder.exists() else "which does not exist"
        raise expected("RUNS", "a folder of runs", f"{folder}, {found}")
    runs, problems = [], []
    for place in sorted(place for place, _, x in walked(folder) if "config.json" in x):
        try:
            runs.append(_read_run(place))
        except (ValueError, OSError) as error:
            problems.append(" ".join(f"{place}: {error}".split()))
    if not runs and not problems:
        raise expected("RUNS", "run directories (with a config.json)", folder)
    return runs, problems


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups finished runs that differ only in their seed, by task, the best first.

    Runs on other examples, or of another version of the user's attention, are other
    groups. Of two runs with the same seed the first is used; see `repeated`.
    """
    groups = [
        Group(tuple(seeds[seed][0] for seed in sorted(seeds)))
        for seeds in _by_seed(runs)
    ]
    return sorted(groups, key=lambda g: (g.config.task, -g.mean(g.accuracy)))


def best_group(groups: Sequence[Group]) -> Group | None:
    """The best of several settings, without a look at the test split.

    Only groups with the most seeds are compared: the missing seeds of a setting may be
    those that failed. Groups of equal accuracy are compared by their validation loss,
    and then by their settings, the preset's own first.

    Returns:
      None if several of them are left, and validation was the test split.
    """
    if len(groups) < 2:
        return groups[0] if groups else None
    most = max(len(group.runs) for group in groups)
    compared = [group for group in groups if len(group.runs) == most]
    if len(compared) > 1 and any(group.last_only for group in compared):
        return None
    by_loss = all(group.config.train.best_by == "loss" for group in compared)
    return min(compared, key=lambda group: _rank(group, by_loss))


def _rank(group: Group, by_loss: bool) -> tuple[Any, ...]:
    """Lower for better groups."""
    loss = group.mean("valid_loss_best")
    accuracy = group.mean("valid_accuracy_best")
    changed = settings_unlike_preset(group, apart_from=())
    others = len(changed), repr(sorted(group.config.identity().items()))
    return (loss, *others) if by_loss else (-accuracy, loss, *others)


def repeated(runs: Sequence[Run]) -> list[str]:
    """A line for each run that `group_runs` leaves out: its folder, and that of the
    run with the same settings and seed that is used."""
    return [
        f"{other.folder}: the same settings and seed as {first.folder}"
        for seeds in _by_seed(runs)
        for first, *others in seeds.values()
        for other in others
    ]


def _by_seed(runs: Sequence[Run]) -> list[dict[int, list[Run]]]:
    """Finished runs that differ only in their seed, by seed."""
    groups: dict[tuple, dict[int, list[Run]]] = {}
    for run in runs:
        if run.result is not None:
            settings = run.config.identity()
            seed = settings.pop("seed")
            settings.pop("data.path", None)  # The same files, wherever they lie.
            key = tuple(sorted((name, repr(value)) for name, value in settings.items()))
            key += (run.result["data_fingerprint"], run.code)
            groups.setdefault(key, {}).setdefault(seed, []).append(run)
    return list(groups.values())


def differing_settings(group: Group, groups: Sequence[Group]) -> str:
    """Distinguishes a group from others of its task, mechanism and preset by the flags
    that differ, as in ``learning_rate=0.001``; empty if it is the only one."""

    def shared(one: Group) -> tuple[str, ...]:
        return one.config.task, one.config.mixers, one.config.preset

    same = [one for one in groups if shared(one) == shared(group)]
    settings = [{**one.config.identity(), "seed": 0} for one in same]
    mine = {**group.config.identity(), "seed": 0}
    if len({_fingerprint(one) for one in same}) == 1:
        # The same files, wherever they lie.
        settings = [one | {"data.path": mine.get("data.path")} for one in settings]
    words = [
        f"{_short(name, mine)}={mine[name]}" for name in _differing(mine, settings)
    ]
    if len({_fingerprint(one) for one in same}) > 1:
        words.append(f"data {_fingerprint(group)[:6]}")
    return ", ".join([*words, *differing_code(group, same)])


def differing_code(group: Group, groups: Sequence[Group]) -> list[str]:
    """Distinguishes the version of a user's attention, if there are several, by the
    first run of it, whose folder holds its source."""
    same = [one for one in groups if one.config.attention == group.config.attention]
    first = {one.runs[0].code: one.runs[0].folder for one in reversed(same)}
    return [f"code of {first[group.runs[0].code]}"] if len(first) > 1 else []


def differing_data(group: Group, groups: Sequence[Group]) -> str:
    """Distinguishes the examples of a group from others of its task by the settings
    that differ, as in ``data.length=64``; empty if all groups have the same ones."""
    same = [one for one in groups if one.config.task == group.config.task]
    # One group for each set of examples, whatever the path from which it was read.
    several = {_fingerprint(one): one for one in reversed(same)}
    if len(several) == 1:
        return ""
    settings = {name: _data_settings(one) for name, one in several.items()}
    mine = settings.pop(_fingerprint(group))
    words = [f"{name}={mine[name]}" for name in _differing(mine, settings.values())]
    if mine in settings.values():
        words.append(f"data {_fingerprint(group)[:6]}")
    return ", ".join(words)


def differing_starts(group: Group, groups: Sequence[Group]) -> list[str]:
    """Distinguishes a group from others of its task by the data settings, as in
    ``checkpoint=RUN``, that differ and change training but not the examples."""

    def starts(one: Group) -> dict[str, Any]:
        return {
            name: getattr(one.config.data, name) for name in one.config.data.of_start
        }

    same = [one for one in groups if one.config.task == group.config.task]
    mine = starts(group)
    return [f"{name}={mine[name]}" for name in _differing(mine, map(starts, same))]


def settings_unlike_preset(group: Group, apart_from: Iterable[str]) -> list[str]:
    """The settings of model and training that are not the preset's, as NAME=value.

    Empty if there is no such preset any more. On other examples than the preset's, the
    batches and the length of the model follow the examples, and are left out.
    """
    config = group.config
    if config.preset not in get_task(config.task).presets:
        return []
    preset = get_preset(config.task, config.preset, config.attention).identity()
    mine, skipped = config.identity(), {*apart_from, *_OF_REPORTING}
    if data_unlike_preset(group):
        skipped |= {"train.batch_size", "model.max_length"}
    return [
        f"{_short(name, mine)}={value}"
        for name, value in config.protocol().items()
        if name not in skipped and value != preset.get(name)
    ]


def data_unlike_preset(group: Group) -> list[str]:
    """The settings of the examples that are not the preset's, as NAME=value; empty if
    there is no such preset any more."""
    config = group.config
    if config.preset not in get_task(config.task).presets:
        return []
    preset = get_preset(config.task, config.preset, config.attention).identity()
    return [
        f"{name.removeprefix('data.')}={value}"
        for name, value in _data_settings(group).items()
        if value != preset.get(name)
    ]


_OF_REPORTING = ("train.log_every", "train.eval_batch_size")


def _fingerprint(group: Group) -> str:
    """The hash of the examples."""
    return group.results[0]["data_fingerprint"]


def _data_settings(group: Group) -> dict[str, Any]:
    """The settings that determine which examples there are."""
    config = group.config
    of_batches = {f"data.{name}" for name in config.data.of_batches}
    return {
        name: value
        for name, value in config.identity().items()
        if name.startswith("data.") and name not in of_batches
    }


def _differing(
    mine: Mapping[str, Any], others: Iterable[Mapping[str, Any]]
) -> list[str]:
    """The names of the settings in which one differs from any of the others."""
    others = list(others)
    return [n for n, value in mine.items() if any(x.get(n) != value for x in others)]


def _short(name: str, names: Iterable[str]) -> str:
    """The last word of a setting's name where a command line takes it for this one: no
    other setting has it, or this is the one of training."""
    end = name.rpartition(".")[2]
    alike = [other for other in names if other.rpartition(".")[2] == end]
    return end if len(alike) == 1 or name.startswith("train.") else name


def unfinished(runs: Sequence[Run]) -> list[str]:
    """A line for each run without a result: its folder, and its progress."""
    lines = []
    for run in runs:
        if run.result is None:
            step = max((line["step"] for line in run.metrics), default=0)
            lines.append(f"{run.folder}: {step:,} of {run.config.train.steps:,} steps")
    return lines


def incomplete(runs: Sequence[Run]) -> list[str]:
    """A line for each finished run that has lost some of its metrics."""
    lines = []
    for run in runs:
        if run.result is not None:
            every = run.config.train.log_every
            lost = missing_reports(run.metrics, run.result["steps"], every)
            lines += [f"{run.folder / FILE}: {lost}"] if lost else []
    return lines


def _read_run(folder: Path) -> Run:
    config = Config.from_dict(_read_json(folder / "config.json"))
    try:
        metrics = tuple(read_metrics(folder))
    except ValueError as error:  # The folder is named already.
        place = Path(str(error).partition(": ")[0])
        raise renamed(error, place.name) from None
    result = None
    if (folder / "result.json").exists():
        result = _read_json(folder / "result.json")
        _check_result(result)
        if not as_written(folder, result):
            wanted = "the result of this run, as it was written"
            raise expected("result.json", wanted, "other values")
    return Run(folder, config, result, metrics, own_code.digest(folder))


def _check_result(result: dict[str, Any]) -> None:
    """Refuses values that the tables cannot show, or would show as invalid numbers."""
    for name in NUMBERS:
        value = result.get(name)
        place = f"result.json: {name}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise expected(place, "a finite number", repr(value))
        if not abs(value) < math.inf or abs(value) > _LARGEST:
            raise expected(place, "a finite number", f"{value}"[:60])
        least = 1 if name == "test_examples" else 0
        if value < least and not name.startswith("valid_loss"):
            raise expected(place, f"a number of at least {least}", value)
        if "accuracy" in name and value > 100:
            raise expected(place, "percent", value)
    parts = result.get("test_accuracy_by_length", {})
    if not isinstance(parts, dict):
        raise expected("result.json: test_accuracy_by_length", "dict", repr(parts))
    for length, value in parts.items():
        place = f"result.json: test_accuracy_by_length: {length}"
        if not isinstance(value, int | float) or not 0 <= value <= 100:
            raise expected(place, "percent", repr(value))
        if not re.fullmatch(r"(\d+/)?\d+", length):
            raise expected(place, "a length, or length/pairs", repr(length))
    for name, kind in _KINDS.items():
        value = result.get(name)
        if not isinstance(value, kind):
            raise expected(f"result.json: {name}", kind.__name__, repr(value))
    for name, version in result["versions"].items():
        if not isinstance(version, str):
            raise expected(f"result.json: versions: {name}", "text", repr(version))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise expected(path.name, "JSON", error) from None
    if not isinstance(values, dict):
        raise expected(path.name, "an object", repr(values))
    return values
