"""A saved run as a model, for everything that looks at one and does not train it."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.configs import Config
from lra_jax.data import pipeline
from lra_jax.data.dataset import SequenceDataset
from lra_jax.errors import expected
from lra_jax.tasks import Task, get_task
from lra_jax.training.loop import Trainer
from lra_jax.training.workdir import other_data, read_config

Examples = dict[str, np.ndarray]


class SavedRun(NamedTuple):
    """A trained model and what it was trained on.

    Attributes:
      config, task, dataset: of the run.
      model: with the parameters of the checkpoint.
      step: of the checkpoint.
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


def open_run(workdir: str, allow_code: bool = False) -> Trainer:
    """A run to look at: its trainer, which touches nothing in the directory.

    Prepares the data of the run if they are gone.

    Args:
      workdir: the run directory.
      allow_code: import and call an attention function that ``config.json`` names as
        ``package.module:function``. Whoever wrote that file chose the function.

    Raises:
      ValueError: it is no run directory, its settings cannot work, it names a function
        that is not allowed, or its data have changed.
    """
    folder = Path(workdir).expanduser()
    config, fingerprint = read_config(folder)
    if ":" in config.attention and not allow_code:
        wanted = f"True to import what {folder / 'config.json'} names"
        got = f"False, and attention {config.attention!r}"
        raise expected("--allow-code", wanted, got)
    if config.train.seq_devices > jax.device_count():
        # The same scores; a machine with fewer devices need not split sequences.
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
    return SavedRun(config, task, dataset, trainer.model_at(params), step)
