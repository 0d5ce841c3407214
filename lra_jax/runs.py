"""Several runs one after another: seeds, mechanisms.

Each run is a separate process, ``python -m lra_jax.train`` with the flags of the run:
a failing run does not affect the others, and its peak memory is its own. A run with a
``result.json`` is not started again; a stopped one resumes.
"""

import contextlib
import dataclasses
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lra_jax import progress, signals
from lra_jax.configs import Config, get_preset
from lra_jax.configs.base import flatten
from lra_jax.configs.registry import find_task
from lra_jax.errors import Range
from lra_jax.files import expand_home, read_json

if TYPE_CHECKING:
    from lra_jax.reports.runs import Group
    from lra_jax.training.result import Result


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run of a plan, not of a directory (`lra_jax.reports.runs.Run`).

    Attributes:
      config: its settings.
      workdir: its directory.
      series: what it shares with runs of other seeds, in words; the mechanism if the
        plan varies nothing else.
    """

    config: Config
    workdir: Path
    series: str

    @property
    def name(self) -> str:
        """The run's name in messages: its task, its series and its seed."""
        task = self.config.task
        named = self.series.startswith(f"{task} ")
        words = self.series if named else f"{task} {self.series}"
        return f"{words} seed {self.config.seed}"


class Stopped(signals.Exit):
    """A signal ended the plan, which the same command resumes, or some runs failed."""


@dataclasses.dataclass(frozen=True)
class Seeds(Config):
    """Runs that differ in their seed only."""

    seeds: Annotated[int, Range("1 to 1000", 1, 1000)] = 1
    """Number of runs, with seeds `--seed`, `--seed` + 1, ..., each in a directory of
    its own (in `--workdir`, if that is given)."""

    @property
    def run(self) -> Config:
        """The first of them."""
        names = [field.name for field in dataclasses.fields(Config)]
        return Config(**{name: getattr(self, name) for name in names})


def make_plan(seeds: Seeds, series: str = "") -> list[Planned]:
    """One run for each seed; ``workdir`` is their common parent folder."""
    from lra_jax.tasks import get_task
    from lra_jax.training.session import default_workdir

    seeds.check_types()
    config = seeds.run
    get_task(config.task).check(config)
    folder = expand_home(config.workdir or "runs", "--workdir")
    plan = []
    for seed in range(config.seed, config.seed + seeds.seeds):
        run = config.replace(seed=seed, workdir=None)
        workdir = folder / default_workdir(run).name
        run = run.replace(workdir=str(workdir))
        plan.append(Planned(run, workdir, series or config.attention))
    return plan


def flags(config: Config) -> list[str]:
    """The command line of a run: the settings that differ from its preset's."""
    preset = get_preset(config.task, config.preset, config.attention)
    names = ("task", "attention", "preset", "seed", "workdir")
    defaults = flatten(preset.to_dict())
    return [
        f"--{name}={value}"
        for name, value in flatten(config.to_dict()).items()
        if name in names or value != defaults[name]
    ]


def run_all(plan: Sequence[Planned]) -> dict[str, "Group"]:
    """Runs a plan, reports the outcome, and returns the finished runs by series.

    Raises:
      Stopped: a signal was received, or runs failed (code 1), after the others ended.
    """
    from lra_jax.reports.runs import Group, Run

    finished: dict[str, list[Run]] = {}
    failed = []
    for number, run in enumerate(plan, start=1):
        print(f"[{number}/{len(plan)}] {run.name}, in {run.workdir}", flush=True)
        # Only the run itself reads its files, and notices that they have changed.
        result = None if run.config.data.from_files else finished_result(run)
        code = 0
        if result is not None:
            print("already finished", flush=True)
        else:
            try:
                code = _start(run)
            except Stopped:
                if len(plan) > 1:  # The run only says how to resume itself.
                    progress.aside("the same command continues with all runs")
                raise
            if code == 0:
                result = finished_result(run)
        if result is None:
            failed.append(run.name)
            progress.aside(
                f"error: {run.name} ended with code {code}; the others continue"
            )
        else:
            of_series = finished.setdefault(run.series, [])
            of_series.append(Run(run.workdir, run.config, result, ()))
    groups = {series: Group(tuple(runs)) for series, runs in finished.items()}
    for line in (*summarise(groups), *best_by_validation(groups)):
        print(line)
    if failed:
        count = f"{len(failed)} of {len(plan)}"
        progress.aside(f"error: {count} runs failed: {'; '.join(failed)}")
        raise Stopped(1)
    return groups


def finished_result(run: Planned) -> "Result | None":
    """The result of a run that is done, with exactly the same settings and the same
    user code; else None. Whether its data are still the same is not checked."""
    from lra_jax import own_code
    from lra_jax.training.result import read_result

    try:
        config = read_json(run.workdir / "config.json")
        if Config.from_dict(config).identity() != run.config.identity():
            return None
        if own_code.changed_files(run.workdir, run.config.own_parts):
            return None
        result = read_result(run.workdir)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # The run itself reports the error, in one line.
    # A result of fewer steps is from before the run was extended.
    return result if result and result.steps >= run.config.train.steps else None


def summarise(groups: Mapping[str, "Group"]) -> Iterator[str]:
    """A line for each series: mean and standard deviation over its seeds, of the test
    accuracy and of the validation metric that chose the checkpoints."""
    from lra_jax.training.result import shared_scores

    for series, group in groups.items():
        task, results = find_task(group.config.task), group.results
        best = mean_and_deviation([task.accuracy_of(x.to_dict()) for x in results])
        last = mean_and_deviation(group.numbers("test_accuracy_last"))
        shown = f"best checkpoint {best} %, last {last} %"
        if task.by_parts and all(x.test_accuracy_by_length for x in results):
            shown = f"mean over the parts, best checkpoint {best} %"
        for name in shared_scores(results):
            score = mean_and_deviation([x.scores[name] for x in results], 3)
            shown += f", {name.removesuffix('_best').replace('_', ' ')} {score}"
        shown += f"; chosen by {_validation(group)}"
        seeds = "1 seed" if len(results) == 1 else f"{len(results)} seeds"
        yield f"{series}: test {group.metric}, {shown} ({seeds})"


def best_by_validation(groups: Mapping[str, "Group"]) -> Iterator[str]:
    """A line for each task and mechanism with several series: the best of them, by
    `lra_jax.reports.choice.best_group`.

    Series whose checkpoints were chosen by accuracy are not compared with those chosen
    by loss (``--train.best_by``), nor are runs on different examples.
    """
    from lra_jax.reports.choice import best_group, unequal_budgets

    comparable: dict[tuple[str, ...], dict[str, Group]] = {}
    for series, group in groups.items():
        config = group.config
        key = config.task, config.mixers, config.train.best_by, group.fingerprint
        comparable.setdefault(key, {})[series] = group
    for (task, mixers, *_), by_series in comparable.items():
        best = best_group([*by_series.values()])
        if len(by_series) > 1 and best is not None:
            (series,) = (name for name, group in by_series.items() if group is best)
            unequal = unequal_budgets([*by_series.values()])
            yield (
                f"{task}, {mixers}: best of {len(by_series)}: {series}, by "
                f"{_validation(best)}{f'; {unequal}' if unequal else ''}"
            )


def _validation(group: "Group") -> str:
    """The metric that chose the checkpoints, and its mean over the seeds."""
    if group.config.train.best_by == "loss":
        metric, score = "loss", mean_and_deviation(group.numbers("valid_loss_best"), 4)
    else:
        score = f"{mean_and_deviation(group.numbers('valid_accuracy_best'))} %"
        metric = group.metric
    where = " on the test split itself" if group.last_only else ""
    return f"validation {metric}{where}, {score}"


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """``36.10 +- 0.42``: mean and sample standard deviation, if there are several."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values):.{digits}f}"


def _start(run: Planned) -> int:
    """Runs one process to its end and returns its code, unless a signal came."""
    command = [sys.executable, "-m", "lra_jax.train", *flags(run.config)]
    command += ["--debug"] if "--debug" in sys.argv else []
    received = []

    def forward(signum: int, _: object) -> None:
        """Passes a signal on; Ctrl-C reaches both processes, and counts once."""
        received.append(signum)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signum)

    child = None
    with signals.leave_to(forward):
        child = subprocess.Popen(command)
        if received:
            child.send_signal(received[-1])
        code = child.wait()
    # 128 + n, or -n if the signal came before the run could save.
    signum = received[-1] if received else (-code if code < 0 else code - 128)
    if signum in (*signals.SIGNALS, signal.SIGPIPE):
        raise Stopped(128 + signum)
    return code
