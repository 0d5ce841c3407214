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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lra_jax import signals
from lra_jax.configs import Config, get_preset
from lra_jax.configs.base import flatten
from lra_jax.configs.registry import find_task
from lra_jax.errors import Range
from lra_jax.files import expand_home, read_json

if TYPE_CHECKING:
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


class Stopped(Exception):
    """A signal ended the plan; the same command resumes it.

    Attributes:
      code: the exit code to end with.
    """

    def __init__(self, code: int):
        super().__init__(f"stopped with code {code}")
        self.code = code


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
    """One run for each seed.

    Args:
      seeds: their settings; ``workdir`` is a common parent folder.
      series: see `Planned`.

    Raises:
      ValueError: the config is invalid.
    """
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


def run_all(plan: Sequence[Planned]) -> dict[str, list["Result"]]:
    """Runs a plan, reports the outcome, and returns the results by series.

    A run that fails is reported, and the others continue.

    Raises:
      Stopped: a signal was received, or runs failed (code 1), after the others ended.
    """
    results: dict[str, list[Result]] = {}
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
                    print("the same command continues with all runs", file=sys.stderr)
                raise
            if code == 0:
                result = finished_result(run)
        if result is None:
            failed.append(run)
            print(
                f"error: {run.name} ended with code {code}; the others continue",
                file=sys.stderr,
                flush=True,
            )
        else:
            results.setdefault(run.series, []).append(result)
    for line in (*summarise(results), *best_by_validation(results)):
        print(line)
    if failed:
        names = "; ".join(run.name for run in failed)
        print(
            f"error: {len(failed)} of {len(plan)} runs failed: {names}", file=sys.stderr
        )
        raise Stopped(1)
    return results


def finished_result(run: Planned) -> "Result | None":
    """The result of a run that is done, with exactly the same settings and the same
    user code; else None. Whether its data are still the same is not checked."""
    from lra_jax import own_code
    from lra_jax.training.result import read_result

    try:
        config = read_json(run.workdir / "config.json")
        if Config.from_dict(config).identity() != run.config.identity():
            return None
        if own_code.changed(run.workdir, run.config.attention):
            return None
        result = read_result(run.workdir)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # The run itself reports the error, in one line.
    # A result of fewer steps is from before the run was extended.
    return result if result and result.steps >= run.config.train.steps else None


def summarise(results: dict[str, list["Result"]]) -> Iterator[str]:
    """A line for each series: mean and standard deviation over its seeds, of the test
    accuracy and of the validation metric that chose the checkpoints."""
    for series, runs in results.items():
        task = find_task(runs[0].task)
        best = mean_and_deviation([task.accuracy_of(run.to_dict()) for run in runs])
        last = mean_and_deviation([run.test_accuracy_last for run in runs])
        shown = f"best checkpoint {best} %, last {last} %"
        if task.by_parts and all(run.test_accuracy_by_length for run in runs):
            shown = f"mean over the parts, best checkpoint {best} %"
        seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
        rule = _best_by(runs)
        score = mean_and_deviation(_validation_scores(runs), _DIGITS[rule])
        chosen = f"; chosen by validation {rule}{_where(runs)}, {score}{_UNITS[rule]}"
        more = "".join(f", {words}" for words in _more_scores(runs))
        yield f"{series}: test accuracy, {shown}{more}{chosen} ({seeds})"


def _more_scores(runs: Sequence["Result"]) -> Iterator[str]:
    """The mean of each score besides accuracy and loss, such as bits per byte."""
    from lra_jax.training.result import shared_scores

    for name in shared_scores(runs):
        words = name.removesuffix("_best").replace("_", " ")
        yield f"{words} {mean_and_deviation([run.scores[name] for run in runs], 3)}"


def best_by_validation(results: dict[str, list["Result"]]) -> Iterator[str]:
    """A line for each task and mechanism with several series: the best by validation,
    averaged over its seeds.

    Series are compared by the metric that chose their checkpoints
    (``--train.best_by``), and series of equal accuracy by their validation loss. Series
    chosen by accuracy are not compared with series chosen by loss, nor are runs on
    different examples. A series that lacks some seeds is left out: those runs may have
    failed.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {}
    for series, runs in results.items():
        first = runs[0]
        kinds = groups.setdefault((first.task, first.mixers), {})
        kinds.setdefault((first.best_by, first.data_fingerprint), []).append(series)
    for (task, attention), kinds in groups.items():
        lines = []
        for names in kinds.values():
            lines += _best_of({name: results[name] for name in names})
        if len({rule for rule, _ in kinds}) > 1:
            lines.append(
                "runs chosen by accuracy and runs chosen by loss (--train.best_by) are "
                "not compared"
            )
        if len({examples for _, examples in kinds}) > 1:
            lines.append("runs on different examples are not compared with each other")
        yield from (f"{task}, {attention}: {line}" for line in lines)


def _best_of(results: dict[str, list["Result"]]) -> Iterator[str]:
    """The best of series that can be compared, after those that lack some seeds."""
    most = max(map(len, results.values()))
    for series, runs in results.items():
        if len(runs) < most:
            yield f"{series} has {len(runs)} of {most} seeds and is not compared"
    compared = {name: runs for name, runs in results.items() if len(runs) == most}
    if len(compared) < 2:
        return
    everything = [run for runs in compared.values() for run in runs]
    rule = _best_by(everything)
    means = {
        series: statistics.fmean(_validation_scores(runs))
        for series, runs in compared.items()
    }

    def rank(series: str) -> tuple[float, float]:
        loss = statistics.fmean(run.valid_loss_best for run in compared[series])
        return means[series] if rule == "loss" else -means[series], loss

    best = min(compared, key=rank)
    score = f"{means[best]:.{_DIGITS[rule]}f}{_UNITS[rule]}"
    yield (
        f"best by validation {rule}{_where(everything)} of {len(compared)}: "
        f"{best} ({score})"
    )


_DIGITS = {"accuracy": 2, "loss": 4}
_UNITS = {"accuracy": " %", "loss": ""}


def _best_by(runs: Sequence["Result"]) -> str:
    """The metric by which the runs of a series chose their best checkpoints."""
    return runs[0].best_by


def _where(runs: Sequence["Result"]) -> str:
    """A warning if validation used the labels of the test."""
    seen = any(run.validation == "test" for run in runs)
    return " on the test split itself" if seen else ""


def _validation_scores(runs: Sequence["Result"]) -> list[float]:
    """That metric of each run."""
    return [getattr(run, f"valid_{_best_by(runs)}_best") for run in runs]


def mean_and_deviation(values: Sequence[float], digits: int = 2) -> str:
    """``36.10 +- 0.42``: mean and sample standard deviation, if there are several."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values):.{digits}f}"


def _start(run: Planned) -> int:
    """Runs one process to its end; returns its code.

    Raises:
      Stopped: the run, or this process, was asked to stop.
    """
    command = [sys.executable, "-m", "lra_jax.train", *flags(run.config)]
    received = []

    def forward(signum: int, _: object) -> None:
        """Passes a signal on; of Ctrl-C, which reaches both, the child hears once."""
        received.append(signum)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signum)

    child = None
    with signals.left_to(forward):
        child = subprocess.Popen(command)
        if received:
            child.send_signal(received[-1])
        code = child.wait()
    # 128 + n, or -n if the signal came before the run could save.
    signum = received[-1] if received else (-code if code < 0 else code - 128)
    if signum in (signal.SIGINT, signal.SIGTERM):
        raise Stopped(128 + signum)
    return code
