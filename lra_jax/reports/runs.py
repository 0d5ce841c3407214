"""Reads run directories, and groups runs that differ only in their seed."""

import contextlib
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lra_jax import own_code
from lra_jax.configs import Config
from lra_jax.errors import InputError, expected, on_one_line, rename
from lra_jax.files import read_json, walk_links
from lra_jax.tasks import get_task
from lra_jax.training.metrics import FILE, missing_reports, read_metrics
from lra_jax.training.result import Result, read_result


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
    result: Result | None
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
    def results(self) -> list[Result]:
        """The result of each run."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def fingerprint(self) -> str:
        """The hash of the examples."""
        return self.results[0].data_fingerprint

    @property
    def official(self) -> bool:
        """Whether the data are those of the published rows."""
        return all(result.official_data for result in self.results)

    @property
    def by_protocol(self) -> bool:
        """Whether the row may be listed with published ones: it has their data and
        follows their protocol, even if no row of the mechanism was published."""
        task = get_task(self.config.task)
        return self.official and task.follows_protocol(self.config)

    @property
    def is_apart(self) -> bool:
        """Whether it is to be kept apart from published rows; a task of the user that
        names none has nothing to differ from."""
        task = self.config.task
        has_rows = ":" not in task or get_task(task).published
        return bool(has_rows) and not self.by_protocol

    @property
    def budget(self) -> tuple[int, str]:
        """How many examples training showed, in the run that it started from as well,
        and the hash of the data: rows of other budgets cannot be compared."""
        train = self.config.train
        before = max(int(result.shown_before or 0) for result in self.results)
        return train.steps * train.batch_size + before, self.fingerprint

    @property
    def speed_kind(self) -> str:
        """``warm``, or ``cold`` if a run was so short that its steps/s include
        compilation."""
        kinds = {result.steps_per_second_kind for result in self.results}
        return "cold" if "cold" in kinds else "warm"

    def text(self, name: str) -> str | None:
        """A text of the results, such as the device: every different one; None if it
        was not recorded."""
        texts = dict.fromkeys(str(x) for r in self.results if (x := getattr(r, name)))
        return " and ".join(texts) or None

    @property
    def peak_memory(self) -> tuple[float, str]:
        """The highest peak of the runs in bytes, and what it covers."""
        kinds = sorted({result.peak_memory_kind for result in self.results})
        highest = max(result.peak_memory_bytes for result in self.results)
        return highest, ", ".join(kinds)

    @property
    def last_only(self) -> bool:
        """Whether the best checkpoint was chosen on the test split itself."""
        return self.config.data.chosen_on_test

    def numbers(self, name: str) -> list[float]:
        """A number of each result, by its name in ``result.json``."""
        return [result.to_dict()[name] for result in self.results]

    def mean(self, name: str) -> float:
        """Mean of a number over the results."""
        return statistics.fmean(self.numbers(name))

    def deviation(self, name: str) -> float | None:
        """Sample standard deviation over seeds; None for a single seed."""
        values = self.numbers(name)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def metric(self) -> str:
        """The score that ranks runs, in words."""
        return self.results[0].metric.replace("_", " ")

    @property
    def accuracy(self) -> str:
        """The accuracy that counts: the best checkpoint's unless it saw the test."""
        return "test_accuracy_last" if self.last_only else "test_accuracy_best"

    @property
    def parts(self) -> dict[str, float]:
        """The mean accuracy over seeds of each part of the test split that all seeds
        have; empty if a seed has none."""
        parts = [result.test_accuracy_by_length for result in self.results]
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return {name: statistics.fmean(part[name] for part in parts) for name in names}

    @property
    def score(self) -> float:
        """The test accuracy, mean over seeds; of a task by parts the mean over these,
        if they were recorded."""
        if get_task(self.config.task).by_parts and self.parts:
            return statistics.fmean(self.parts.values())
        return self.mean(self.accuracy)


def read_runs(*folders: Path, allow_code: bool = False) -> tuple[list[Run], list[str]]:
    """Reads every run directory in some folders, at any depth; each of them once.

    Returns:
      The runs, ordered by path within a folder, and one line for each directory that
      cannot be read.

    Raises:
      ValueError: a folder does not exist, or contains no run; or none can be read.
    """
    runs: dict[Path, Run] = {}
    problems: list[str] = []
    for folder in folders:
        for place in _find_runs(folder):
            try:
                run = _read_run(place, allow_code)
                runs.setdefault(run.folder.resolve(), run)
            except InputError as error:
                problems.append(f"{place}: {error}")
            except Exception as error:  # Whatever is in one folder, others are read.
                kind = type(error).__name__
                problems.append(f"{place}: {kind}: {on_one_line(error)}")
    if not runs:
        raise expected("RUNS", "runs that can be read", problems[0])
    return list(runs.values()), list(dict.fromkeys(problems))


def _find_runs(folder: Path) -> list[Path]:
    if not folder.is_dir():
        kind = "a file" if folder.exists() else "which does not exist"
        raise expected("RUNS", "a folder of runs", f"{folder}, {kind}")
    places = [place for place, _, files in walk_links(folder) if "config.json" in files]
    if not places:
        raise expected("RUNS", "run directories (with a config.json)", folder)
    return sorted(places)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups finished runs that differ only in their seed, by task and mechanism.

    Runs on other examples, or of another version of the user's attention, are other
    groups. Of two runs with the same seed the first is used; see `repeated_runs`.
    """
    groups = [
        Group(tuple(seeds[seed][0] for seed in sorted(seeds)))
        for seeds in _by_seed(runs)
    ]
    return sorted(groups, key=lambda g: (g.config.task, g.config.mixers))


def repeated_runs(runs: Sequence[Run]) -> list[str]:
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
            key += (run.result.data_fingerprint, run.code)
            groups.setdefault(key, {}).setdefault(seed, []).append(run)
    return list(groups.values())


def unfinished_runs(runs: Sequence[Run]) -> list[str]:
    """A line for each run without a result: its folder, and its progress."""
    lines = []
    for run in runs:
        if run.result is None:
            step = max((line["step"] for line in run.metrics), default=0)
            lines.append(f"{run.folder}: {step:,} of {run.config.train.steps:,} steps")
    return lines


def lost_metrics(runs: Sequence[Run]) -> list[str]:
    """A line for each finished run that has lost some of its metrics."""
    lines = []
    for run in runs:
        if run.result is not None:
            every = run.config.train.log_every
            lost = missing_reports(run.metrics, run.result.steps, every)
            lines += [f"{run.folder / FILE}: {lost}"] if lost else []
    return lines


def _read_run(folder: Path, allow_code: bool) -> Run:
    code = own_code.prefer_copies(folder) if allow_code else contextlib.nullcontext()
    try:
        with code:
            config = Config.from_dict(read_json(folder / "config.json"), allow_code)
        metrics, result = tuple(read_metrics(folder)), read_result(folder)
    except InputError as error:  # The folder is named already.
        raise rename(error, Path(error.name).name) from None
    return Run(folder, config, result, metrics, own_code.digest(folder))
