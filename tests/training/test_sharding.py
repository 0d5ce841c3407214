"""Runs on several devices, and whose sequences are split over them."""

import re
from types import SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import many_calls
import numpy as np
import pytest
from flax import nnx
from run_helpers import STEPS, losses, steps_and_losses, trainer, use_one_device

from lra_jax import evaluate
from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import get_preset
from lra_jax.kernels import selection
from lra_jax.kernels.cpu import library, programs
from lra_jax.tasks import get_task, language
from lra_jax.training import fit, sharding
from lra_jax.training.console import RunConsole
from lra_jax.training.loop import Interrupted
from lra_jax.training.restore import load_run
from lra_jax.training.session import Session

SPLIT = {"seq_devices": 2, "steps": 12, "eval_every": 6, "log_every": 2, "warmup": 2}


@pytest.mark.slow
def test_a_run_with_split_sequences(data_dir, tmp_path) -> None:
    """The same losses as with whole ones; is loaded, goes on, and is scored, with
    whole ones."""
    runs = {}
    for name, change in (("split", {}), ("whole", {"seq_devices": 1})):
        # A table of positions meets split sequences, and must stay whole. The split
        # ones are padded to 62 positions, and dropout must not notice.
        config = helpers.tiny(
            *(data_dir, tmp_path / name),
            model={"positions": "learned", "dropout": 0.1},
            data={"buckets": "61"},
            train=SPLIT | change,
        )
        if name == "split":  # On to the end with whole sequences.
            with Session(config, quiet=True) as session:
                assert session.trainer.mesh.shape == {"data": 1, "seq": 2}
                session.console = helpers.Closed(12, quiet=True)
                with pytest.raises(Interrupted):
                    session.run()
            saved = load_run(str(tmp_path / "split"))
            sums = saved.run(saved.examples([0]))
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(sums))
        goes_on = config.replace(train={"seq_devices": 1})
        with Session(goes_on, quiet=True) as session:
            assert session.trainer.mesh.shape == {"data": 2, "seq": 1}
            runs[name] = session.run()
            for x in jax.tree.leaves(session.trainer.state):
                assert x.sharding.is_fully_replicated
    split, whole = (steps_and_losses(tmp_path / name) for name in ("split", "whole"))
    assert [line[:2] for line in split] == [line[:2] for line in whole]
    np.testing.assert_allclose(
        [line[2] for line in split], [line[2] for line in whole], rtol=1e-5
    )
    scored = evaluate.run(evaluate.EvaluateConfig(str(tmp_path / "split")))
    assert scored["loss"] == pytest.approx(runs["split"].test_loss_best, rel=1e-6)


@pytest.mark.skipif(library.problem() is not None, reason=f"{library.problem()}")
def test_kernels_split_the_batch(data_dir, tmp_path, monkeypatch) -> None:
    """A run on two devices takes kernels by itself, each device for half a batch."""
    shapes = []
    monkeypatch.setattr(selection, "_CPU_POSITIONS", 1)
    plain = programs.call

    def call(name, shapes_of_results, *arguments, **more):
        shapes.append(shapes_of_results[0])
        return plain(name, shapes_of_results, *arguments, **more)

    monkeypatch.setattr(programs, "call", call)
    runs = []
    for name in ("auto", "xla"):
        config = helpers.tiny(
            *(data_dir, tmp_path / name),
            model={"attention_options": f"implementation={name}"},
            train={"steps": 6, "eval_every": 3, "log_every": 1},
        )
        taken = len(shapes)
        with Session(config, quiet=True) as session:
            session.run()
        assert bool(len(shapes) > taken) == (name == "auto")
        runs.append(steps_and_losses(tmp_path / name))
    sizes = {config.train.batch_size, config.train.eval_batch_size}
    assert {shape[0] for shape in shapes} == {size // 2 for size in sizes}
    np.testing.assert_allclose(
        *([line[2] for line in lines] for lines in runs), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "softmax"}, r"linear, cosformer, flow.*got 'softmax'"),
        ({"model": {"padding": "zeros"}}, "--model.padding: .* got zeros"),
        ({"train": {"seq_devices": 0}}, "--train.seq_devices: .* got 0"),
        ({"process_id": 1}, "--distributed: expected True with --process_id"),
    ],
)
def test_what_cannot_be_split(data_dir, changes, message) -> None:
    changes = {**changes, "train": {"seq_devices": 2} | changes.get("train", {})}
    config = helpers.tiny(data_dir, **changes)
    with pytest.raises(ValueError, match=message):
        get_task("listops").check(config)


def test_devices_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"seq_devices: expected a divisor .*got 3"):
        sharding.make_mesh((8,), 3)


def test_a_bucket_that_padding_makes_too_long(data_dir, tmp_path) -> None:
    config = helpers.tiny(
        data_dir,
        tmp_path / "run",
        train={"seq_devices": 2},
        model={"max_length": 59},
        data={"buckets": "32,59", "max_length": 59},
    )
    with (
        pytest.raises(ValueError, match=r"expected at least 60.*seq_devices=2, got 59"),
        Session(config, quiet=True),
    ):
        pass


def test_devices_that_are_not_aligned_with_their_rows() -> None:
    """Four hosts of three devices, sequences over two: all of them have to stop."""
    devices = np.array([SimpleNamespace(process_index=i // 3) for i in range(12)])
    mesh: Any = SimpleNamespace(devices=devices.reshape(6, 2), shape={"data": 6})
    with pytest.raises(
        ValueError, match=r"^--train.seq_devices: .* rows \[1, 2\] of 6"
    ):
        sharding.data_shard.__wrapped__(mesh)  # A mesh can be hashed.


def test_a_batch_is_padded_to_what_the_devices_divide() -> None:
    mesh = sharding.make_mesh((2,), 2)
    rows = np.arange(10, dtype=np.uint8).reshape(2, 5) + 1
    batch = sharding.shard_batch(mesh, {"tokens": rows, "labels": np.arange(2)})
    assert sharding.data_shard(mesh) == (0, 1)
    assert batch["tokens"].shape == (2, 6)
    parts = [np.asarray(x.data) for x in batch["tokens"].addressable_shards]
    np.testing.assert_array_equal(np.concatenate(parts, 1)[:, :5], rows)
    assert [part.shape for part in parts] == [(2, 3), (2, 3)]
    assert not np.asarray(batch["tokens"])[:, 5].any()
    np.testing.assert_array_equal(np.asarray(batch["labels"]), [0, 1])


def test_what_a_split_sequence_cannot_have() -> None:
    arrays = [jnp.ones((2, 6, 1, 4))] * 3
    mesh = sharding.make_mesh((2,), 2)
    attend = sequence_parallel("linear", mesh=mesh).attention
    for forced in ("pallas", "native"):
        with pytest.raises(ValueError, match=rf"implementation: .*got '{forced}'"):
            attend(*arrays, implementation=forced)
    with pytest.raises(ValueError, match=r"query_mask: expected a keyword of linear"):
        attend(*arrays, query_mask=jnp.ones((2, 6), bool))
    with pytest.raises(ValueError, match=r"key: expected the query's length T=6"):
        attend(arrays[0], *(x[:, :4] for x in arrays[1:]))
    with pytest.raises(ValueError, match=r"length T a multiple of the 2 .*\(2, 5"):
        attend(*(x[:, :5] for x in arrays))
    with pytest.raises(ValueError, match=r"mesh: expected one with the axis 'seq'"):
        sequence_parallel("linear").attention(*arrays)
    attend = sequence_parallel("flow", mesh=mesh).attention
    with pytest.raises(ValueError, match=r"is_causal: expected False.*no causal form"):
        attend(*arrays, is_causal=True)


# Whatever depends on the batch stays on the device that holds the sample.
EXCHANGES = re.compile(r" (all-gather|all-to-all|collective-permute)(-start)?\(")


@pytest.mark.parametrize(
    ("task", "attention", "model"),
    [
        ("listops", "linear", {"short_conv": 3}),
        ("listops", "linear", {"mlp": "product_key"}),
        ("listops", "fnet", {}),
        ("lm", "linear", {}),
    ],
    ids=["convolution", "product keys", "Fourier transform", "vocabulary in parts"],
)
def test_devices_exchange_only_gradients(task, attention, model, monkeypatch) -> None:
    monkeypatch.setattr(language, "_LARGE", 10)
    config = get_preset(task, attention=attention).replace(model=helpers.MODEL | model)
    batch = {
        "tokens": np.ones((8, 64), "int32"),
        "lengths": np.full(8, 50, "int32"),
        "labels": np.ones(8, "int32"),
    }
    if task == "lm":
        batch |= dict.fromkeys(("segment_ids", "labels"), batch["tokens"])
    dataset = SimpleNamespace(vocab_size=20, num_classes=10, max_length=64, raw={})
    dataset.image_shape = None
    model = get_task(task).make_model(config, dataset, nnx.Rngs(0))
    graph, params = nnx.split(model)

    def loss(params, batch) -> jax.Array:
        return get_task(task).loss(nnx.merge(graph, params), batch)["loss"]

    mesh = sharding.make_mesh((8,))
    assert mesh.size == 2
    with jax.set_mesh(mesh):
        step = helpers.quick_jit(
            jax.grad(loss), out_shardings=sharding.replicated_sharding(mesh)
        ).lower(sharding.replicate(mesh, params), sharding.shard_batch(mesh, batch))
        assert not EXCHANGES.findall(step.compile().as_text())


def test_calls_on_several_devices_never_wait_for_each_other() -> None:
    """Without a wait, XLA aborts: programs of one device occupy all threads."""
    flags = "--xla_cpu_collective_call_terminate_timeout_seconds=20"
    devices = 8
    ended = helpers.run(many_calls.__file__, f"{devices}", "100", XLA_FLAGS=flags)
    assert ended.returncode == 0, ended.stderr
    # Rows of a batch are equal: each goes through the same three lines.
    row = np.ones(256)
    for _ in range(6):
        row = np.tanh(row)
        row = row + 1 - row
    total = 100 * 8 * devices * row.sum()
    np.testing.assert_allclose(float(ended.stdout), total, rtol=1e-3)


def test_one_device_gives_the_losses_of_two(finished, dataset, tmp_path, monkeypatch):
    assert finished.trainer.mesh.size == 2
    config = finished.config.replace(train={"eval_every": 20})
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
