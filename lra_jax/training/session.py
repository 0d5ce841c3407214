"""A whole run: checks, data, run directory, training, final scores."""

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import jax

from lra_jax import own_code
from lra_jax.configs import Config, get_preset
from lra_jax.data.stages import Curriculum, LengthWarmup, tokens_before
from lra_jax.errors import InputError, expected, noted
from lra_jax.models import saved
from lra_jax.tasks import Task, get_task
from lra_jax.training import dry_run, hosts, tracking
from lra_jax.training import workdir as workdirs
from lra_jax.training.console import RunConsole, format_seconds
from lra_jax.training.loop import fit
from lra_jax.training.machine import commit, describe_devices, peak_memory, versions
from lra_jax.training.metrics import changed_metrics, read_metrics
from lra_jax.training.optimizer import make_schedule
from lra_jax.training.restore import export
from lra_jax.training.result import (
    Result,
    read_result,
    standard_error,
    write_result,
)
from lra_jax.training.trainer import Trainer


class Session:
    """One process's part of a run; use it as a context.

    Creating it makes the data and checks everything that can be checked before the
    step is compiled.

    Args:
      config: the run.
      quiet: print nothing.
      command: what the user typed, for the result and for advice on how to resume.
      dry: only inspect, and leave the run directory alone: `dry_run` instead of `run`.

    Raises:
      ValueError: invalid settings.
    """

    def __init__(
        self,
        config: Config,
        quiet: bool = False,
        command: str = "",
        dry: bool = False,
    ):
        self.config = config
        self.command = command
        # Now: a checkout can move on while the run trains with the code that it read.
        self.commit = commit()
        self.task = get_task(config.task)
        self.task.check(config)
        make_schedule(config.train, config.pretrain)
        self.workdir = default_workdir(config)
        tracking.check(config)
        hosts.connect(config)
        if not dry:
            hosts.writer_first(self._check_workdir)
        self.task.check_on_devices(config)
        quiet = quiet or not hosts.is_writer()
        self.console = RunConsole(config.train.steps, quiet=quiet)
        with contextlib.ExitStack() as stack:
            self.dataset = hosts.writer_first(lambda: self.task.prepare(config.data))
            # Only one process looks for the file of a run: network file systems
            # remember for a while that there was none.
            if hosts.agree(hosts.is_writer() and not self._is_begun):
                self.task.check_data(config, self.dataset)
            self.console.line("building the model ...")
            # Before claiming the directory, so that a failing config leaves none.
            self.trainer = Trainer(config, self.task, self.dataset, self.workdir)
            self._stack = stack
            if dry:
                return
            hosts.writer_first(lambda: self._claim(stack))
            self.result = self._finished_result()
            read_metrics(self.workdir)
            if self.result is None:
                stack.callback(self.trainer.checkpoints.close)
                self.console.start = self._restore()
                self._tracker = hosts.writer_first(
                    lambda: stack.enter_context(self._track())
                )
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self) -> Result:
        """Trains or resumes to the end, and scores; see ``lra_jax.train.run``."""
        result = self.result
        if result is not None:
            self.console.line(f"already finished, in {self.workdir}:")
            self._name_what_is_lost(result.steps)
        else:
            self.console.work = self._work()
            self.console.facts(self._facts())
            if self.console.start:
                self.console.line(f"resuming from step {self.console.start}")
                self._name_changed_metrics()
            fit(self.trainer, self.console, self._tracker)
            result = self._score()
            if hosts.is_writer():
                workdirs.lengthen(self.workdir, self.config.train.steps)
                write_result(self.workdir, result)
            self._tracker.result(result.to_dict())
            self.result = result
        show_result(self.console, self.task, self.config, result)
        return result

    def dry_run(self) -> None:
        """Describes the run and what it will cost, after a few timed steps."""
        self.console.facts(dry_run.settings(self.config))
        self.console.line()
        self.console.facts(self._facts())
        costs = dry_run.estimate(self.trainer, self._work(), self.console.line)
        self.console.facts(costs | _memory_in_words())

    def _finished_result(self) -> Result | None:
        """The result, unless it is from before the run was extended."""
        try:
            result = read_result(self.workdir)
        except InputError as error:
            raise noted(error, "delete it to score the run again") from error
        if result is None or result.steps < self.config.train.steps:
            return None
        return result

    def _restore(self) -> int:
        step, steps = self.trainer.restore(), self.config.train.steps
        if step > steps:  # It was being extended, and its result is gone.
            wanted = f"at least {step}, the step of the newest checkpoint"
            raise expected("--train.steps", wanted, steps)
        before = self.trainer.checkpoints.seal.get("origins", {})
        now = {"device": describe_devices(), "commit": self.commit}
        self.trainer.origins = {
            name: list(dict.fromkeys([*before.get(name, []), *filter(None, [value])]))
            for name, value in now.items()
        }
        return step

    def _track(self) -> tracking.Tracker:
        """The tracker; only the process that writes reports to it."""
        config = self.config
        if not hosts.is_writer():
            config = config.replace(wandb=None)
        return tracking.Tracker(config, self.workdir)

    def _work(self) -> Callable[[int], float]:
        """The tokens before a given step: shorter sequences make faster steps."""
        train = self.config.train
        return functools.partial(
            tokens_before,
            self.dataset.lengths("train"),
            cut=LengthWarmup.parse(train.length_warmup, train.steps),
            whole=Curriculum.parse(train.curriculum, train.steps),
        )

    def _name_changed_metrics(self) -> None:
        seal = self.trainer.checkpoints.seal
        every = self.config.train.log_every
        line = changed_metrics(self.workdir, self.console.start, every, seal)
        if line:
            self.console.line(line)

    def _name_what_is_lost(self, steps: int) -> None:
        """Of a finished run, which is not trained again for it."""
        line = changed_metrics(self.workdir, steps, self.config.train.log_every, {})
        if line:
            self.console.line(line)
        model = self.workdir / saved.FILE
        files = [x for x in (model, model.with_suffix(".json")) if not x.exists()]
        if files and saved.is_known(self.trainer.model_at(self.trainer.state.params)):
            command = f"python -m lra_jax.evaluate --workdir={self.workdir}"
            self.console.line(
                f"{files[0]} is missing; `{command} --save={model}` writes it"
            )

    def _check_workdir(self) -> None:
        if hosts.is_writer():
            workdirs.check_workdir(self.workdir, self.config)

    def _claim(self, stack: contextlib.ExitStack) -> None:
        """Locks the run directory, in process 0; the others check that it exists, and
        that it is of their settings, data and code.

        Otherwise they would write their parts of checkpoints into other folders, or
        train another model.
        """
        if hosts.is_writer():
            stack.enter_context(workdirs.exclusive(self.workdir))
        elif not self._is_begun:
            wanted = "a folder on a file system that all processes share"
            got = f"{self.workdir}, not found by process {jax.process_index()}"
            raise expected("--workdir", wanted, got)
        fingerprint = self.dataset.fingerprint
        data = self.config.data
        starts = [getattr(data, name) for name in data.of_start]
        digests = [saved.read_digest(start) for start in starts if start is not None]
        workdirs.open_workdir(
            self.workdir, self.config, fingerprint, started_from=",".join(digests)
        )
        own_code.keep(self.workdir, self.config.attention, hosts.is_writer())

    @property
    def _is_begun(self) -> bool:
        return (self.workdir / "config.json").exists()

    def _score(self) -> Result:
        """Scores the test split with the last and the best parameters."""
        trainer, progress, config = self.trainer, self.trainer.progress, self.config
        self.console.line("scoring the test split")
        last = self._evaluate(trainer.state.params, "test")
        best, params = last, trainer.state.params
        if progress.best_step != trainer.step:
            params, _ = trainer.checkpoints.load_params("best", trainer.state)
            best = self._evaluate(params, "test")
        if hosts.is_writer() and saved.is_known(trainer.model_at(params)):
            export(self.workdir / saved.FILE, trainer, params, progress.best_step)
        return Result(
            task=config.task,
            attention=config.attention,
            mixers=config.mixers,
            preset=config.preset,
            seed=config.seed,
            test_accuracy_best=100 * best["accuracy"],
            test_accuracy_last=100 * last["accuracy"],
            test_loss_best=best["loss"],
            test_loss_last=last["loss"],
            test_examples=self.dataset.num_examples("test"),
            **self._scores_of_some_tasks(params, best, last),
            state_size=trainer.state_size,
            valid_accuracy_best=100 * progress.best_accuracy,
            valid_loss_best=progress.best_loss,
            best_step=progress.best_step,
            best_by=config.train.best_by,
            validation="test" if config.data.chosen_on_test else "holdout",
            steps=trainer.step,
            **self._pace(),
            seconds=progress.seconds,
            parameters=trainer.num_parameters,
            **peak_memory(),
            data=self.dataset.name,
            data_fingerprint=self.dataset.fingerprint,
            official_data=self.task.is_official(config.data, self.dataset),
            device="; ".join(trainer.origins["device"]),
            versions=versions(),
            commit="; ".join(trainer.origins["commit"]) or None,
            command=self.command,
        )

    def _evaluate(self, params: Any, split: str) -> dict[str, float]:
        return self.trainer.evaluate(params, split, console=self.console)

    def _scores_of_some_tasks(
        self, params: Any, best: dict[str, float], last: dict[str, float]
    ) -> dict[str, Any]:
        """The task's own scores, accuracy by part of the test, and that of guessing."""
        task, dataset, data = self.task, self.dataset, self.config.data
        parts = {part: self._evaluate(params, part) for part in dataset.parts}
        if task.scores is not None:
            means = {"best": ("test", best), "last": ("test", last)}
            means |= {part: (part, mean) for part, mean in parts.items()}
            scores = {
                f"{name}_{which}": value
                for which, (split, mean) in means.items()
                for name, value in task.score(dataset, split, mean["loss"]).items()
            }
            return {"scores": scores}
        by_length = {part: 100 * mean["accuracy"] for part, mean in parts.items()}
        values: dict[str, Any] = {"test_accuracy_by_length": by_length}
        if task.chance is not None:
            scored = {"test_accuracy_best": 100 * best["accuracy"], **values}
            values["chance"] = task.chance(data)
            values["test_scaled_accuracy"] = task.scaled(data, task.accuracy_of(scored))
        return values

    def _pace(self) -> dict[str, Any]:
        """Median of the reported training speeds, "cold" if they include compilation,
        and of the shares of that time spent waiting for the next batch."""
        lines = [
            line
            for line in read_metrics(self.workdir)
            if line["split"] == "train" and line["warm"]
        ]
        if not lines:  # The metrics were lost; then evaluations count as training.
            speed = self.trainer.step / self.trainer.progress.seconds
            return {"steps_per_second": speed, "steps_per_second_kind": "cold"}
        return {
            "steps_per_second": statistics.median_high(
                line["steps_per_second"] for line in lines
            ),
            "steps_per_second_kind": "warm",
            "data_wait": statistics.median_high(line["data_wait"] for line in lines),
        }

    def _facts(self) -> dict[str, str]:
        config, data = self.config, self.dataset
        sizes = (f"{data.num_examples(s):,} {s}" for s in data.splits)
        packed = config.data.packing
        lengths = ", ".join(map(str, self.trainer.buckets[-1 if packed else 0 :]))
        return {
            "task": f"{config.task}, {', '.join(sizes)}",
            "data": f"{data.name}, fingerprint {data.fingerprint}",
            "model": (
                f"{config.mixers}, preset {config.preset}, "
                f"{self.trainer.num_parameters:,} parameters, {config.train.dtype}"
            ),
            "training": (
                f"{config.train.steps} steps of {config.train.batch_size}, "
                f"{self._pretraining()}{self._shown()}{lengths}{self._warmup()}"
            ),
            "devices": f"{describe_devices()}, {self._mesh()} in the mesh",
            "run": str(self.workdir),
        }

    def _pretraining(self) -> str:
        steps = self.config.pretrain.steps
        return f"{steps} of them pretraining, " if steps else ""

    def _shown(self) -> str:
        """How training shows its examples, before the lengths of its batches."""
        train, said = self.config.train, ""
        kinds = {"short examples first": Curriculum, "beginnings first": LengthWarmup}
        for words, kind in kinds.items():
            given = getattr(train, kind.name)
            stages = kind.parse(given, train.steps).stages
            if stages:
                over = stages[-1][1] <= self.config.pretrain.steps
                where = ", all in pretraining" if over else ""
                said += f"{words} ({given}{where}), "
        packed = self.config.data.packing
        return said + ("packed into rows of " if packed else "padded to ")

    def _warmup(self) -> str:
        """Says so if the preset's warm-up is too long for the run."""
        config = self.config
        preset = get_preset(config.task, config.preset, config.attention).train
        theirs = dataclasses.replace(config.train, warmup=preset.warmup)
        if not theirs.too_warm:
            return ""
        return f"; warm-up of {config.train.warmup} instead of {preset.warmup}"

    def _mesh(self) -> str:
        mesh = self.trainer.mesh
        data, seq = mesh.shape["data"], mesh.shape["seq"]
        text = str(mesh.size) if seq == 1 else f"{data} x {seq} (sequence)"
        processes = jax.process_count()
        return text if processes == 1 else f"{text}, {processes} processes,"


def default_workdir(config: Config) -> Path:
    """``config.workdir``, or a folder under ``runs/`` named after the settings."""
    if config.workdir is not None:
        return Path(config.workdir).expanduser()
    preset = get_preset(config.task, config.preset, config.attention)
    return Path("runs") / config.run_name(preset)


def show_result(
    console: RunConsole, task: Task, config: Config, result: Result
) -> None:
    """Prints test accuracies, with baselines and comparable published results, or the
    task's other scores."""
    if task.scores is None:
        _show_accuracies(console, task, config, result)
    else:
        _show_scores(console, result)
    waits = result.data_wait
    waited = (
        "" if waits is None else f"; {100 * waits:.1f} % of the time waiting for data"
    )
    console.line(
        f"{format_seconds(result.seconds)} in total, "
        f"{result.steps_per_second:.2f} steps/s in training "
        f"({result.steps_per_second_kind}{waited}), "
        f"{result.parameters:,} parameters"
    )


def _show_scores(console: RunConsole, result: Result) -> None:
    checkpoints = {"best": result.best_step, "last": result.steps}
    for key, value in result.scores.items():
        name, _, which = key.rpartition("_")
        remark = f"{which} checkpoint, step {checkpoints.get(which)}"
        if which not in checkpoints:
            remark = f"best checkpoint, {which}"
        console.line(f"test {name.replace('_', ' ')} {value:.4f}  ({remark})")


def _show_accuracies(
    console: RunConsole, task: Task, config: Config, result: Result
) -> None:
    examples = result.test_examples
    error = standard_error(result.test_accuracy_best, examples)
    # The labels of an example may depend on each other.
    counted = ", each counted once" if task.per_position else ""
    rows = [
        (
            f"{config.mixers}, best checkpoint",
            f"{result.test_accuracy_best:.2f}",
            f"step {result.best_step}, +-{error:.2f} (standard "
            f"error over {examples} examples{counted}){_chosen_by(result)}",
        ),
        (
            f"{config.mixers}, last checkpoint",
            f"{result.test_accuracy_last:.2f}",
            f"step {result.steps}",
        ),
    ]
    rows += _beside_in_words(task, result)
    if result.official_data:
        rows += [
            (f"baseline: {name}", f"{value:.2f}", "") for name, value in task.floors
        ]
        rows += [
            (f"published: {row.model}", f"{row.accuracy:.2f}", row.source)
            for row in task.published_beside(config)
        ]
    console.table("test accuracy, percent", rows)


def _beside_in_words(task: Task, result: Result) -> list[tuple[str, str, str]]:
    """Rows of some tasks only: accuracy above chance, and by length."""
    parts = result.test_accuracy_by_length
    rows = []
    if result.chance is not None and result.test_scaled_accuracy is not None:
        by_parts = task.by_parts and parts
        which = "mean over the parts" if by_parts else "best checkpoint"
        scaled = f"{100 * result.test_scaled_accuracy:.1f} %"
        far = f"the {which} is {scaled} of the way from it to 100"
        rows.append(("chance", f"{result.chance:.2f}", far))
    rows += [
        (f"part {name}", f"{accuracy:.2f}", "best checkpoint")
        for name, accuracy in parts.items()
    ]
    if len(parts) > 1:
        mean = statistics.fmean(parts.values())
        rows.append(("mean over the parts", f"{mean:.2f}", ""))
    return rows


def _chosen_by(result: Result) -> str:
    """How the best checkpoint was chosen; warns if that used the test labels."""
    rule = f", best validation {result.best_by}"
    seen = result.validation == "test"
    return f"{rule}; chosen on the test split itself" if seen else rule


def _memory_in_words() -> dict[str, str]:
    peak = peak_memory()
    size = peak["peak_memory_bytes"] / 2**20
    return {"memory": f"{size:,.0f} MiB ({peak['peak_memory_kind']})"}
