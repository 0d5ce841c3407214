"""The training loop: one for every task and mechanism."""

import contextlib
import functools
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from lra_jax import seals
from lra_jax.configs import Config
from lra_jax.data import pipeline
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.length_warmup import LengthWarmup
from lra_jax.errors import expected
from lra_jax.models import Buffer
from lra_jax.models.state_size import state_size
from lra_jax.signals import StopRequest
from lra_jax.tasks import Task
from lra_jax.tasks.reconstruction import reconstruction_loss
from lra_jax.training import hosts, sharding
from lra_jax.training.checkpoints import Checkpoints, Progress
from lra_jax.training.console import RunConsole
from lra_jax.training.metrics import MetricsWriter, read_metrics
from lra_jax.training.optimizer import make_optimizer, make_schedule
from lra_jax.training.profile import Profile
from lra_jax.training.step import (
    NO_STEP,
    TrainState,
    all_finite,
    drain,
    init_state,
    make_eval_step,
    make_train_step,
    step_function,
    zero_sums,
)
from lra_jax.training.tracking import Tracker
from lra_jax.training.workdir import check_space

# Steps between two agreements of several processes on whether to stop.
_AGREE_EVERY = 10


class Interrupted(Exception):
    """A signal stopped the run; everything is saved.

    SIGPIPE means that nobody reads the console.

    Attributes:
      signum: the signal.
      step: the step of the checkpoint.
    """

    def __init__(self, signum: int, step: int):
        super().__init__(f"stopped by signal {signum} after step {step}")
        self.signum = signum
        self.step = step


class _Stopped(Exception):
    """A signal came in an evaluation."""


class NonFiniteLoss(FloatingPointError):
    """The loss, or a parameter by its gradient, became infinite or NaN.

    Attributes:
      step: the first step with such a loss, or the last one done when the parameters
        or the validation loss were found to be so.
      saved_step: the step of the last good checkpoint, None if there is none.
    """

    def __init__(self, step: int, saved_step: int | None, cause: str = ""):
        kept = "no checkpoint was saved yet"
        if saved_step is not None:
            kept = f"the checkpoint of step {saved_step} is kept"
        super().__init__(
            f"the loss or its gradient is not finite at step {step}; "
            f"{cause and f'{cause}; '}{kept}"
        )
        self.step = step
        self.saved_step = saved_step


class Trainer:
    """Trains, evaluates and saves one run.

    Building it checks everything that can be checked without compiling the step.

    Args:
      config: the run.
      task: what to train on.
      dataset: its prepared data.
      workdir: the run directory; nothing is read or written there before
        `checkpoints` is first used.
      training: False to evaluate only: asks for no space, and touches nothing in a
        directory in which another process may be training.

    Raises:
      ValueError: the config does not fit the data, the devices or itself.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        dataset: SequenceDataset,
        workdir: Path,
        training: bool = True,
    ):
        train = config.train
        self.config = config
        self.task = task
        self.dataset = dataset
        self.workdir = workdir
        self._training = training
        self._compiled: set[Any] = set()
        # The step of a best checkpoint that is not known of where the run goes on: it
        # took the place of an earlier one, so that it has to count again.
        self._again: int | None = None
        self.buckets = pipeline.bucket_lengths(dataset, config.data.buckets)
        self.mesh = self._make_mesh()
        self._shard = sharding.data_shard(self.mesh)
        self.schedule = make_schedule(train, config.pretrain)
        optimizer = make_optimizer(train, config.pretrain)
        model = task.make_model(config, dataset, nnx.Rngs(params=config.seed))
        graphdef, params = nnx.split(model, (nnx.Param, Buffer))
        trained = nnx.filter_state(params, nnx.Param)
        self.num_parameters = sum(x.size for x in jax.tree.leaves(trained))
        causal = config.model.is_causal
        self.state_size = state_size(model.encoder) if causal else None
        state = init_state(params, optimizer)
        self.state: TrainState = sharding.replicate(self.mesh, state)
        self.progress = Progress()
        warmup = LengthWarmup.parse(train.length_warmup, train.steps)
        widths = warmup.widths(self.buckets)
        self._graphdef = graphdef
        made = graphdef, optimizer, config.seed
        # Packed batches differ in their rows.
        shapes = None if config.data.packing else len(widths)
        under_mesh = functools.partial(sharding.under_mesh, self.mesh)
        self.train_step = under_mesh(make_train_step(task.loss, *made, shapes=shapes))
        self._function = under_mesh(step_function(task.loss, *made))
        rate = config.pretrain.mask_rate
        loss = functools.partial(reconstruction_loss, mask_rate=rate)
        self._pretrain_step = under_mesh(make_train_step(loss, *made, shapes=shapes))
        self._pretrain_function = under_mesh(step_function(loss, *made))
        eval_shapes = pipeline.eval_shapes(dataset, self.buckets)
        self.eval_step = under_mesh(
            make_eval_step(task.loss, graphdef, shapes=eval_shapes)
        )
        # On CPU calls run ahead of the work, which a signal would have to wait for.
        self._waits = jax.default_backend() == "cpu" and jax.process_count() == 1
        self.data = self._training_data()

    def _training_data(self) -> Any:
        """The batches of all steps."""
        config = self.config
        return pipeline.train_iterator(
            self.dataset,
            batch_size=config.train.batch_size,
            seed=config.seed,
            num_steps=config.train.steps,
            buckets=self.buckets,
            length_warmup=config.train.length_warmup,
            curriculum=config.train.curriculum,
            augment=self.task.augment(config.data),
            targets=self.task.pretraining_targets(config),
            target_steps=config.pretrain.steps,
            packing=self._packing(),
            shard=self._shard,
        )

    def _packing(self) -> int:
        """The rows of packed batches are a multiple of this number; 0 = not packed."""
        if not self.config.data.packing:
            return 0
        if self._shard[1] > 1:
            raise expected("--data.packing", "False on several hosts", "True")
        devices = self.mesh.shape["data"]
        return math.lcm(max(1, self.config.train.batch_size // 8), devices)

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """Those in the run directory, which by now exists.

        Raises:
          ValueError: there is no space for them.
        """
        if self._training:
            # Parameters and two moments, three times while a checkpoint replaces the
            # older of two; the best parameters, twice.
            arrays = 3 * 3 + 2
            check_space(self.workdir, arrays * 4 * self.num_parameters + 10_000_000)
        return Checkpoints(self.workdir, clean=self._training)

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.state.step)

    def advance(self, step: int, batch: dict[str, jax.Array]) -> None:
        """Does the step after ``step`` steps, of pretraining or of the task."""
        pretrains = step < self.config.pretrain.steps
        function = self._pretrain_step if pretrains else self.train_step
        self.state = function(self.state, batch)

    def step_function(self, step: int) -> Any:
        """The function that `advance` compiles."""
        pretrains = step < self.config.pretrain.steps
        return self._pretrain_function if pretrains else self._function

    def model_at(self, params: nnx.State) -> nnx.Module:
        """The model with some parameters."""
        return nnx.merge(self._graphdef, params)

    def restore(self) -> int:
        """Goes on from the newest checkpoint if there is one; returns its step."""
        if self.checkpoints.latest_step is not None:
            self.state, self.progress = self.checkpoints.restore(self.state, self.data)
            best = self.checkpoints.best_step
            if best is not None and best > self.progress.best_step:
                self._again = best
        return self.step

    def fit(self, console: RunConsole, tracker: Tracker | None = None) -> None:
        """Trains to the last step, with evaluations and checkpoints on the way.

        The metrics go to the tracker, too.

        Raises:
          Interrupted: SIGINT or SIGTERM came; the state is saved.
          NonFiniteLoss: the run cannot go on; the last good checkpoint is kept.
        """
        step, train = self.step, self.config.train
        meter = _Meter(step, self.progress.seconds)
        done = self.checkpoints.seal.get("validated", False)
        metrics = MetricsWriter(self.workdir, step, done, hosts.is_writer(), tracker)
        profile = Profile(self.workdir if self.config.profile else None)
        closing = contextlib.closing
        with (
            closing(metrics) as writer,
            closing(profile),
            StopRequest() as stop,
            console,
        ):
            try:
                if self._validates(step) and not done:
                    self._validate(step, meter, writer, console, stop)
                while step < train.steps:
                    step = self._advance(step, meter, writer, console, stop, profile)
            except NonFiniteLoss as error:
                writer.write(error.step, "not_finite")
                raise

    def _advance(
        self,
        step: int,
        meter: "_Meter",
        writer: MetricsWriter,
        console: RunConsole,
        stop: StopRequest,
        profile: Profile,
    ) -> int:
        """Does one step, and what is due after it."""
        train = self.config.train
        with meter.waiting():
            read = next(self.data)
        batch = sharding.shard_batch(self.mesh, read)
        program = (step < self.config.pretrain.steps, shapes(batch))
        if program in self._compiled:
            profile.step()
            self.advance(step, batch)
        else:
            console.doing(f"compiling for batches of {size_in_words(batch)}")
            with meter.left_out():
                self.advance(step, batch)
                jax.block_until_ready(self.state.step)
            self._compiled.add(program)
            console.compiled()
        stop.unsaved = True
        step += 1
        console.advance(step)
        if self._is_due(step, train.log_every) or step == self.config.pretrain.steps:
            self._report(step, meter, writer, console)
        if self._validates(step):
            self._validate(step, meter, writer, console, stop)
        if console.broken:
            stop.signum = signal.SIGPIPE
        signum = self._stop_signal(step, stop)
        if signum:
            self._save(step, meter, stop)
            raise Interrupted(signum, step)
        if self._waits:
            jax.block_until_ready(self.state.step)
        return step

    def _validates(self, step: int) -> bool:
        return self._is_due(step, self.config.train.eval_every) or step == self._again

    def _is_due(self, step: int, every: int) -> bool:
        return step > 0 and (step % every == 0 or step == self.config.train.steps)

    def evaluate(
        self,
        params: Any,
        split: str,
        stop: StopRequest | None = None,
        console: RunConsole | None = None,
    ) -> dict[str, float]:
        """Mean loss and accuracy over a split; every example counts exactly once.

        Args:
          params: those of the model.
          split: which examples.
          stop: ends it.
          console: says how far it is.

        Raises:
          _Stopped: a signal came; several processes go on, since they must agree.
        """
        batches = pipeline.eval_batches(
            self.dataset,
            split,
            self.buckets,
            self.config.train.eval_batch_size,
            shard=self._shard,
        )
        sums = sharding.replicate(self.mesh, zero_sums())
        quiet = console is None
        for batch in batches if quiet else console.told(batches, len(batches)):
            if stop is not None and stop.signum and jax.process_count() == 1:
                raise _Stopped
            sums = self.eval_step(params, sums, sharding.shard_batch(self.mesh, batch))
        return _means(jax.device_get(sums))

    def _make_mesh(self) -> Mesh:
        train, longest = self.config.train, self.config.model.max_length
        sizes = (train.batch_size, train.eval_batch_size)
        mesh = sharding.make_mesh(sizes, train.seq_devices)
        needed = sharding.padded_length(mesh, self.buckets[-1])
        if needed > longest:
            wanted = f"at least {needed}, the longest bucket of the data"
            if train.seq_devices > 1:
                wanted += f" for --train.seq_devices={train.seq_devices}"
            raise expected("--model.max_length", wanted, longest)
        return mesh

    def _stop_signal(self, step: int, stop: StopRequest) -> int:
        """The signal on which all processes stop after this step; 0 = none.

        Processes get a signal at different steps, so now and then they agree.
        """
        if jax.process_count() > 1 and step % _AGREE_EVERY:
            return 0
        return hosts.agree(stop.signum or 0)

    def _report(
        self, step: int, meter: "_Meter", writer: MetricsWriter, console: RunConsole
    ) -> None:
        """Writes the training metrics since the last report."""
        sums, bad_step, peak = jax.device_get(drain(self.state))
        if bad_step != NO_STEP:
            raise NonFiniteLoss(int(bad_step), self.checkpoints.latest_step)
        zeros = sharding.replicate(self.mesh, zero_sums())
        self.state = self.state._replace(
            sums=zeros, peak=sharding.replicate(self.mesh, np.zeros((), np.float32))
        )
        means, speed = _means(sums), meter.speed(step)
        pretrained = step <= self.config.pretrain.steps
        writer.write(
            step,
            "pretrain" if pretrained else "train",
            **means,
            loss_max=float(peak),
            learning_rate=float(jax.device_get(self.schedule(step - 1))),
            steps_per_second=speed,
            warm=meter.warm,
            data_wait=meter.data_wait,
            seconds=meter.seconds,
        )
        console.training(step, means["loss"], means["accuracy"], speed)

    def _validate(
        self,
        step: int,
        meter: "_Meter",
        writer: MetricsWriter,
        console: RunConsole,
        stop: StopRequest,
    ) -> None:
        """Scores the validation split, saves the best and the latest checkpoint.

        A signal ends it without a score; a session that goes on begins with it. In
        pretraining, where no label was seen yet, it saves alone.
        """
        if step <= self.config.pretrain.steps:
            self._save(step, meter, stop, validated=True)
            return
        self._check_finite()
        try:
            console.doing("evaluating", quiet=True)
            with meter.paused():
                means = self.evaluate(self.state.params, "valid", stop, console)
            console.doing("training", quiet=True)
        except _Stopped:
            return
        if not math.isfinite(means["loss"]):
            raise NonFiniteLoss(step, self.checkpoints.latest_step)
        scores = self.task.score(self.dataset, "valid", means["loss"])
        writer.write(step, "valid", **means, **scores, seconds=meter.seconds)
        best = self.progress.improved(means, self.config.train.best_by)
        if best:
            with meter.paused():
                self.checkpoints.save_best(step, self.state.params)
            self.progress = self.progress._replace(
                best_step=step,
                best_accuracy=means["accuracy"],
                best_loss=means["loss"],
            )
        console.line(
            f"step {step}  validation loss {means['loss']:.4f}  accuracy "
            f"{100 * means['accuracy']:.2f} %"
            + "".join(f"  {name} {value:.3f}" for name, value in scores.items())
            + ("  (best so far)" if best else "")
        )
        self._save(step, meter, stop, validated=True)

    def _save(
        self, step: int, meter: "_Meter", stop: StopRequest, validated: bool = False
    ) -> None:
        self._check_finite()
        self.progress = self.progress._replace(seconds=meter.seconds)
        about = {
            "validated": validated,
            "metrics": seals.digest(read_metrics(self.workdir)),
        }
        with meter.paused():
            self.checkpoints.save_latest(
                step, self.state, self.progress, self.data, about
            )
        stop.unsaved = False

    def _check_finite(self) -> None:
        """Keeps parameters that are lost from replacing a good checkpoint."""
        bad_step = int(self.state.bad_step)
        if bad_step == NO_STEP and not all_finite(self.state.params):
            bad_step = self.step
        if bad_step != NO_STEP:
            raise NonFiniteLoss(bad_step, self.checkpoints.latest_step)


class _Meter:
    """Wall time of a run over all its sessions, and training speed without pauses."""

    def __init__(self, step: int, seconds: float):
        self._start = time.perf_counter() - seconds
        self._mark, self._marked_step = time.perf_counter(), step
        self.warm, self.data_wait = True, 0.0
        self._cold_steps, self._cold_seconds, self._waited = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, evaluations and saves included."""
        return time.perf_counter() - self._start

    def speed(self, step: int) -> float:
        """Steps a second since the last call, pauses left out.

        Steps that were compiled are left out, too, unless there are no others; then
        ``warm`` is False. Then ``data_wait`` is the share of their time, 0..1, in which
        the next batch was not there.
        """
        now, steps = time.perf_counter(), step - self._marked_step
        spent = now - self._mark
        self.warm = self._cold_steps < steps
        if self.warm:
            steps, spent = steps - self._cold_steps, spent - self._cold_seconds
        self._mark, self._marked_step = now, step
        spent = max(spent, 1e-9)
        self.data_wait = self._waited / spent
        self._cold_steps, self._cold_seconds, self._waited = 0, 0.0, 0.0
        return steps / spent

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context of the wait for a batch."""
        begun = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begun

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Context of one step that compiles."""
        begun = time.perf_counter()
        yield
        self._cold_steps += 1
        self._cold_seconds += time.perf_counter() - begun

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time does not count for ``speed``."""
        begun = time.perf_counter()
        yield
        self._mark += time.perf_counter() - begun


def shapes(batch: Any) -> tuple[tuple[int, ...], ...]:
    """The shapes for which a step is compiled."""
    return tuple(x.shape for x in jax.tree.leaves(batch))


def size_in_words(batch: Any) -> str:
    """The shape of its largest array, as in ``32 x 1024``."""
    return " x ".join(map(str, max(shapes(batch), key=math.prod)))


def _means(sums: dict[str, Any]) -> dict[str, float]:
    count = float(sums["count"])
    return {
        "loss": float(sums["loss"]) / count,
        "accuracy": float(sums["correct"]) / count,
    }
