"""Tests of recall and state tracking as tasks: small models that solve tiny ones."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import evaluate, runs, train
from lra_jax.configs import get_preset
from lra_jax.data import pipeline
from lra_jax.models import AutoEncoder, TokenClassifier
from lra_jax.reports import exports
from lra_jax.reports.runs import group_runs, read_runs
from lra_jax.tasks import get_task
from lra_jax.tasks.base import classification_loss, sum_losses
from lra_jax.training.console import RunConsole
from lra_jax.training.restore import predictions
from lra_jax.training.trainer import Trainer

TRAIN = {"batch_size": 32, "eval_batch_size": 32, "warmup": 10, "log_every": 20}
MODEL = {"num_layers": 1, "embed_dim": 16, "qkv_dim": 16, "num_heads": 1}
SHORT = {
    **{"min_length": 3, "max_length": 6, "test_min": 8, "test_max": 12},
    **{"parts": "6,12", "num_train": 400, "num_valid": 40, "num_test": 60},
}


def tiny(task, attention, workdir, *, data, model=None, **settings):
    """A run of seconds."""
    return get_preset(task, "quick", attention).replace(
        workdir=str(workdir),
        train=TRAIN | settings,
        model=MODEL | {"mlp_dim": 16} | (model or {}),
        data={"buckets": "auto"} | data,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("beta_range", "solves"), [(1, False), (2, True)])
def test_parity_needs_negative_eigenvalues(tmp_path, beta_range, solves):
    """Beyond the lengths of training, where no string was learnt by heart."""
    model = {"short_conv": 0, "attention_options": f"beta_range={beta_range}"}
    times = {"steps": 200, "eval_every": 200, "learning_rate": 1e-2}
    result = train.run(
        tiny("parity", "delta", tmp_path, data=SHORT, model=model, **times), quiet=True
    )
    assert set(result["test_accuracy_by_length"]) == {"6", "12"}
    assert result["chance"] == 50.0 and result["state_size"] == 16 * 16
    accuracy = result["test_accuracy_best"]
    assert result["test_scaled_accuracy"] == pytest.approx((accuracy - 50) / 50)
    assert (accuracy > 95) is solves, result
    assert accuracy < 80 or solves


@pytest.mark.parametrize("preset", ["official", "figure2"])
def test_zoology_decays_every_array(preset):
    """Its TrainConfig.weight_decay, given to AdamW with all of a model's parameters."""
    config = get_preset("mqar", preset, "softmax").train
    assert (config.weight_decay, config.decay_vectors) == (0.1, True)


@pytest.mark.core
def test_a_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    """On data that are drawn anew."""
    data = {
        **{"train": "16/2:64", "test": "16/2:20,16/3:20", "num_valid": 10},
        **{"vocab_size": 300, "noise": True},
    }
    model = {"max_length": 16, "is_causal": False, "positions": "learned"}
    times = {"steps": 12, "eval_every": 4, "batch_size": 16, "log_every": 4}

    config = tiny("mqar", "linear", tmp_path / "run", data=data, model=model, **times)
    whole = train.run(config, quiet=True)
    session = helpers.resume(config, 8)
    cut, again = str(session.workdir), session.run().to_dict()
    for name in ("test_loss_best", "test_loss_last", "test_accuracy_by_length"):
        assert again[name] == whole[name]
    assert set(again["test_accuracy_by_length"]) == {"16/2", "16/3"}
    scored = evaluate.run(evaluate.EvaluateConfig(workdir=cut))
    assert scored["accuracy"] == pytest.approx(whole["test_accuracy_best"])
    parts = whole["test_accuracy_by_length"]
    place = {"workdir": cut}
    scored = evaluate.run(evaluate.EvaluateConfig(**place, split="16/3"))
    assert (scored["accuracy"], scored["examples"]) == (parts["16/3"], 20)
    with pytest.raises(ValueError, match=r"--split: expected one of .*, 16/3, got"):
        evaluate.run(evaluate.EvaluateConfig(**place, split="16"))
    assert "state_size" not in whole


def test_the_score_of_a_test_by_parts_is_their_mean(tmp_path, capsys):
    config = tiny(
        "needle",
        "linear",
        tmp_path,
        data={
            **{"num_train": 64, "num_valid": 8, "num_test": 40},
            **{"min_length": 16, "max_length": 32, "parts": "32,64"},
        },
        **{"steps": 4, "warmup": 1, "eval_every": 4},
    )
    result = train.run(config)
    said = " ".join(capsys.readouterr().out.split())
    mean = np.mean([*result["test_accuracy_by_length"].values()])
    assert result["test_accuracy_best"] != pytest.approx(mean)
    scaled = (mean - result["chance"]) / (100 - result["chance"])
    assert result["test_scaled_accuracy"] == pytest.approx(scaled)
    assert f"the mean over the parts is {100 * scaled:.1f} % of the way" in said
    (line,) = runs.summarise({"linear": group_runs(read_runs(tmp_path)[0])[0]})
    assert f"mean over the parts, best checkpoint {mean:.2f} %" in line
    groups = group_runs(read_runs(tmp_path)[0])
    (row,) = exports.rows(groups)
    assert row["mean_over_parts"] == pytest.approx(mean)
    assert f"${mean:.2f}$ (mean over its parts)" in exports.to_latex(groups)


@pytest.mark.parametrize("kind", [TokenClassifier, AutoEncoder])
def test_padding_and_other_positions_change_nothing(kind):
    sizes = {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "mlp_dim": 8}
    more = {"max_length": 12, "is_causal": True, "short_conv": 3, "dropout": 0.0}
    model = kind(
        5, 4, mechanism="delta", positions="none", rngs=nnx.Rngs(0), **sizes, **more
    )
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 5)
    lengths = jnp.array([7, 12])
    every = helpers.call_model(_all, model, tokens, lengths)
    assert every.shape == (2, 12, 4) and every.dtype == jnp.float32
    places = jnp.array([[6, 0, 2], [11, 3, 0]])
    some = helpers.call_model(_some, model, tokens, lengths, places)
    rows = np.take_along_axis(np.asarray(every), np.asarray(places)[:, :, None], 1)
    np.testing.assert_allclose(some, rows, atol=1e-5)
    alone = helpers.call_model(_all, model, tokens[:1, :7], lengths[:1])
    np.testing.assert_allclose(alone[0], every[0, :7], atol=1e-5)
    if kind is TokenClassifier:  # A decoder does not look ahead.
        changed = tokens.at[:, 5].set((tokens[:, 5] + 1) % 5)
        other = helpers.call_model(_all, model, changed, lengths)
        np.testing.assert_allclose(other[:, :5], every[:, :5], atol=1e-5)
        assert np.abs(np.asarray(other - every)[:, 5:7]).max() > 1e-3


def test_an_auto_encoder_has_one_sequence_a_row():
    sizes = {"embed_dim": 8, "num_heads": 2, "num_layers": 1, "mlp_dim": 8}
    model = AutoEncoder(5, 4, mechanism="linear", rngs=nnx.Rngs(0), **sizes)
    ids = jnp.array([[1, 1, 2, 2]])
    with pytest.raises(ValueError, match=r"^segment_ids: expected None"):
        model(ids, segment_ids=ids)


def _all(model, tokens, lengths):
    return model(tokens, lengths)


def _some(model, tokens, lengths, places):
    return model(tokens, lengths, places)


def test_the_loss_counts_each_target_once():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 4))
    batch = {
        "tokens": jnp.zeros((2, 5), jnp.int32),
        "lengths": jnp.full((2,), 5),
        "positions": jnp.array([[0, 4, 0], [1, 2, 3]]),
        "labels": jnp.array([[1, 3, -1], [0, 0, 2]]),
        "weights": jnp.array([1.0, 0.0]),
    }
    model = lambda tokens, lengths, positions, rngs: logits  # noqa: E731
    model.INPUTS = ("tokens", "lengths", "positions")  # pyright: ignore
    expected = -np.asarray(jax.nn.log_softmax(logits))[0, [0, 1], [1, 3]].sum()
    sums = classification_loss(model, batch)  # pyright: ignore[reportArgumentType]
    assert sums["loss"] == pytest.approx(expected, rel=1e-5) and sums["count"] == 2
    del batch["weights"]
    assert classification_loss(model, batch)["count"] == 5  # pyright: ignore


def test_smoothed_labels_by_hand():
    """0.3 of each label is spread over its 4 classes: ``0.7 - log p + 0.3 mean``."""
    logits = jax.random.normal(jax.random.key(0), (2, 3, 4))
    labels = jnp.array([[1, 3, -1], [0, -1, -1]])
    logs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    rows, places, classes = [0, 0, 1], [0, 1, 0], [1, 3, 0]
    plain = -logs[rows, places, classes]
    expected = 0.7 * plain - 0.3 * logs[rows, places].mean(-1)
    sums = sum_losses(logits, labels, {}, label_smoothing=0.3)
    assert sums["loss"] == pytest.approx(expected.sum(), rel=1e-5)
    assert sums["count"] == 3
    assert sum_losses(logits, labels, {})["loss"] == pytest.approx(plain.sum(), 1e-5)


def test_predictions_are_those_that_were_counted(tmp_path):
    """Of 4,000 classes many have the same probability to six digits."""
    data = {"train": "16/2:8", "test": "16/4:40", "num_valid": 8, "vocab_size": 4000}
    config = tiny("mqar", "linear", tmp_path, data=data)
    task = get_task("mqar")
    dataset = task.prepare(config.data)
    trainer = Trainer(config, task, dataset, tmp_path, training=False)
    params = jax.tree.map(lambda x: x * 0.01, trainer.state.params)
    batches = pipeline.EvalBatches(dataset, "test", trainer.buckets, 32)
    model: Any = trainer.model_at(params)
    expected = [
        np.argmax(helpers.call_model(type(model).__call__, model, *arrays), -1)
        for arrays in ([x[name] for name in model.INPUTS] for x in batches)
    ]
    lines = predictions(trainer, params, "test", RunConsole(0, quiet=True))
    shown = [line["prediction"] for line in lines]
    assert shown == np.concatenate(expected)[:40].tolist()


def test_a_part_that_the_model_cannot_take_is_found_before_training(tmp_path):
    config = tiny("parity", "linear", tmp_path, data=SHORT | {"parts": "6,300"})
    expected = "^--model.max_length: expected at least 299, .* got 128"
    with pytest.raises(ValueError, match=expected):
        train.run(config, quiet=True)


@pytest.mark.parametrize(
    ("task", "attention", "changes", "message"),
    [
        ("mqar", "linformer", {}, "--attention: expected one with a causal form"),
        ("parity", "flow", {"train": {"length_warmup": "8:0.5"}}, "cut off"),
        ("parity", "linear", {"train": {"seq_devices": 2}}, "--train.seq_devices"),
        ("parity", "linear", {"pretrain": {"steps": 2}}, "--pretrain.steps: .* 0 "),
        ("mqar", "flow", {"data": {"vocab_size": 0}}, "--data.vocab_size: .* got 0"),
    ],
)
def test_settings_that_cannot_work(task, attention, changes, message):
    config = get_preset(task, None, attention).replace(**changes)
    with pytest.raises(ValueError, match=message):
        get_task(task).check(config)
