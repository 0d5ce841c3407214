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


def test_a_run_predicts_raw_expressions(finished, dataset) -> None:
    saved = models.load(finished.workdir)
    assert saved.about["step"] == finished.result.best_step
    texts = [listops.decode(x["tokens"]) for x in dataset.source("test")]
    found = saved.predict(texts, batch_size=15)
    accuracy = 100 * np.mean(found.labels == dataset.labels("test"))
    assert accuracy == pytest.approx(finished.result.test_accuracy_best)


def test_evaluate_writes_predictions_and_a_model(finished, dataset, tmp_path) -> None:
    file, lines = tmp_path / "new" / "last.safetensors", tmp_path / "lines.jsonl"
    config = evaluate.EvaluateConfig(
        str(finished.workdir),
        checkpoint="last",
        predictions=str(lines),
        save=str(file),
    )
    result = evaluate.run(config)
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["example"] for line in found] == list(range(45))
    labels = [line["label"] for line in found]
    assert labels == dataset.labels("test").tolist()
    right = np.mean([line["label"] == line["prediction"] for line in found])
    assert 100 * right == pytest.approx(result["accuracy"])
    chances = np.array([line["probabilities"] for line in found])
    np.testing.assert_allclose(chances.sum(1), 1, atol=1e-4)
    texts = [listops.decode(x["tokens"]) for x in dataset.source("test")]
    saved = models.load(file).predict(texts, batch_size=15)
    np.testing.assert_allclose(saved.probabilities, chances, atol=1e-4)


@pytest.mark.parametrize("name", ["a.safetensors", "a.json", "x/../a.json"])
def test_predictions_do_not_replace_the_saved_model(
    finished, tmp_path, capsys, name
) -> None:
    (tmp_path / "x").mkdir()
    flags = [f"--save={tmp_path}/a.safetensors", f"--predictions={tmp_path}/{name}"]
    with pytest.raises(SystemExit) as stop:
        evaluate.main([f"--workdir={finished.workdir}", *flags])
    part = "--predictions: expected another file than those of --save="
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("flag", ["predictions", "save"])
def test_a_file_that_cannot_be_written_is_an_error_before_scoring(
    finished, tmp_path, capsys, flag
) -> None:
    (tmp_path / "file").touch()
    given = f"--{flag}={tmp_path / 'file' / 'a.safetensors'}"
    with pytest.raises(SystemExit) as stop:
        evaluate.main([f"--workdir={finished.workdir}", given])
    part = f"--{flag}: expected a file that can be written"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)


def test_a_model_does_not_replace_the_files_of_its_run(finished, capsys) -> None:
    before = (finished.workdir / "config.json").read_bytes()
    with pytest.raises(SystemExit) as stop:
        save = f"--save={finished.workdir / 'config.safetensors'}"
        evaluate.main([f"--workdir={finished.workdir}", save])
    part = "config.safetensors next to config.json, which `save` did not write"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)
    assert (finished.workdir / "config.json").read_bytes() == before


def test_the_last_model_does_not_replace_the_best_one(finished, capsys) -> None:
    before = (finished.workdir / "model.safetensors").read_bytes()
    flags = ["--checkpoint=last", f"--save={finished.workdir / 'model.safetensors'}"]
    with pytest.raises(SystemExit) as stop:
        evaluate.main([f"--workdir={finished.workdir}", *flags])
    part = "--save: expected a file other than model.safetensors"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)
    assert (finished.workdir / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/best/x"])
def test_predictions_do_not_replace_the_files_of_their_run(
    finished, capsys, name
) -> None:
    before = (finished.workdir / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit) as stop:
        file = f"--predictions={finished.workdir / name}"
        evaluate.main([f"--workdir={finished.workdir}", file])
    part = f"--predictions: expected a file other than {name.partition('/')[0]}"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)
    assert (finished.workdir / "metrics.jsonl").read_bytes() == before


def test_a_mean_over_padding_is_that_of_the_run(data_dir, tmp_path) -> None:
    """Evaluation pads to buckets, and the mean counts the padding."""
    config = helpers.tiny(
        data_dir,
        tmp_path / "run",
        train={"steps": 2, "eval_every": 2, "warmup": 0},
        model={"padding": "zeros", "pooling": "mean"},
        data={"buckets": "40,52,64"},
    )
    with Session(config, quiet=True) as session:
        session.run()
        dataset = session.trainer.dataset
    lines = tmp_path / "lines.jsonl"
    evaluate.run(evaluate.EvaluateConfig(str(tmp_path / "run"), predictions=str(lines)))
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    texts = [listops.decode(x["tokens"]) for x in dataset.source("test")]
    saved = models.load(tmp_path / "run").predict(texts)
    chances = [line["probabilities"] for line in found]
    np.testing.assert_allclose(saved.probabilities, chances, atol=1e-5)


def test_a_model_has_its_own_suffix(tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        evaluate.main([f"--workdir={tmp_path}", f"--save={tmp_path / 'a.bin'}"])
    part = "--save: expected NAME.safetensors, got"
    helpers.assert_one_error(stop.value.code, capsys.readouterr().err, 2, part)


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


def test_evaluate_in_a_new_process(finished):
    end = helpers.run("-m", "lra_jax.evaluate", f"--workdir={finished.workdir}")
    assert end.returncode == 0, end.stderr
    result = finished.result
    assert f"test accuracy {result.test_accuracy_best:.2f} %" in end.stdout
    assert f"loss {result.test_loss_best:.4f}" in end.stdout
    assert f"45 examples, best checkpoint, step {result.best_step}" in end.stdout


@pytest.mark.parametrize("how", helpers.DAMAGE)
@pytest.mark.parametrize("name", MODEL)
def test_the_model_in_a_file(foreign, copied, name, how):
    damage(copied, foreign, ".", name, how)
    with pytest.raises(ValueError, match="expected ") as error:
        models.load(copied)
    assert str(copied) in str(error.value)
    assert "\n" not in str(error.value)
