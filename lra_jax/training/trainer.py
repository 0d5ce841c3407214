"""The trainer: the model, the state and the steps of one run."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from lra_jax.configs import Config
from lra_jax.data import pipeline
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.stages import Curriculum, LengthWarmup, tokens_before
from lra_jax.errors import expected, rename
from lra_jax.models import Buffer
from lra_jax.models.classifier import is_of_reconstruction, is_of_task
from lra_jax.models.decoding import state_size
from lra_jax.signals import StopRequest
from lra_jax.tasks import Task
from lra_jax.tasks.reconstruction import reconstruction_loss
from lra_jax.training import sharding
from lra_jax.training.checkpoints import Checkpoints, Progress, check_space
from lra_jax.training.console import RunConsole
from lra_jax.training.mixing import mix_batches
from lra_jax.training.optimizer import make_optimizer, make_schedule
from lra_jax.training.step import (
    NO_STEP,
    TrainState,
    all_finite,
    compiled_step,
    drain,
    init_state,
    make_eval_step,
    scored_params,
    step_function,
    zero_sums,
)

Step = Callable[[TrainState, dict[str, jax.Array]], TrainState]


class Stopped(Exception):
    """A signal was received during an evaluation."""


class NonFiniteLoss(FloatingPointError):
    """The loss became infinite or NaN, or a parameter did because of its gradient.

    Attributes:
      step: the first step with such a loss; or the last step before a check of the
        parameters, or a validation, that was not finite.
      saved_step: step of the last good checkpoint; None if there is none.
    """

    def __init__(self, step: int, saved_step: int | None):
        kept = "no checkpoint was saved yet"
        if saved_step is not None:
            kept = f"the checkpoint of step {saved_step} is kept"
        super().__init__(
            f"the loss or its gradient is not finite at step {step}; "
            f"{kept}; with JAX_DEBUG_NANS=1, jax looks for the cause"
        )
        self.step = step
        self.saved_step = saved_step


class Trainer:
    """The model, data and steps of one run, and their evaluation.

    Creating it checks everything that can be checked without compiling the step.
    Nothing is read or written in the run directory before `checkpoints` is first used.
    One that is not for ``training`` needs no disk space and changes nothing there:
    another process may be training.
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
        # The step of a best checkpoint that is later than the step to resume from. It
        # has replaced an earlier one, so this step is validated again.
        self.lost_best: int | None = None
        # The devices and commits of all sessions, in turn.
        self.origins: dict[str, list[str]] = {}
        self._classes = dataset.num_classes if dataset.several else 0
        self.buckets = _buckets(config, dataset)
        self.mesh = self._make_mesh()
        self._shard = sharding.data_shard(self.mesh)
        self.schedule = make_schedule(train, config.pretrain)
        optimizer = make_optimizer(train, config.pretrain)
        model = task.make_model(config, dataset, nnx.Rngs(params=config.seed))
        self._graphdef, params = nnx.split(model, (nnx.Param, Buffer))
        trained = nnx.filter_state(params, nnx.Param)
        self.num_parameters = sum(x.size for x in jax.tree.leaves(trained))
        causal = config.model.is_causal
        self.state_size = state_size(model.encoder) if causal else None
        state = init_state(params, optimizer, train.ema, self._classes)
        self.state: TrainState = sharding.replicate(self.mesh, state)
        self.progress = Progress()
        self.train_step, self._pretrain_step = self._make_steps(optimizer)
        shapes = pipeline.eval_shapes(dataset, self.buckets)
        eval_step = make_eval_step(task.loss, self._graphdef, shapes=shapes)
        self.eval_step = sharding.under_mesh(self.mesh, eval_step)
        self.data = self._training_data()

    def _make_steps(self, optimizer: optax.GradientTransformation) -> tuple[Step, Step]:
        """The compiled steps of the task, and of pretraining."""
        config, pretrain = self.config, self.config.pretrain
        reconstruction = functools.partial(
            reconstruction_loss, mask_rate=pretrain.mask_rate
        )
        learns = is_of_task if pretrain.steps else nnx.Param
        warmup = LengthWarmup.parse(config.train.length_warmup, config.train.steps)
        # Packed batches differ in their number of rows.
        packed = config.data.packing
        shapes = None if packed else len(warmup.widths(self.buckets))
        placed = sharding.replicated_sharding(self.mesh)

        def make(loss: Any, learns: Any, renewed_at: int) -> Step:
            model, ema = self._graphdef, config.train.ema
            function = step_function(
                loss, model, optimizer, config.seed, learns, renewed_at, ema
            )
            step = compiled_step(function, shapes, placed)
            return sharding.under_mesh(self.mesh, step)

        loss, shape = self.task.training_loss(config.train), self.dataset.image_shape
        mixtures = config.train.mixup, config.train.cutmix
        if any(mixtures) and shape is not None:
            loss = mix_batches(loss, shape, *mixtures)
        return (
            make(loss, learns, pretrain.steps),
            make(reconstruction, is_of_reconstruction, 0),
        )

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
            groups=config.data.groups,
            augment=self.task.augment(config.data),
            packing=self._packing(),
            shard=self._shard,
        )

    def _packing(self) -> int:
        """The number of which a packed batch's rows are a multiple; 0 = not packed."""
        if not self.config.data.packing:
            return 0
        if self._shard[1] > 1:
            raise expected("--data.packing", "False on several hosts", "True")
        devices = self.mesh.shape["data"]
        return math.lcm(max(1, self.config.train.batch_size // 8), devices)

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the run directory, which by now exists.

        Raises:
          OSError: there is no space for them.
        """
        if self._training:
            # Parameters, two moments and perhaps an average, three times while a
            # checkpoint replaces the older of two; the best parameters, twice.
            arrays = 3 * (3 + bool(self.config.train.ema)) + 2
            check_space(self.workdir, arrays * 4 * self.num_parameters)
        return Checkpoints(self.workdir, clean=self._training)

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.state.step)

    @property
    def scored_params(self) -> nnx.State:
        """The parameters that are scored and kept: averages with ``--train.ema``."""
        return scored_params(self.state)

    @functools.cached_property
    def tokens_before(self) -> Callable[[int], float]:
        """The tokens of all steps before one, counted in average examples: shorter
        sequences make faster steps."""
        train = self.config.train
        return functools.partial(
            tokens_before,
            self.dataset.lengths("train"),
            cut=LengthWarmup.parse(train.length_warmup, train.steps),
            whole=Curriculum.parse(train.curriculum, train.steps),
        )

    def advance(self, step: int, batch: dict[str, jax.Array]) -> None:
        """Does the step after ``step`` steps, of pretraining or of the task."""
        pretrains = step < self.config.pretrain.steps
        function = self._pretrain_step if pretrains else self.train_step
        self.state = function(self.state, batch)

    def model_at(self, params: nnx.State) -> nnx.Module:
        """The model with these parameters."""
        return nnx.merge(self._graphdef, params)

    def restore(self) -> int:
        """Resumes from the newest checkpoint if there is one; returns its step.

        Raises:
          ValueError: no checkpoint is whole and of this run, or it is of a later step
            than the last.
        """
        if self.checkpoints.latest_step is None:
            return self.step
        self.state, self.progress = self.checkpoints.restore(self.state, self.data)
        if self.step > self.config.train.steps:  # It was being extended.
            requirement = f"at least {self.step}, the step of the newest checkpoint"
            raise expected("--train.steps", requirement, self.config.train.steps)
        best = self.checkpoints.best_step
        if best is not None and best > self.progress.best_step:
            self.lost_best = best
        before = self.checkpoints.seal.get("origins", {})
        self.origins = {
            name: list(dict.fromkeys([*before.get(name, []), *now]))
            for name, now in self.origins.items()
        }
        return self.step

    def evaluate(
        self,
        params: Any,
        split: str,
        stop: StopRequest | None = None,
        console: RunConsole | None = None,
    ) -> dict[str, float]:
        """Mean loss and accuracy over a split, where every example counts exactly once,
        and the task's own scores.

        Raises:
          Stopped: ``stop`` received a signal; with several processes, it goes on.
        """
        batches = pipeline.EvalBatches(
            self.dataset,
            split,
            self.buckets,
            self.config.train.eval_batch_size,
            shard=self._shard,
        )
        sums = sharding.replicate(self.mesh, zero_sums(self._classes))
        tracked = console.track(batches, len(batches)) if console else batches
        for batch in tracked:
            if stop is not None and stop.signum and jax.process_count() == 1:
                raise Stopped
            sums = self.eval_step(params, sums, sharding.shard_batch(self.mesh, batch))
        means = _means(jax.device_get(sums))
        model = self.model_at(params)
        scores = self.task.score(self.dataset, split, means["loss"], model)
        if self.dataset.metric in scores:
            means["accuracy"] = scores[self.dataset.metric]
        return means | scores

    def take_sums(self) -> tuple[dict[str, float], float]:
        """Mean loss and accuracy of the steps since the last call, and the worst loss.

        Raises:
          NonFiniteLoss: one of the losses was not finite.
        """
        sums, bad_step, peak = jax.device_get(drain(self.state))
        if bad_step != NO_STEP:
            raise NonFiniteLoss(int(bad_step), self.checkpoints.latest_step)
        zeros = sharding.replicate(self.mesh, zero_sums(self._classes))
        none = sharding.replicate(self.mesh, np.zeros((), np.float32))
        self.state = self.state._replace(sums=zeros, peak=none)
        return _means(sums), float(peak)

    def check_finite(self) -> None:
        """Keeps non-finite parameters from replacing a good checkpoint.

        Raises:
          NonFiniteLoss: there are some.
        """
        bad_step = int(self.state.bad_step)
        if bad_step == NO_STEP and not all_finite(self.state.params):
            bad_step = self.step
        if bad_step != NO_STEP:
            raise NonFiniteLoss(bad_step, self.checkpoints.latest_step)

    def _make_mesh(self) -> Mesh:
        train, longest = self.config.train, self.config.max_length
        sizes = (train.batch_size, train.eval_batch_size)
        mesh = sharding.make_mesh(sizes, train.seq_devices, self._training)
        # A part is scored after the last step, padded to its own longest sequence.
        parts = [int(self.dataset.lengths(x).max()) for x in self.dataset.parts]
        needed = sharding.padded_length(mesh, max([self.buckets[-1], *parts]))
        if needed > longest:
            requirement = f"at least {needed}, the longest bucket or part of the data"
            if train.seq_devices > 1:
                requirement += f" for --train.seq_devices={train.seq_devices}"
            raise expected("--model.max_length", requirement, longest)
        return mesh


def _means(sums: dict[str, Any]) -> dict[str, float]:
    """The means over examples, where an example has several classes with the mean over
    these of F1, 0 of a class that neither occurs nor was predicted."""
    count = float(sums["count"])
    loss, accuracy = (float(sums[name]) / count for name in ("loss", "correct"))
    if "hits" not in sums:
        return {"loss": loss, "accuracy": accuracy}
    both = np.maximum(sums["claims"] + sums["members"], 1)
    f1 = float(np.mean(2 * sums["hits"] / both))
    return {"loss": loss, "accuracy": f1, "f1": f1, "label_accuracy": accuracy}


def _buckets(config: Config, dataset: SequenceDataset) -> tuple[int, ...]:
    try:
        return pipeline.bucket_lengths(dataset, config.buckets)
    except ValueError as error:
        raise rename(error, "--data.buckets") from error
