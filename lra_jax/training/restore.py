"""A saved run as a model, for code that inspects it and does not train it."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import own_code
from lra_jax.configs import Config
from lra_jax.data import pipeline
from lra_jax.data.dataset import SequenceDataset
from lra_jax.errors import expected
from lra_jax.files import expand_home
from lra_jax.models.saved import decide, save
from lra_jax.tasks import Task, get_task
from lra_jax.training import sharding
from lra_jax.training.console import RunConsole
from lra_jax.training.trainer import Trainer
from lra_jax.training.workdir import other_data, read_config

Examples = dict[str, np.ndarray]


class SavedRun(NamedTuple):
    """A trained model and the data that it was trained on.

    Attributes:
      config, task, dataset: of the run.
      model: the model with the checkpoint's parameters.
      step: step of the checkpoint.
    """

    config: Config
    task: Task
    dataset: SequenceDataset
    model: Any
    step: int

    def examples(self, indices: Iterable[int], split: str = "test") -> Examples:
        """A batch of examples, padded to the longest of them.

        Raises:
          ValueError: there is no such example.
        """
        return pipeline.read_examples(self.dataset, split, list(indices))

    def run(self, batch: Examples) -> Any:
        """Runs the model on a batch, as in an evaluation."""
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        return self.task.loss(self.model, arrays, None)


def open_run(workdir: str, allow_code: bool) -> Trainer:
    """Opens a run for inspection: its trainer, which writes nothing to the directory.

    Prepares the run's data if they are gone.

    Args:
      workdir: the run directory.
      allow_code: import and call code that ``config.json`` names, as
        ``package.module:function``. Whoever wrote that file chose it.

    Raises:
      ValueError: it is not a run directory, its settings are invalid, it names a
        function that is not allowed, or its data have changed.
    """
    folder = expand_home(workdir, "workdir")
    with own_code.prefer_copies(folder) if allow_code else contextlib.nullcontext():
        config, fingerprint = read_config(folder, allow_code)
        for flag, name in config.own_parts.items() if not allow_code else ():
            part = "attention" if flag == "--attention" else flag
            needed = f"True to import {name!r}, the {part} that "
            needed += f"{folder / 'config.json'} names"
            raise expected("--allow-code", needed, False)
        if jax.device_count() % config.train.seq_devices:
            # The same scores; how sequences were split depends on the machine.
            config = config.replace(train={"seq_devices": 1})
        task = get_task(config.task)
        task.check(config)
        task.check_on_devices(config)
        dataset = task.prepare(config.data)
        if dataset.fingerprint != fingerprint:
            raise other_data(folder, fingerprint, dataset.fingerprint)
        return Trainer(config, task, dataset, folder, training=False)


def load_run(
    workdir: str,
    checkpoint: Literal["best", "last"] = "best",
    allow_code: bool = False,
) -> SavedRun:
    """Loads a checkpoint of a run; ``allow_code`` as in :func:`open_run`.

    Raises:
      ValueError: as :func:`open_run`, or the run has no checkpoint.
    """
    trainer = open_run(workdir, allow_code)
    with contextlib.closing(trainer.checkpoints) as checkpoints:
        params, step = checkpoints.load_params(checkpoint, trainer.state)
    config, task, dataset = trainer.config, trainer.task, trainer.dataset
    return SavedRun(config, task, dataset, _on_one_device(trainer, params), step)


def _on_one_device(trainer: Trainer, params: nnx.State) -> Any:
    """The model of a run with these parameters, without split sequences."""
    config = trainer.config.replace(train={"seq_devices": 1})
    model = nnx.eval_shape(
        lambda: trainer.task.make_model(
            config, trainer.dataset, nnx.Rngs(params=config.seed)
        )
    )
    nnx.update(model, params)
    return model


def export(file: str | Path, trainer: Trainer, params: nnx.State, step: int) -> None:
    """Writes the model of a run, to be read by `lra_jax.models.load`; replaces files.

    Raises:
      ValueError: the file has another suffix, or no other process could find the
        attention.
    """
    config = trainer.config.replace(train={"seq_devices": 1})
    task, dataset = trainer.task, trainer.dataset
    about = {"task": config.task, "step": step, "config": config.to_dict()}
    if dataset.classes is not None:
        about["classes"] = list(dataset.classes)
    raw = dataset.raw or task.raw(dataset.max_length)
    if config.model.padding == "zeros":
        raw = {**raw, "buckets": list(trainer.buckets)}
    model = _on_one_device(trainer, params)
    save(file, model, raw=raw, about=about, replace=True)


def predictions(
    trainer: Trainer, params: nnx.State, split: str, console: RunConsole
) -> list[dict[str, Any]]:
    """The index, label, predicted class and probabilities of each example of a split.

    Where labels belong to single positions, the last three are lists, over the
    positions that are scored. Labels that are words stay words; probabilities
    are in the words' order.
    """
    graphdef = nnx.graphdef(trainer.model_at(params))
    train = trainer.config.train

    @jax.jit
    def logits(params: nnx.State, batch: Any) -> jax.Array:
        model: Any = nnx.merge(graphdef, params)
        return model(*(batch[name] for name in model.INPUTS))

    run = sharding.under_mesh(trainer.mesh, logits)
    batches = pipeline.EvalBatches(
        trainer.dataset, split, trainer.buckets, train.eval_batch_size
    )
    dataset, lines = trainer.dataset, []
    scale = dataset.scale if dataset.has_numbers else None
    tracked = console.track(batches, len(batches))
    for ids, batch in zip(batches.examples(), tracked, strict=True):
        scores = run(params, sharding.shard_batch(trainer.mesh, batch))
        prediction = decide(np.asarray(scores), scale, dataset.several)
        chances = prediction.probabilities.astype(np.float64).round(6)
        rows = batch["labels"], prediction.labels, chances
        lines += [
            {"example": example, **_answer(dataset, *row)}
            for example, *row in zip(ids.tolist(), *rows, strict=False)
        ]
    return sorted(lines, key=lambda line: line["example"])


def _answer(
    dataset: SequenceDataset, label: Any, answer: Any, chances: np.ndarray
) -> dict[str, Any]:
    """The label of an example, its prediction, and the probabilities of all classes."""
    if dataset.has_numbers:
        mean, deviation = dataset.scale
        return {"label": float(label * deviation + mean), "prediction": float(answer)}
    if label.ndim and not dataset.several:
        chances, answer, label = (x[label >= 0] for x in (chances, answer, label))
        shown = {"label": label.tolist(), "prediction": answer.tolist()}
    else:
        shown = {"label": label, "prediction": answer}
        shown = {name: dataset.name_classes(x) for name, x in shown.items()}
    return shown | {"probabilities": chances.tolist()}
