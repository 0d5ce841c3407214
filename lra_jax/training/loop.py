"""The training loop: one for every task and mechanism."""

import contextlib
import math
import signal
from collections.abc import Iterator
from typing import Any

import jax

from lra_jax import seals
from lra_jax.signals import StopRequest
from lra_jax.training import hosts, sharding
from lra_jax.training.console import RunConsole
from lra_jax.training.meter import Meter
from lra_jax.training.metrics import MetricsWriter, changed_metrics, read_metrics
from lra_jax.training.profile import Profile
from lra_jax.training.tracking import Tracker
from lra_jax.training.trainer import NonFiniteLoss, Stopped, Trainer

# Number of steps after which several processes agree on whether to stop.
_AGREE_EVERY = 10


class Interrupted(Exception):
    """A signal stopped the run; everything is saved.

    SIGPIPE means that nobody reads the console.

    Attributes:
      signum: the signal.
      step: step of the saved checkpoint.
    """

    def __init__(self, signum: int, step: int):
        super().__init__(f"stopped by signal {signum} after step {step}")
        self.signum = signum
        self.step = step


def fit(trainer: Trainer, console: RunConsole, tracker: Tracker | None = None) -> None:
    """Trains from the newest checkpoint, if there is one, to the last step.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; the state is saved.
      NonFiniteLoss: the run cannot continue; the last good checkpoint is kept.
      ValueError: there are checkpoints, but none from which the run can go on.
    """
    train, pretrain = trainer.config.train, trainer.config.pretrain
    step = trainer.restore()
    validated = trainer.checkpoints.seal.get("validated", False)
    loop = _Loop(trainer, console, tracker)
    with loop.running():
        if loop.is_validated_at(step) and not validated:  # A signal ended that.
            loop.save(step, validated=loop.validate(step))
            loop.stop_if_asked(step)
        while step < train.steps:
            batch = loop.read_batch()
            loop.advance(step, batch)
            step += 1
            if loop.is_due(step, train.log_every) or step == pretrain.steps:
                loop.report(step)
            if loop.is_validated_at(step):
                loop.save(step, validated=loop.validate(step))
            loop.stop_if_asked(step)


class _Loop:
    """The work of `fit` around the steps."""

    def __init__(self, trainer: Trainer, console: RunConsole, tracker: Tracker | None):
        self.trainer, self.console, self.config = trainer, console, trainer.config
        step, workdir = trainer.step, trainer.workdir
        seal, writes = trainer.checkpoints.seal, hosts.is_writer()
        console.start = step
        if step:
            console.line(f"resuming from step {step}")
            lost = changed_metrics(workdir, step, self.config.train.log_every, seal)
            if lost:
                console.line(lost)
        self.meter = Meter(step, trainer.progress.seconds)
        validated = seal.get("validated", False)
        self.metrics = MetricsWriter(workdir, step, validated, writes, tracker)
        self.profile = Profile(workdir if self.config.profile and writes else None)
        self.stop = StopRequest(alone=jax.process_count() == 1)
        self._compiled: set[Any] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context of the steps, which has the files open and waits for signals."""
        closed = contextlib.closing
        with closed(self.metrics), closed(self.profile), self.stop, self.console:
            try:
                yield
            except NonFiniteLoss as error:
                self.metrics.write(error.step, "not_finite")
                raise

    def is_due(self, step: int, every: int) -> bool:
        """Whether something is done after this step: every few, and after the last."""
        return step > 0 and (step % every == 0 or step == self.config.train.steps)

    def is_validated_at(self, step: int) -> bool:
        """Whether the validation split is scored after this step."""
        every = self.config.train.eval_every
        return self.is_due(step, every) or step == self.trainer.lost_best

    def read_batch(self) -> dict[str, jax.Array]:
        """The next batch, on the devices."""
        with self.meter.wait():
            batch = next(self.trainer.data)
        return sharding.shard_batch(self.trainer.mesh, batch)

    def advance(self, step: int, batch: dict[str, jax.Array]) -> None:
        """Does the step after ``step`` steps; the first of its shape is compiled."""
        trainer = self.trainer
        program = (self.config.pretrain.part(step), shapes(batch))
        if program in self._compiled:
            self.profile.step(trainer.state.step)
            trainer.advance(step, batch)
        else:
            self.console.doing(f"compiling for batches of {size_in_words(batch)}")
            jax.block_until_ready(trainer.state.step)  # Earlier steps are warm.
            with self.meter.leave_out():
                trainer.advance(step, batch)
                jax.block_until_ready(trainer.state.step)
            self._compiled.add(program)
            self.console.doing("training", quiet=True)
        self.stop.unsaved = True
        self.console.advance(step + 1)

    def report(self, step: int) -> None:
        """Writes the training metrics since the last report."""
        with self._pause():
            means, peak = self.trainer.take_sums()
            rate = float(jax.device_get(self.trainer.schedule(step - 1)))
        speed = self.meter.speed(step)
        self.metrics.write(
            step,
            "pretrain" if step <= self.config.pretrain.steps else "train",
            **means,
            loss_max=peak,
            learning_rate=rate,
            steps_per_second=speed,
            warm=self.meter.warm,
            data_wait=self.meter.data_wait,
            seconds=self.meter.seconds_then,
        )
        self.console.training(step, means["loss"], means["accuracy"], speed)

    def validate(self, step: int) -> bool:
        """Scores the validation split, and keeps the best parameters.

        Returns False if a signal ended it; a resumed session starts with it. In
        pretraining, where no labels have been seen yet, there is nothing to score.
        """
        trainer = self.trainer
        if step <= self.config.pretrain.steps:
            return True
        self.console.doing("evaluating", quiet=True)
        try:
            with self._pause():
                trainer.check_finite()
                means = trainer.evaluate(
                    trainer.scored_params, "valid", self.stop, self.console
                )
        except Stopped:
            return False
        self.console.doing("training", quiet=True)
        if not math.isfinite(means["loss"]):
            raise NonFiniteLoss(step, trainer.checkpoints.latest_step)
        self.metrics.write(step, "valid", **means, seconds=self.meter.seconds)
        is_best = trainer.progress.is_improved_by(means, self.config.train.best_by)
        # Its parameters have replaced those of the best checkpoint before it.
        is_best = is_best or step == trainer.lost_best
        if is_best:
            with self.meter.pause():
                trainer.checkpoints.save_best(step, trainer.scored_params)
            trainer.progress = trainer.progress._replace(
                best_step=step, best_accuracy=means["accuracy"], best_loss=means["loss"]
            )
        self.console.validation(step, means, is_best)
        return True

    def save(self, step: int, validated: bool) -> None:
        """Saves all that a later session needs; ``validated``: this step was scored."""
        trainer = self.trainer
        with self._pause():
            trainer.check_finite()
            progress = trainer.progress._replace(seconds=self.meter.seconds)
            trainer.progress = progress
            about = {"validated": validated, "origins": trainer.origins}
            about["metrics"] = seals.digest(read_metrics(trainer.workdir))
            trainer.checkpoints.save_latest(
                step, trainer.state, progress, trainer.data, about
            )
        self.stop.unsaved = False

    def stop_if_asked(self, step: int) -> None:
        """Saves and raises `Interrupted` after a signal.

        Processes get a signal at different steps, so they agree every few steps.
        """
        if self.console.broken:
            self.stop.signum = signal.SIGPIPE
        is_last = step == self.config.train.steps
        if jax.process_count() > 1 and step % _AGREE_EVERY and not is_last:
            return
        signum = hosts.agree(self.stop.signum or 0)
        if signum:
            self.save(step, validated=False)
            raise Interrupted(signum, step)

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Context whose time is not that of the steps, which are waited for first."""
        jax.block_until_ready(self.trainer.state.step)
        with self.meter.pause():
            yield


def shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes for which a step is compiled."""
    return tuple(x.shape for x in jax.tree.leaves(batch))


def size_in_words(batch: Any) -> str:
    """The shape of the batch's largest array, as in ``32 x 1024``."""
    return " x ".join(map(str, max(shapes(batch), key=math.prod)))
