"""The trainer: programs, scores, and what is trained and kept."""

from typing import Any

import helpers
import jax
import numpy as np
import pytest
from flax import nnx
from run_helpers import losses, reference_means, trainer, use_one_device

from lra_jax.attention import registry
from lra_jax.models import Buffer
from lra_jax.models.norms import RunningMean
from lra_jax.training import fit, sharding
from lra_jax.training.console import RunConsole
from lra_jax.training.step import zero_sums


def test_one_compilation_for_each_bucket(finished, dataset, tmp_path):
    """A further one, which would cost time in silence, is an error."""
    assert finished.trainer.buckets == (32, 60)
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


@pytest.mark.parametrize("batch_size", [16, 9, 64])
def test_evaluation_counts_every_example_once(finished, dataset, tmp_path, batch_size):
    # 45 examples of two lengths: 9 may divide, 16 cannot, 64 is more than there are.
    config = finished.config.replace(train={"eval_batch_size": batch_size})
    other = trainer(config, dataset, tmp_path)
    params = sharding.replicate(
        other.mesh, jax.device_get(finished.trainer.state.params)
    )
    means = other.evaluate(params, "test")
    other.checkpoints.close()
    assert means == pytest.approx(reference_means(finished.trainer, "test"), rel=1e-5)
    # Accuracy is a whole number of the 45.
    assert means["accuracy"] * 45 == pytest.approx(round(means["accuracy"] * 45))


def test_sequences_grow_in_training_alone(data_dir, dataset, tmp_path):
    config = helpers.tiny(data_dir, train={"steps": 6, "length_warmup": "8:0.5"})
    made = trainer(config, dataset, tmp_path)
    widths = [next(made.data)["tokens"].shape[1] for _ in range(6)]
    assert widths == [8] * 3 + [60] * 3
    whole = made.evaluate(made.state.params, "valid")
    other = helpers.tiny(data_dir, train={"steps": 6, "length_warmup": ""})
    again = trainer(other, dataset, tmp_path)
    assert again.evaluate(again.state.params, "valid") == whole


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
    assert step.__wrapped__._cache_size() == 1, "one compilation for each bucket"
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


def test_packed_rows_train_as_single_ones_do(dataset, data_dir, tmp_path):
    """The same losses, in training and validation; on two devices, in rows of 60."""
    settings = {"steps": 12, "eval_every": 12}
    model = {"dropout": 0.0, "pooling": "mean", "positions": "learned"}
    reports = []
    for packing in (False, True):
        rows = {"packing": packing}
        config = helpers.tiny(data_dir, train=settings, model=model, data=rows)
        workdir = tmp_path / str(packing)
        made = trainer(config, dataset, workdir)
        fit(made, RunConsole(12, quiet=True))
        made.checkpoints.close()
        reports.append([*losses(workdir), *losses(workdir, "valid")])
    assert len(reports[0]) > 3
    np.testing.assert_allclose(*reports, rtol=1e-4)
