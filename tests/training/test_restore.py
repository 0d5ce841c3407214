"""A saved run: scored again, and as a model in a file, without trainer and data."""

import json
import shutil

import helpers
import numpy as np
import pytest
from run_helpers import MODEL, STEPS, damage

from lra_jax import evaluate, models
from lra_jax.data import listops
from lra_jax.training.restore import load_run
from lra_jax.training.session import Session


def test_evaluate_writes_predictions_and_a_model(finished, dataset, tmp_path) -> None:
    file, lines = tmp_path / "new" / "last.safetensors", tmp_path / "lines.jsonl"
    config = evaluate.EvaluateConfig(
        str(finished.workdir), checkpoint="last", predictions=str(lines), save=str(file)
    )
    result = evaluate.run(config)
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["example"] for line in records] == list(range(45))
    labels = [line["label"] for line in records]
    assert labels == dataset.labels("test").tolist()
    right = np.mean([line["label"] == line["prediction"] for line in records])
    assert 100 * right == pytest.approx(result["accuracy"])
    chances = np.array([line["probabilities"] for line in records])
    np.testing.assert_allclose(chances.sum(1), 1, atol=1e-4)
    texts = [listops.decode(x["tokens"]) for x in dataset.source("test")]
    saved = models.load(file).predict(texts, batch_size=15)
    np.testing.assert_allclose(saved.probabilities, chances, atol=1e-4)


BESIDE = "--predictions: expected another file than those of --save="
OTHER = "expected a file other than"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--save={new}/a.bin", "--save: expected NAME.safetensors, got"),
        ("--save={new}/a.safetensors --predictions={new}/a.safetensors", BESIDE),
        ("--save={new}/a.safetensors --predictions={new}/a.json", BESIDE),
        ("--save={new}/a.safetensors --predictions={new}/x/../a.json", BESIDE),
        ("--save={new}/x/file/a.safetensors", "--save: expected a file that can be"),
        ("--predictions={new}/x/file/a", "--predictions: expected a file that can be"),
        (
            "--save={run}/config.safetensors",
            "config.safetensors next to config.json, which `save` did not write",
        ),
        (
            "--checkpoint=last --save={run}/model.safetensors",
            f"--save: {OTHER} model.safetensors",
        ),
        ("--predictions={run}/metrics.jsonl", f"--predictions: {OTHER} metrics.jsonl"),
        ("--predictions={run}/checkpoints/x", f"--predictions: {OTHER} checkpoints"),
    ],
)
def test_files_that_evaluate_does_not_write(
    finished, tmp_path, capsys, flags, words
) -> None:
    """Nothing is scored, and nothing replaced."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "file").touch()
    files = [*finished.workdir.iterdir(), tmp_path]
    before = [file.stat().st_mtime_ns for file in files]
    with pytest.raises(SystemExit) as stop:
        arguments = flags.format(new=tmp_path, run=finished.workdir).split()
        evaluate.main([f"--workdir={finished.workdir}", *arguments])
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, words)
    assert [file.stat().st_mtime_ns for file in files] == before


def test_a_mean_over_padding_is_that_of_the_run(data_dir, tmp_path) -> None:
    """Evaluation pads to buckets, and the mean counts the padding."""
    config = helpers.tiny(
        data_dir,
        tmp_path / "run",
        train={"steps": 2, "eval_every": 2, "warmup": 0},
        model={"padding": "zeros", "pooling": "mean"},
        data={"buckets": "40,64"},
    )
    with Session(config, quiet=True) as session:
        session.run()
        dataset = session.trainer.dataset
    lines = tmp_path / "lines.jsonl"
    evaluate.run(evaluate.EvaluateConfig(str(tmp_path / "run"), predictions=str(lines)))
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    texts = [listops.decode(x["tokens"]) for x in dataset.source("test")]
    saved = models.load(tmp_path / "run").predict(texts)
    chances = [line["probabilities"] for line in records]
    np.testing.assert_allclose(saved.probabilities, chances, atol=1e-5)


@pytest.mark.parametrize(
    ("split", "checkpoint"), [("test", "best"), ("test", "last"), ("valid", "best")]
)
def test_evaluate(finished, split, checkpoint):
    result = evaluate.run(
        evaluate.EvaluateConfig(str(finished.workdir), split, checkpoint)
    )
    assert result["examples"] == {"test": 45, "valid": 50}[split]
    assert result["accuracy"] == getattr(
        finished.result, f"{split}_accuracy_{checkpoint}"
    )
    step = finished.result.best_step if checkpoint == "best" else STEPS
    assert result["step"] == step


def test_evaluating_leaves_a_running_save_alone(finished, data_dir):
    """Another process may be training in the directory."""
    saving = finished.workdir / "checkpoints" / "latest" / "50.orbax-checkpoint-tmp-1"
    saving.mkdir()
    try:
        evaluate.run(evaluate.EvaluateConfig(str(finished.workdir)))
        assert saving.exists()
    finally:
        saving.rmdir()


def test_evaluating_makes_no_folders(finished, tmp_path):
    """The folder may be read-only, or hold no more than the best checkpoint."""
    config, best = tmp_path / "config.json", tmp_path / "checkpoints/best"
    shutil.copyfile(finished.workdir / "config.json", config)
    with pytest.raises(ValueError, match=f"{best}: expected a checkpoint, got none"):
        load_run(str(tmp_path))
    assert [*tmp_path.iterdir()] == [config]
    shutil.copytree(finished.workdir / "checkpoints/best", best)
    assert load_run(str(tmp_path)).step == finished.result.best_step
    assert [*best.parent.iterdir()] == [best]


@pytest.mark.parametrize("how", helpers.DAMAGE)
@pytest.mark.parametrize("name", MODEL)
def test_the_model_in_a_file(foreign, copied, name, how):
    damage(copied, foreign, ".", name, how)
    with pytest.raises(ValueError, match="expected ") as error:
        models.load(copied)
    assert str(copied) in str(error.value)
    assert "\n" not in str(error.value)
