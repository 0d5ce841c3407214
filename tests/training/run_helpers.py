"""What several files of tests of whole runs share."""

import contextlib
import json
import signal
import time

import helpers
import jax
import numpy as np
import pytest
from flax import nnx

from lra_jax import tasks, train
from lra_jax.training import sharding
from lra_jax.training.checkpoints import Checkpoints
from lra_jax.training.metrics import read_metrics
from lra_jax.training.trainer import Stopped, Trainer

STEPS = helpers.TRAIN["steps"]
LATEST = f"checkpoints/latest/{STEPS}"
MODEL = ("model.safetensors", "model.json")


def trainer(config, dataset, workdir) -> Trainer:
    workdir.mkdir(exist_ok=True)
    return Trainer(config, tasks.get_task("listops"), dataset, workdir)


def losses(workdir, split: str = "train") -> list[float]:
    return [line["loss"] for line in read_metrics(workdir) if line["split"] == split]


def use_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers made from now on have a mesh of one device."""
    mesh = jax.make_mesh(
        (1, 1),
        ("data", "seq"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:1],
    )
    monkeypatch.setattr(sharding, "make_mesh", lambda *_: mesh)


def reference_means(trainer, split: str) -> dict[str, float]:
    """Loss and accuracy over a split, every example by itself in one batch."""
    dataset = trainer.dataset
    lengths = dataset.lengths(split)
    tokens = np.zeros((len(lengths), 60), np.uint8)
    for row, example in zip(tokens, dataset.source(split), strict=True):
        row[: len(example["tokens"])] = example["tokens"]
    model = trainer.task.make_model(trainer.config, dataset, nnx.Rngs(params=0))
    nnx.update(model, trainer.state.params)
    out = np.asarray(
        helpers.call_model(lambda m, *args: m(*args), model, tokens, lengths)
    )
    labels = dataset.labels(split)
    out = out.astype(np.float64)
    chosen = out[np.arange(len(labels)), labels]
    return {
        "loss": float(np.mean(np.log(np.exp(out).sum(1)) - chosen)),
        "accuracy": float(np.mean(out.argmax(1) == labels)),
    }


# Fields of a result that differ from one run to the next, and the seal over it.
VARYING = (
    *("seconds", "steps_per_second", "data_wait", "command", "peak_memory_bytes"),
    "seal",
)


def main(config) -> int | str | None:
    """The command line in this process; its exit code."""
    with pytest.raises(SystemExit) as stop:
        train.main(helpers.flags(config))
    return stop.value.code


def wait(process, condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no progress within the time"
        time.sleep(0.002)


def last_step(workdir) -> int:
    with contextlib.suppress(json.JSONDecodeError, FileNotFoundError):
        return max([line["step"] for line in read_metrics(workdir)], default=0)
    return 0


def latest(workdir) -> int:
    folder = workdir / "checkpoints" / "latest"
    steps = folder.iterdir() if folder.exists() else ()
    return max([int(p.name) for p in steps if p.name.isdecimal()], default=0)


def broken_off(self, params, split, stop, console):
    """Takes the place of a validation, which a signal ends."""
    stop.signum = signal.SIGTERM
    raise Stopped


BOUNDLESS = {"schedule": "constant", "length_warmup": ""}


def constant(data_dir, workdir, steps):
    settings = {**BOUNDLESS, "steps": steps, "eval_every": 4}
    return helpers.tiny(data_dir, workdir, train=settings)


def steps_and_losses(workdir):
    return [(m["step"], m["split"], m["loss"]) for m in read_metrics(workdir)]


def damage(workdir, foreign, below, pattern, how, theirs=None):
    """Damages the first file of the pattern; returns its name below the folder."""
    folder = workdir / below
    file = sorted(folder.glob(pattern))[0]
    other = sorted((foreign.workdir / (theirs or below)).glob(pattern))[0]
    helpers.damage(file, how, other)
    return file.relative_to(folder).as_posix()


def restored(workdir, shapes):
    """State, progress and step with which a run goes on."""
    checkpoints = Checkpoints(workdir)
    try:
        return checkpoints.restore(shapes.state, shapes.data)
    finally:
        checkpoints.close()
