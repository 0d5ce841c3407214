"""A whole run: checks, data, run directory, training, final scores."""

import contextlib
import statistics
from pathlib import Path
from typing import Any, Self

import jax

from lra_jax import own_code, seals
from lra_jax.configs import Config, get_preset
from lra_jax.errors import InputError, expected
from lra_jax.files import expand_home
from lra_jax.models import saved
from lra_jax.tasks import get_task
from lra_jax.training import dry_run, hosts, summary, tracking
from lra_jax.training import workdir as workdirs
from lra_jax.training.console import RunConsole
from lra_jax.training.loop import fit
from lra_jax.training.machine import commit, describe_devices, peak_memory, versions
from lra_jax.training.metrics import changed_metrics, read_metrics
from lra_jax.training.optimizer import make_optimizer
from lra_jax.training.restore import export
from lra_jax.training.result import Result, read_result, write_result
from lra_jax.training.trainer import Trainer


class Session:
    """One process's part of a run.

    Creating it makes the data and checks everything that can be checked before the
    step is compiled. As a context it holds the run directory; one that is ``dry``
    leaves that alone, for `dry_run` in place of `run`. ``command`` is what the user
    typed, for the result.
    """

    def __init__(
        self,
        config: Config,
        quiet: bool = False,
        command: str = "",
        dry: bool = False,
    ):
        self.config, self.command, self._is_dry = config, command, dry
        self.result: Result | None = None
        self.task = get_task(config.task)
        self.task.check(config)
        make_optimizer(config.train, config.pretrain)
        self.workdir = default_workdir(config)
        tracking.check(config)
        hosts.connect(config)
        if not dry:
            hosts.writer_first(self._check_workdir)
        # Now: a checkout can move on while the run trains with the code that it read.
        commits = [*filter(None, [commit()])]
        origins = {"device": [describe_devices()], "commit": commits}
        self.task.check_on_devices(config)
        quiet = quiet or not hosts.is_writer()
        self.console = RunConsole(config.train.steps, quiet=quiet)
        self.dataset = hosts.writer_first(lambda: self.task.prepare(config.data))
        # Only one process looks for the file of a run: network file systems remember
        # for a while that there was none.
        if hosts.agree(hosts.is_writer() and not self._has_config):
            self.task.check_data(config, self.dataset)
        self.console.line("building the model ...")
        self.trainer = Trainer(config, self.task, self.dataset, self.workdir)
        self.trainer.origins = origins

    def __enter__(self) -> Self:
        """Claims the run directory, after the checks: a failing config leaves none."""
        with contextlib.ExitStack() as stack:
            if not self._is_dry:
                hosts.writer_first(lambda: self._claim(stack))
                self.result = self._finished_result()
                read_metrics(self.workdir)
                if self.result is None:
                    stack.callback(self.trainer.checkpoints.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def run(self) -> Result:
        """Trains or resumes to the end, and scores; see ``lra_jax.train.run``."""
        console, result = self.console, self.result
        if result is not None:
            console.line(f"already finished, in {self.workdir}:")
            self._warn_of_losses(result.steps)
        else:
            console.work = self.trainer.tokens_before
            console.has_accuracy = self.dataset.metric == "accuracy"
            console.facts(summary.facts(self.trainer))
            with hosts.writer_first(self._track) as tracker:
                fit(self.trainer, console, tracker)
                result = self._score()
                if hosts.is_writer():
                    workdirs.lengthen(self.workdir, self.config.train.steps)
                    write_result(self.workdir, result)
                tracker.result(result.to_dict())
            self.result = result
        summary.show_result(console, self.task, self.config, result)
        return result

    def dry_run(self) -> None:
        """Describes the run and what it will cost, after a few timed steps."""
        self.console.facts(dry_run.settings(self.config))
        self.console.line()
        self.console.facts(summary.facts(self.trainer))
        self.console.facts(dry_run.estimate(self.trainer, self.console.line))

    def _finished_result(self) -> Result | None:
        """The result, unless it is from before the run was extended."""
        try:
            result = read_result(self.workdir)
        except InputError as error:
            advice = "delete it to score the run again"
            raise InputError(error.name, f"{error.problem} ({advice})") from error
        if result is None or result.steps < self.config.train.steps:
            return None
        return result

    def _track(self) -> tracking.Tracker:
        """The tracker; only the process that writes reports to it."""
        config = self.config
        if not hosts.is_writer():
            config = config.replace(wandb=None)
        return tracking.Tracker(config, self.workdir)

    def _warn_of_losses(self, steps: int) -> None:
        """Names the files that a finished run has lost; it is not trained again."""
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
        elif not self._has_config:
            needed = "a folder on a file system that all processes share"
            got = f"{self.workdir}, not found by process {jax.process_index()}"
            raise expected("--workdir", needed, got)
        fingerprint = self.dataset.fingerprint
        data = self.config.data
        starts = [getattr(data, name) for name in data.start_fields]
        files = [saved.read_description(x) for x in starts if x is not None]
        digests = [seals.sha256(file.arrays) for file in files]
        self._shown_before = sum(map(_examples_shown, files)) or None
        workdirs.open_workdir(
            self.workdir, self.config, fingerprint, started_from=",".join(digests)
        )
        own_code.keep(self.workdir, self.config.own_parts, hosts.is_writer())

    @property
    def _has_config(self) -> bool:
        return (self.workdir / "config.json").exists()

    def _score(self) -> Result:
        """Scores the test split with the last and the best parameters."""
        trainer, progress, config = self.trainer, self.trainer.progress, self.config
        self.console.line("scoring the test split")
        params = trainer.scored_params
        best = last = self._evaluate(params, "test")
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
            metric=self.dataset.metric,
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
            shown_before=self._shown_before,
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
            scores = {
                f"{name}_{which}": value
                for which, means in {"best": best, "last": last, **parts}.items()
                for name, value in means.items()
                if name not in ("loss", "accuracy")
            }
            return {"scores": scores}
        by_length = {part: 100 * mean["accuracy"] for part, mean in parts.items()}
        values: dict[str, Any] = {"test_accuracy_by_length": by_length}
        if task.chance is not None:
            scored = {"test_accuracy_best": 100 * best["accuracy"], **values}
            values["chance"] = task.chance(data)
            values["test_scaled_accuracy"] = task.rescale(
                data, task.accuracy_of(scored)
            )
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


def _examples_shown(file: saved.Description) -> int:
    """The examples on which a saved model was trained, as far as its file tells."""
    train = file.about.get("config", {}).get("train", {})
    return train.get("steps", 0) * train.get("batch_size", 0)


def default_workdir(config: Config) -> Path:
    """``config.workdir``, or a folder under ``runs/`` named after the settings."""
    if config.workdir is not None:
        return expand_home(config.workdir, "--workdir")
    preset = get_preset(config.task, config.preset, config.attention)
    return Path("runs") / config.run_name(preset)
