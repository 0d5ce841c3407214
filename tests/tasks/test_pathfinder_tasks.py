"""Pathfinder's four tasks from flags to a score, on small data of the true kind."""

from typing import Any

import helpers
import numpy as np
import pytest

from lra_jax import models, report, train
from lra_jax.configs import get_preset
from lra_jax.configs.pathfinder import SIZES
from lra_jax.tasks import get_task
from lra_jax.training.optimizer import make_schedule
from lra_jax.training.session import Session

pytestmark = pytest.mark.slow

DATA = {
    "num_train": 12,
    "num_valid": 4,
    "num_test": 6,
    "level": "easy",
    "num_distractors": 1,
    "processes": 1,
}
MODEL = {"num_layers": 1, "embed_dim": 8, "num_heads": 1, "qkv_dim": 8, "mlp_dim": 8}
TRAIN = {
    "steps": 4,
    "warmup": 1,
    "batch_size": 2,
    "eval_batch_size": 2,
    "eval_every": 2,
    "log_every": 2,
}


def test_a_run_from_beginning_to_end(tmp_path):
    config = get_preset("pathx", "compact", "linear").replace(
        workdir=str(tmp_path / "run"),
        train=TRAIN,
        model=MODEL,
        data=DATA | {"dir": str(tmp_path)},
    )
    result = train.run(config, quiet=True)
    assert result["task"] == "pathx" and result["test_examples"] == 6
    assert 0 <= result["test_accuracy_best"] <= 100
    assert result["steps"] == 4 and not result["official_data"]
    assert result["peak_memory_bytes"] > 0


@pytest.mark.parametrize("task", SIZES)
def test_data_settings(task):
    for preset in ("compact", "official", "modern"):
        config = get_preset(task, preset)
        data: Any = config.data
        sizes = data.num_train, data.num_valid, data.num_test
        assert sizes == (160_000, 20_000, 20_000)
        assert config.model.max_length == SIZES[task] ** 2
        whole = helpers.Sizes(*sizes)
        assert get_task(task).is_official(data, whole)
        assert not get_task(task).is_official(data, helpers.Sizes(160_000, 20_000, 40))
        easy = config.replace(data={"level": "easy"})
        assert not get_task(task).is_official(easy.data, whole)


def test_official_settings():
    config = get_preset("pathfinder", "official", "softmax")
    model, training = config.model, config.train
    assert (model.num_layers, model.num_heads, model.embed_dim) == (4, 4, 32)
    assert (model.qkv_dim, model.mlp_dim, model.dropout) == (16, 32, 0.2)
    assert (model.padding, model.positions, model.pooling) == (
        "zeros",
        "sinusoidal",
        "mean",
    )
    rates = [float(make_schedule(training)(step)) for step in (0, 156, 312)]
    # 1e-3 * min(1, step / 312), half a cosine after it.
    assert rates == pytest.approx([0, 5e-4, 1e-3], rel=1e-3, abs=1e-9)
    assert get_preset("pathfinder", "official", "nystrom").model.embed_dim == 32
    assert get_preset("pathx", "official").train.clip_norm == 1.0
    assert get_preset("path256", "official", "linear").model.pooling == "cls"
    linformer = get_preset("pathfinder64", "official", "linformer")
    assert str(linformer.model.attention_options).startswith("features=16,")


def test_levels_from_easy_to_hard_in_patches_in_one_run(tmp_path):
    """Also with a convolution over squares and a recurrence along both axes; with a
    score, predictions and a report's words."""
    parts = {"conv_grid": True, "short_conv": 3, "attention_options": "grid=true"}
    parts |= {"norm": "instance", "inputs": "linear", "patch": 2}
    config = get_preset("pathfinder", "modern", "hgrn").replace(
        workdir=str(tmp_path / "run"),
        train=TRAIN,
        model=MODEL | parts,
        data=DATA | {"level": "hard", "levels": "easy:0.5", "dir": str(tmp_path)},
    )
    assert config.data.shown == ("easier levels first (easy:0.5)",)
    with Session(config, quiet=True) as session:
        data = session.dataset
        assert data.num_examples("train") == 24
        images = np.array([x["tokens"] for x in data.source("train")])
        easy, hard = np.split(images, 2)
        for step, batch in enumerate(session.trainer.data):
            level = easy if step < 2 else hard
            for row in batch["tokens"]:
                assert (row == level).all(1).any()
    result = train.run(config, quiet=True)
    assert not result["official_data"]
    saved = models.load(tmp_path / "run")
    assert saved.config.patch == 2
    images = [x["tokens"].reshape(32, 32) for x in data.source("test")]
    right = np.mean(saved.predict(images).labels == data.labels("test"))
    assert 100 * right == pytest.approx(result["test_accuracy_best"])
    report.main([str(tmp_path / "run"), f"--out={tmp_path / 'report'}"])
    text = (tmp_path / "report" / "report.md").read_text()
    assert "patches of 2 x 2 pixels" in text


@pytest.mark.parametrize(
    "data",
    [
        {"levels": "hard:0.5"},
        {"levels": "easy:x"},
        {"levels": "intermediate:0.2,easy:0.5"},
        {"levels": "easy:0.5,intermediate:0.5"},
        {"levels": "easy:1"},
        {"levels": "easy:0.5", "level": "easy"},
        {"levels": "easy:0.2,short:0.5"},
        {"levels": "easy:0.5", "path": "somewhere"},
    ],
)
def test_levels_that_cannot_be(data):
    config = get_preset("pathfinder", "modern", "hgrn").replace(data=data)
    with pytest.raises(ValueError, match=r"--data\.levels: expected"):
        get_task("pathfinder").check(config)
