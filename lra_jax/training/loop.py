"""The training loop: one for every task and mechanism."""

import contextlib
import dataclasses
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
from lra_jax.training.metrics import MetricsWriter, read_metrics
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
    """Trains to the last step, with evaluations and checkpoints along the way.

    Args:
      trainer: at the step to resume from; see `Trainer.restore`.
      console: reports the progress.
      tracker: also gets the metrics.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; the state is saved.
      NonFiniteLoss: the run cannot continue; the last good checkpoint is kept.
    """
    step, workdir = trainer.step, trainer.workdir
    meter = Meter(step, trainer.progress.seconds)
    done = trainer.checkpoints.seal.get("validated", False)
    writer = MetricsWriter(workdir, step, done, hosts.is_writer(), tracker)
    traced = trainer.config.profile and hosts.is_writer()
    profile = Profile(workdir if traced else None)
    closing, alone = contextlib.closing, jax.process_count() == 1
    with closing(writer), closing(profile), StopRequest(alone) as stop, console:
        loop = _Loop(trainer, meter, writer, console, stop, profile)
        try:
            loop.run(step, validated=done)
        except NonFiniteLoss as error:
            writer.write(error.step, "not_finite")
            raise


@dataclasses.dataclass(eq=False)
class _Loop:
    """The steps of one session, and the resources that it holds."""

    trainer: Trainer
    meter: Meter
    writer: MetricsWriter
    console: RunConsole
    stop: StopRequest
    profile: Profile

    def __post_init__(self) -> None:
        self.config = self.trainer.config
        self._compiled: set[Any] = set()

    def run(self, step: int, validated: bool) -> None:
        """Does the remaining steps; ``validated``: whether this one was scored."""
        train = self.config.train
        if self._validates(step) and not validated:
            self._validate(step)
            signum = self._stop_signal(step)
            if signum:  # It is saved, and scored or not yet.
                raise Interrupted(signum, step)
        while step < train.steps:
            step = self._advance(step)

    def _advance(self, step: int) -> int:
        """Does one step, and whatever is due after it."""
        trainer, train = self.trainer, self.config.train
        with self.meter.waiting():
            read = next(trainer.data)
        batch = sharding.shard_batch(trainer.mesh, read)
        program = (self.config.pretrain.part(step), shapes(batch))
        if program in self._compiled:
            self.profile.step(trainer.state.step)
            trainer.advance(step, batch)
        else:
            self.console.doing(f"compiling for batches of {size_in_words(batch)}")
            jax.block_until_ready(trainer.state.step)  # Earlier steps are warm.
            with self.meter.left_out():
                trainer.advance(step, batch)
                jax.block_until_ready(trainer.state.step)
            self._compiled.add(program)
            self.console.compiled()
        self.stop.unsaved = True
        step += 1
        self.console.advance(step)
        if self._is_due(step, train.log_every) or step == self.config.pretrain.steps:
            self._report(step)
        if self._validates(step):
            self._validate(step)
        if self.console.broken:
            self.stop.signum = signal.SIGPIPE
        signum = self._stop_signal(step)
        if signum:
            self._save(step)
            raise Interrupted(signum, step)
        return step

    def _validates(self, step: int) -> bool:
        every = self.config.train.eval_every
        return self._is_due(step, every) or step == self.trainer.lost_best

    def _is_due(self, step: int, every: int) -> bool:
        return step > 0 and (step % every == 0 or step == self.config.train.steps)

    def _stop_signal(self, step: int) -> int:
        """The signal on which all processes stop after this step; 0 = none.

        Processes get a signal at different steps, so they agree every few steps.
        """
        is_last = step == self.config.train.steps
        if jax.process_count() > 1 and step % _AGREE_EVERY and not is_last:
            return 0
        return hosts.agree(self.stop.signum or 0)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Context whose time, often that of a compilation, is not that of the steps.

        Steps that the device has not finished are waited for first.
        """
        jax.block_until_ready(self.trainer.state.step)
        with self.meter.paused():
            yield

    def _report(self, step: int) -> None:
        """Writes the training metrics since the last report."""
        with self._paused():
            found, peak = self.trainer.take_sums()
            rate = float(jax.device_get(self.trainer.schedule(step - 1)))
        speed = self.meter.speed(step)
        pretrained = step <= self.config.pretrain.steps
        self.writer.write(
            step,
            "pretrain" if pretrained else "train",
            **found,
            loss_max=peak,
            learning_rate=rate,
            steps_per_second=speed,
            warm=self.meter.warm,
            data_wait=self.meter.data_wait,
            seconds=self.meter.seconds_then,
        )
        self.console.training(step, found["loss"], found["accuracy"], speed)

    def _validate(self, step: int) -> None:
        """Scores the validation split, saves the best and the latest checkpoint.

        A signal ends it without a score; a resumed session starts with it. In
        pretraining, where no labels have been seen yet, it only saves.
        """
        trainer = self.trainer
        if step <= self.config.pretrain.steps:
            self._save(step, validated=True)
            return
        try:
            self.console.doing("evaluating", quiet=True)
            with self._paused():
                trainer.check_finite()
                found = trainer.evaluate(
                    trainer.state.params, "valid", self.stop, self.console
                )
            self.console.doing("training", quiet=True)
        except Stopped:
            return
        if not math.isfinite(found["loss"]):
            raise NonFiniteLoss(step, trainer.checkpoints.latest_step)
        scores = trainer.task.score(trainer.dataset, "valid", found["loss"])
        self.writer.write(step, "valid", **found, **scores, seconds=self.meter.seconds)
        best = trainer.progress.improved(found, self.config.train.best_by)
        # Its parameters have replaced those of the best checkpoint before it.
        best = best or step == trainer.lost_best
        if best:
            with self.meter.paused():
                trainer.checkpoints.save_best(step, trainer.state.params)
            trainer.progress = trainer.progress._replace(
                best_step=step,
                best_accuracy=found["accuracy"],
                best_loss=found["loss"],
            )
        self.console.line(
            f"step {step}  validation loss {found['loss']:.4f}  accuracy "
            f"{100 * found['accuracy']:.2f} %"
            + "".join(f"  {name} {value:.3f}" for name, value in scores.items())
            + ("  (best so far)" if best else "")
        )
        self._save(step, validated=True)

    def _save(self, step: int, validated: bool = False) -> None:
        trainer = self.trainer
        with self._paused():
            trainer.check_finite()
            trainer.progress = trainer.progress._replace(seconds=self.meter.seconds)
            about = {
                "validated": validated,
                "metrics": seals.digest(read_metrics(trainer.workdir)),
                "origins": trainer.origins,
            }
            trainer.checkpoints.save_latest(
                step, trainer.state, trainer.progress, trainer.data, about
            )
        self.stop.unsaved = False


def shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes for which a step is compiled."""
    return tuple(x.shape for x in jax.tree.leaves(batch))


def size_in_words(batch: Any) -> str:
    """The shape of the batch's largest array, as in ``32 x 1024``."""
    return " x ".join(map(str, max(shapes(batch), key=math.prod)))
