"""A saved run as a model, for everything that looks at one and does not train it."""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.configs import Config
from lra_jax.data import pipeline
from lra_jax.data.dataset import SequenceDataset
from lra_jax.models import Buffer
from lra_jax.tasks import Task, get_task
from lra_jax.training.loop import Trainer
from lra_jax.training.workdir import read_config

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


def load_run(workdir: str, checkpoint: Literal["best", "last"] = "best") -> SavedRun:
    """Loads a checkpoint; prepares the data of the run if they are gone.

    Raises:
      ValueError: no run directory, no checkpoint in it, or its data are others now.
    """
    folder = Path(workdir).expanduser()
    config, fingerprint = read_config(folder)
    task = get_task(config.task)
    dataset = task.prepare(config.data)
    if dataset.fingerprint != fingerprint:
        raise ValueError(
            f"the data of {folder} are others now: fingerprint {fingerprint} then, "
            f"{dataset.fingerprint} now"
        )
    trainer = Trainer(config, task, dataset, folder, training=False)
    with contextlib.closing(trainer.checkpoints) as checkpoints:
        params, step = checkpoints.load_params(checkpoint, trainer.state)
    model = task.make_model(config, dataset, nnx.Rngs(params=config.seed))
    graph, _ = nnx.split(model, (nnx.Param, Buffer))
    return SavedRun(config, task, dataset, nnx.merge(graph, params), step)
