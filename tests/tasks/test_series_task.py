"""Time series from flags to a score, on small files of the true kind."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chex
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import evaluate, models, train
from lra_jax.configs import get_preset
from lra_jax.data import __main__ as data_command
from lra_jax.data import packing, pipeline, series_files
from lra_jax.tasks import get_task
from lra_jax.tasks.base import regression_loss
from lra_jax.training.metrics import read_metrics
from lra_jax.training.optimizer import make_optimizer

TRAIN = {
    "steps": 4,
    "warmup": 0,
    "batch_size": 4,
    "eval_batch_size": 4,
    "eval_every": 2,
    "log_every": 2,
}
MODEL = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "qkv_dim": 8, "mlp_dim": 8}


def write(folder: Path, *, numbers: bool) -> Path:
    """Series of two channels and 3 to 6 steps, and whether their sum is above 0."""
    rng = np.random.default_rng(0)
    kind = "@targetLabel true" if numbers else "@classLabel true down up"
    for split, count in (("TRAIN", 20), ("TEST", 6)):
        lines = ["@univariate false", "@dimensions 2", kind, "@data"]
        for number in range(count):
            values = rng.normal(size=(2, int(rng.integers(3, 7)))).round(4)
            values[0, 0] = number % 2 * 2 - 1
            label = f"{values[0, 0]:.2f}" if numbers else ("down", "up")[number % 2]
            channels = [",".join(map(str, row)) for row in values.tolist()]
            lines.append(":".join([*channels, label]))
        (folder / f"Sum_{split}.ts").write_text("\n".join(lines))
    return folder


def config(path: Path, attention="flow", preset="quick", workdir="run", **changes):
    made = get_preset("series", preset, attention).replace(
        train=TRAIN, model=MODEL, data={"path": str(path)}, workdir=str(path / workdir)
    )
    return made.replace(**changes)


@pytest.fixture
def classes(tmp_path):
    return write(tmp_path, numbers=False)


@pytest.fixture
def numbers(tmp_path):
    return write(tmp_path, numbers=True)


def test_data_in_words(classes, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for path, told in ((classes, "; 2 classes"), (write(other, numbers=True), "mean")):
        for action in ("describe", "sample"):
            data_command.main([action, "--task=series", f"--data.path={path}"])
        printed = capsys.readouterr().out
        assert "sequences of at most 6, vectors of 2" in printed and told in printed


def test_a_run_of_classes(classes):
    result = train.run(config(classes), quiet=True)
    assert result["test_examples"] == 6 and not result["official_data"]
    assert 0 <= result["test_accuracy_best"] <= 100
    assert not {name for name in result if "r2" in name}
    loaded = models.load(str(classes / "run"))
    assert loaded.about["classes"] == ["down", "up"]
    test = series_files.read(classes)["test"]
    predicted = loaded.predict(test.values).labels
    right = [
        ("down", "up")[x] == y for x, y in zip(predicted, test.labels, strict=True)
    ]
    scored = evaluate.run(evaluate.EvaluateConfig(str(classes / "run")))
    assert scored["accuracy"] == pytest.approx(100 * np.mean(right))
    with pytest.raises(ValueError, match=r"example 0: expected numbers \[T, C\]"):
        loaded.predict([[1.0, 2.0]])


def test_a_run_of_numbers(numbers, capsys):
    result = train.run(config(numbers))
    printed = capsys.readouterr().out
    assert "test r2" in printed and "accuracy" not in printed
    test = series_files.read(numbers)["test"]
    predicted = models.load(str(numbers / "run")).predict(test.values)
    errors = predicted.labels - test.labels
    assert result["test_squared_error_best"] == pytest.approx(np.mean(errors**2), 1e-4)
    r2 = 1 - np.mean(errors**2) / np.var(test.labels)
    assert result["test_r2_best"] == pytest.approx(r2, abs=1e-4)
    assert result["metric"] == "r2"
    assert result["test_accuracy_best"] == 100 * result["test_r2_best"]
    metrics = read_metrics(numbers / "run")
    assert result["valid_accuracy_best"] == 100 * max(x.get("r2", -9) for x in metrics)
    file = numbers / "predictions.jsonl"
    scored = evaluate.run(
        evaluate.EvaluateConfig(str(numbers / "run"), predictions=str(file))
    )
    assert scored["r2"] == pytest.approx(r2, abs=1e-4) and "accuracy" not in scored
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    np.testing.assert_allclose([x["label"] for x in lines], test.labels, atol=1e-6)
    answers = [x["prediction"] for x in lines]
    np.testing.assert_allclose(answers, predicted.labels, atol=1e-5)


def test_the_official_preset_is_resumed_bit_for_bit(classes, capsys):
    """And chooses on the test split."""
    run = config(classes, preset="official")
    assert train.run(run)["validation"] == "test"
    assert "chosen on the test split itself" in capsys.readouterr().out
    helpers.resume(run, 2)


def test_numbers_have_no_labels_to_smooth(numbers):
    smoothed = config(numbers, train={"label_smoothing": 0.1, "steps": 4})
    with pytest.raises(
        ValueError, match=r"^--train.label_smoothing: expected 0 for lab"
    ):
        train.run(smoothed, quiet=True)


def test_packed_batches_have_the_same_loss(classes):
    task, run = get_task("series"), config(classes, model={**MODEL, "dropout": 0.0})
    dataset = task.prepare(run.data)
    model = task.make_model(run, dataset, nnx.Rngs(0))
    plain = pipeline.read_examples(dataset, "train", range(16))
    packed = packing.pack(plain, 6)
    assert len(packed["tokens"]) < 16
    sums = (
        helpers.call_model(lambda *x: task.loss(*x, None), model, batch)
        for batch in (plain, packed)
    )
    chex.assert_trees_all_close(*sums, rtol=1e-4)


def test_own_attention(classes):
    own = "helpers:values_only"
    assert train.run(config(classes, own), quiet=True)["attention"] == own


def test_official_model_on_the_sizes_of_japanese_vowels():
    config, task = get_preset("series", "official", "flow"), get_task("series")
    for length, count in ((26, 6_445_577), (29, 6_460_937)):
        sizes = {"vocab_size": 12, "num_classes": 9, "max_length": length}
        data: Any = SimpleNamespace(**sizes, image_shape=None)

        def make(data: Any = data) -> nnx.Module:
            return task.make_model(config, data, nnx.Rngs(0))

        params = nnx.state(nnx.eval_shape(make), nnx.Param)
        assert sum(x.size for x in jax.tree.leaves(params)) == count


def test_official_optimiser():
    official = get_preset("series", "official", "flow")
    optimizer = make_optimizer(official.train)
    params = {"w": jnp.ones(3)}
    with jax.numpy_dtype_promotion("standard"):  # As in a step.
        updates: Any = optimizer.update(params, optimizer.init(params), params)[0]
    # RAdam begins with plain momentum, whose first step is the gradient, clipped at 4.
    np.testing.assert_allclose(updates["w"], -1e-3 * np.ones(3), rtol=1e-5)
    assert get_task("series").follows_protocol(official)


def test_squared_errors_skip_filler_rows_and_missing_labels():
    class Model:
        INPUTS = ("tokens",)

        def __call__(self, tokens, rngs=None):
            return tokens[..., None]

    batch = {
        "tokens": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "labels": jnp.array([[0.0, jnp.nan], [1.0, 4.0], [0.0, 0.0]]),
        "weights": jnp.array([1.0, 1.0, 0.0]),
    }
    sums = regression_loss(Model(), batch)
    assert (float(sums["loss"]), float(sums["count"])) == (1 + 4 + 0, 3)
