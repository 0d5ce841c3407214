"""Training on packed rows: the losses of rows with one example each."""

import helpers
import numpy as np
import pytest

from lra_jax import tasks
from lra_jax.configs import get_preset
from lra_jax.training import Trainer, fit
from lra_jax.training.console import RunConsole
from lra_jax.training.metrics import read_metrics


def _losses(config, dataset, workdir) -> list[float]:
    workdir.mkdir()
    run = Trainer(config, tasks.get_task("listops"), dataset, workdir)
    fit(run, RunConsole(config.train.steps, quiet=True))
    run.checkpoints.close()
    return [line["loss"] for line in read_metrics(workdir) if "loss" in line]


def test_packed_rows_train_as_single_ones_do(dataset, data_dir, tmp_path) -> None:
    """Training and validation; on two devices, in rows of 60 tokens."""
    common = {
        "attention": "cosformer",
        "train": {"steps": 12, "eval_every": 12},
        "model": {"dropout": 0.0, "pooling": "mean", "positions": "learned"},
    }
    one, many = (
        helpers.tiny(data_dir, data={"buckets": "60", "packing": packing}, **common)
        for packing in (False, True)
    )
    wanted = _losses(one, dataset, tmp_path / "one")
    got = _losses(many, dataset, tmp_path / "many")
    assert len(got) > 3
    np.testing.assert_allclose(got, wanted, rtol=1e-4)


@pytest.mark.parametrize(
    ("task", "train", "words"),
    [
        ("listops", {"seq_devices": 2}, "--train.seq_devices: expected 1 with"),
        ("retrieval", {}, "--data.packing: expected False for --task=retrieval"),
    ],
)
def test_what_cannot_be_packed(task: str, train: dict, words: str) -> None:
    config = get_preset(task).replace(train=train, data={"packing": True})
    with pytest.raises(ValueError, match=words):
        tasks.get_task(task).check(config)
