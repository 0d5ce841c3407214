"""Training and evaluation: devices, compilations, counting, metrics, checkpoints."""

import json
import shutil
import types
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from flax import nnx

from lra_jax import evaluate, tasks
from lra_jax.attention import registry
from lra_jax.models import Buffer
from lra_jax.models.batch_norm import RunningMean
from lra_jax.training import Trainer, fit, meter, sharding
from lra_jax.training.checkpoints import Progress
from lra_jax.training.console import RunConsole
from lra_jax.training.metrics import read_metrics
from lra_jax.training.restore import load_run
from lra_jax.training.step import zero_sums
from lra_jax.training.workdir import check_space, read_config

STEPS = helpers.TRAIN["steps"]


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


def test_one_device_gives_the_losses_of_two(
    finished, dataset, data_dir, tmp_path, monkeypatch
):
    assert finished.trainer.mesh.size == 2
    config = helpers.tiny(data_dir, train={"eval_every": 20})
    use_one_device(monkeypatch)
    single = trainer(config, dataset, tmp_path)
    fit(single, RunConsole(STEPS, quiet=True))
    single.checkpoints.close()
    assert jax.tree.leaves(single.state)[0].sharding.mesh.size == 1
    np.testing.assert_allclose(losses(tmp_path), losses(finished.workdir), rtol=1e-4)


def test_the_mesh_takes_the_devices_that_divide_the_batches():
    assert sharding.make_mesh((8, 16)).size == 2
    assert sharding.make_mesh((8, 15)).size == 1
    assert sharding.make_mesh((8,)).axis_names == ("data", "seq")


def test_batches_are_split_over_the_devices(finished):
    batch = {"labels": np.arange(8, dtype=np.int32)}
    shards = sharding.shard_batch(finished.trainer.mesh, batch)["labels"]
    held = [np.asarray(s.data).tolist() for s in shards.addressable_shards]
    assert held == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_one_compilation_for_each_bucket(finished):
    assert finished.trainer.buckets == (32, 60)
    assert finished.programs == (2, 2)


def test_a_shape_that_is_not_a_buckets_is_refused(finished, dataset, tmp_path):
    """Each would cost a compilation in silence; other runs do not count."""
    made = trainer(finished.config, dataset, tmp_path)
    sums = sharding.replicate(made.mesh, zero_sums())

    def batch(width: int):
        arrays = {
            "tokens": np.ones((8, width), np.uint8),
            "lengths": np.full(8, 5, np.int32),
            "labels": np.zeros(8, np.int32),
        }
        return sharding.shard_batch(made.mesh, arrays)

    for width in (32, 60, 32):
        made.state = made.train_step(made.state, batch(width))
        sums = made.eval_step(made.state.params, sums, batch(width))
    with pytest.raises(AssertionError, match="'train_step' is traced > 2 times"):
        made.train_step(made.state, batch(33))
    with pytest.raises(AssertionError, match="'eval_step' is traced > 2 times"):
        made.eval_step(made.state.params, sums, batch(33))
    made.checkpoints.close()


def test_training_learns(data_dir, dataset, tmp_path):
    """The loss falls below that of the best guess, on examples seen again and again."""
    config = helpers.tiny(
        data_dir,
        train={"steps": 150, "learning_rate": 0.01, "eval_every": 150},
        model={"dropout": 0.0},
        data={"num_train": 16, "num_valid": 8, "num_test": 8, "buckets": "60"},
    )
    small = tasks.get_task("listops").prepare(config.data)
    learner = trainer(config, small, tmp_path)
    fit(learner, RunConsole(150, quiet=True))
    learner.checkpoints.close()
    assert losses(tmp_path)[0] > 2
    assert losses(tmp_path)[-1] < 0.5


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


@pytest.mark.parametrize("batch_size", [16, 9, 64])
def test_evaluation_counts_every_example_once(
    finished, dataset, data_dir, tmp_path, batch_size
):
    # 45 examples in two buckets: 9 may divide, 16 cannot, 64 is more than there are.
    config = helpers.tiny(data_dir, train={"eval_batch_size": batch_size})
    other = trainer(config, dataset, tmp_path)
    params = sharding.replicate(
        other.mesh, jax.device_get(finished.trainer.state.params)
    )
    means = other.evaluate(params, "test")
    other.checkpoints.close()
    assert means == pytest.approx(reference_means(finished.trainer, "test"), rel=1e-5)
    # Accuracy is a whole number of the 45.
    assert means["accuracy"] * 45 == pytest.approx(round(means["accuracy"] * 45))


def test_metrics(finished):
    lines = read_metrics(finished.workdir)
    assert [x["step"] for x in lines if x["split"] == "train"] == [*range(4, 41, 4)]
    assert [x["step"] for x in lines if x["split"] == "valid"] == [10, 20, 30, 40]
    measures = {"step", "split", "loss", "accuracy", "seconds"}
    for line in lines:
        optional = {
            "learning_rate",
            "steps_per_second",
            "loss_max",
            "warm",
            "data_wait",
        }
        assert set(line) - optional == measures
        assert 0 < line["loss"] < 10 and 0 <= line["accuracy"] <= 1
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[0] > 0
    train = [line for line in lines if line["split"] == "train"]
    schedule = finished.trainer.schedule
    for line in train:
        assert line["learning_rate"] == pytest.approx(float(schedule(line["step"] - 1)))
        assert line["steps_per_second"] > 0
        assert 0 <= line["data_wait"] < 1
        # Of four steps; the report before the first of them is another one.
        assert line["loss"] <= line["loss_max"] < 4 * line["loss"]
    # 32 examples went into each line, so accuracies are whole 32ths.
    assert all((32 * line["accuracy"]).is_integer() for line in train)


def test_the_speed_leaves_out_reports_and_checks(
    data_dir, dataset, tmp_path, monkeypatch
):
    """By a clock that goes on by 1 in a step, and by 100 beside the steps."""
    now = [0.0]
    monkeypatch.setattr(
        meter, "time", types.SimpleNamespace(perf_counter=lambda: now[0])
    )

    def lasting(name: str, seconds: float) -> None:
        done = getattr(Trainer, name)

        def slow(self, *args: Any, **keywords: Any) -> Any:
            now[0] += seconds
            return done(self, *args, **keywords)

        monkeypatch.setattr(Trainer, name, slow)

    lasting("advance", 1)
    for name in ("take_sums", "check_finite", "evaluate"):
        lasting(name, 100)
    run = trainer(helpers.tiny(data_dir), dataset, tmp_path)
    fit(run, RunConsole(STEPS, quiet=True))
    run.checkpoints.close()
    train = [line for line in read_metrics(tmp_path) if line["split"] == "train"]
    assert {line["steps_per_second"] for line in train} == {1.0}
    assert train[-1]["seconds"] > 1000


def test_result(finished):
    result = json.loads((finished.workdir / "result.json").read_text())
    assert result.pop("seal")
    assert result == finished.result.to_dict()
    valid = [m for m in read_metrics(finished.workdir) if m["split"] == "valid"]
    assert result["best_by"] == finished.config.train.best_by == "loss"
    best = min(valid, key=lambda m: m["loss"])
    assert result["best_step"] == best["step"]
    assert result["valid_accuracy_best"] == pytest.approx(100 * best["accuracy"])
    last = reference_means(finished.trainer, "test")
    assert result["test_accuracy_last"] == pytest.approx(100 * last["accuracy"])
    assert result["test_loss_last"] == pytest.approx(last["loss"], rel=1e-5)
    assert result["test_examples"] == 45 and result["steps"] == STEPS
    params = jax.tree.leaves(finished.trainer.state.params)
    assert result["parameters"] == sum(x.size for x in params)
    assert result["data_fingerprint"] == finished.dataset.fingerprint
    assert result["versions"]["jax"] == jax.__version__


def test_config_file(finished):
    config, fingerprint = read_config(finished.workdir)
    assert config == finished.config
    assert fingerprint == finished.dataset.fingerprint


def test_checkpoints_hold_the_latest_and_the_best(finished, dataset, tmp_path):
    folders = finished.workdir / "checkpoints"
    kept = sorted(p.name for p in (folders / "latest").iterdir())
    assert kept == [str(STEPS - 10), str(STEPS)]
    best_step = finished.result.best_step
    assert [p.name for p in (folders / "best").iterdir()] == [str(best_step)]
    again = trainer(finished.config, dataset, finished.workdir)
    assert again.restore() == STEPS
    helpers.assert_equal_trees(again.state, finished.trainer.state)
    assert again.progress == finished.trainer.progress
    best, _ = again.checkpoints.load_params("best", again.state)
    again.checkpoints.close()
    means = again.evaluate(best, "valid")
    assert 100 * means["accuracy"] == pytest.approx(finished.result.valid_accuracy_best)


@pytest.mark.parametrize("best_by", ["accuracy", "loss"])
def test_the_best_checkpoint_is_best_in_what_was_asked(best_by):
    """Scores of four evaluations: the earliest of equals counts."""
    progress, kept = Progress(), []
    for loss, accuracy in ((2.0, 0.3), (1.8, 0.2), (1.8, 0.3), (1.9, 0.4)):
        means = {"loss": loss, "accuracy": accuracy}
        kept.append(progress.improved(means, best_by))
        if kept[-1]:
            progress = Progress(len(kept), accuracy, loss)
    expected = [True, True, False, False]
    assert kept == (expected if best_by == "loss" else [True, False, False, True])


def test_the_run_keeps_the_checkpoint_of_the_lowest_loss(data_dir, dataset, tmp_path):
    """A rate so high that the last step is not the best."""
    train = {"steps": 6, "warmup": 0, "eval_every": 2, "best_by": "loss"}
    train |= {"schedule": "constant", "learning_rate": 10.0}
    made = trainer(helpers.tiny(data_dir, train=train), dataset, tmp_path)
    fit(made, RunConsole(6, quiet=True))
    made.checkpoints.close()
    lines = [m for m in read_metrics(tmp_path) if m["split"] == "valid"]
    valid = {m["step"]: m["loss"] for m in lines}
    assert list(valid) == [2, 4, 6]
    assert made.progress.best_step == min(valid, key=valid.__getitem__) == 2
    assert made.progress.best_loss == min(valid.values())
    assert made.checkpoints.best_step == made.progress.best_step


def test_sequences_grow_in_training_alone(data_dir, dataset, tmp_path):
    config = helpers.tiny(data_dir, train={"steps": 6, "length_warmup": "8:0.5"})
    made = trainer(config, dataset, tmp_path)
    widths = [next(made.data)["tokens"].shape[1] for _ in range(6)]
    assert widths[:3] == [8] * 3 and min(widths[3:]) == 32
    whole = made.evaluate(made.state.params, "valid")
    other = helpers.tiny(data_dir, train={"steps": 6, "length_warmup": ""})
    again = trainer(other, dataset, tmp_path)
    assert again.evaluate(again.state.params, "valid") == whole


@pytest.mark.parametrize("change", [{"mlp_dim": 32}, {"num_layers": 2}])
def test_a_checkpoint_of_another_model_is_one_line(finished, dataset, data_dir, change):
    other = helpers.tiny(data_dir, model=change)
    again = trainer(other, dataset, finished.workdir)
    expected = r"^checkpoint \S+/\d+: expected \S+ of shape [^\n]+, got [^\n]+$"
    for load in (
        again.restore,
        lambda: again.checkpoints.load_params("best", again.state),
        lambda: again.checkpoints.load_params("last", again.state),
    ):
        with pytest.raises(ValueError, match=expected):
            load()
    again.checkpoints.close()


def test_buffers_are_kept_but_not_trained(dataset, data_dir, tmp_path, monkeypatch):
    """Drawn from the seed; in the checkpoints, since another seed draws others."""
    monkeypatch.setitem(registry.MECHANISMS, "marked", helpers.MARKED)
    steps = {"steps": 8, "warmup": 1, "eval_every": 4, "weight_decay": 0.5}
    config = helpers.tiny(data_dir, attention="marked", train=steps)
    first = trainer(config, dataset, tmp_path)
    drawn = jax.device_get(nnx.filter_state(first.state.params, Buffer))
    params = jax.device_get(nnx.filter_state(first.state.params, nnx.Param))
    assert first.num_parameters == sum(x.size for x in jax.tree.leaves(params))
    kept = {x.shape for x in jax.tree.leaves(first.state.opt_state)}
    assert (2, 8) in {x.shape for x in jax.tree.leaves(drawn)} and (2, 8) not in kept
    fit(first, RunConsole(8, quiet=True))
    step: Any = first.train_step
    assert step.__wrapped__._cache_size() <= 2, "one compilation for each bucket"
    score = first.evaluate(first.state.params, "test")
    first.checkpoints.close()
    after = first.state.params
    helpers.assert_equal_trees(nnx.filter_state(after, Buffer), drawn)
    trained = after["encoder"]["blocks"][0]["attention"]["parameters"]["gain"]
    assert float(trained[...]) != 1
    again = trainer(config.replace(seed=1), dataset, tmp_path)
    assert again.restore() == 8
    helpers.assert_equal_trees(again.state, first.state)
    best, _ = again.checkpoints.load_params("best", again.state)
    helpers.assert_equal_trees(nnx.filter_state(best, Buffer), drawn)
    assert again.evaluate(again.state.params, "test") == score
    again.checkpoints.close()


def test_seeds(finished, dataset, data_dir, tmp_path):
    """Another seed starts elsewhere and sees other batches."""
    states = [
        trainer(helpers.tiny(data_dir, seed=seed), dataset, tmp_path / str(seed))
        for seed in (0, 1)
    ]
    kernels = [s.state.params["logits"]["kernel"][...] for s in states]
    assert np.abs(np.asarray(kernels[0] - kernels[1])).max() > 1e-3
    batches = [next(s.data)["labels"].tolist() for s in states]
    assert batches[0] != batches[1]
    for state in states:
        state.checkpoints.close()


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


def test_space(tmp_path):
    check_space(tmp_path, 1)
    with pytest.raises(ValueError, match=r"1000000000000 MB .* MB that are free"):
        check_space(tmp_path, 10**18)


def test_model_shorter_than_the_data(data_dir, dataset, tmp_path):
    config = helpers.tiny(data_dir, model={"max_length": 59})
    with pytest.raises(ValueError, match=r"max_length: .* at least 60, .* got 59"):
        trainer(config, dataset, tmp_path)


def test_batch_norms_keep_running_means(dataset, data_dir, tmp_path, monkeypatch):
    """One device gives those of two, whose batch is one; a resumed run goes on."""
    # Gradients that a batch norm cancels are rounding, which Adam would blow up.
    steps = {"steps": 8, "warmup": 1, "eval_every": 4, "adam_eps": 1e-3}
    model = {"norm": "batch", "input_dropout": 0.0}
    config = helpers.tiny(data_dir, train=steps, model=model)
    first = trainer(config, dataset, tmp_path / "two")
    assert first.mesh.size == 2
    drawn = jax.device_get(nnx.filter_state(first.state.params, RunningMean))
    fit(first, RunConsole(8, quiet=True))
    score = first.evaluate(first.state.params, "test")
    first.checkpoints.close()
    means = jax.device_get(nnx.filter_state(first.state.params, RunningMean))
    pairs = zip(jax.tree.leaves(drawn), jax.tree.leaves(means), strict=True)
    assert all((old != new).any() for old, new in pairs)
    again = trainer(config.replace(seed=1), dataset, tmp_path / "two")
    assert again.restore() == 8
    helpers.assert_equal_trees(again.state, first.state)
    assert again.evaluate(again.state.params, "test") == score
    again.checkpoints.close()

    use_one_device(monkeypatch)
    single = trainer(config, dataset, tmp_path / "one")
    fit(single, RunConsole(8, quiet=True))
    single.checkpoints.close()
    alone = nnx.filter_state(single.state.params, RunningMean)
    for one, two in zip(jax.tree.leaves(alone), jax.tree.leaves(means), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)
