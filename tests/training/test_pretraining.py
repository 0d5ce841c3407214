"""Pretraining: hidden tokens or the values of operators, then labels, in one run."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra_jax import tasks
from lra_jax.configs.base import PretrainConfig
from lra_jax.data import pipeline
from lra_jax.data.listops_language import CLOSE, MIN
from lra_jax.models import MatchingClassifier, SequenceClassifier, saved
from lra_jax.tasks.reconstruction import reconstruction_loss
from lra_jax.training import Interrupted, fit
from lra_jax.training.metrics import read_metrics
from lra_jax.training.optimizer import make_schedule
from lra_jax.training.session import Session

SIZES = {
    "num_layers": 1,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "max_length": 8,
    "mechanism": "cosformer",
}


def _sums(model, batch, rate=0.5) -> dict[str, float]:
    sums = reconstruction_loss(model, batch, nnx.Rngs(dropout=4), mask_rate=rate)
    return {name: float(value) for name, value in sums.items()}


def _batch(suffix: str = "") -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        f"tokens{suffix}": jnp.asarray(rng.integers(0, 5, (3, 8)), jnp.uint8),
        f"lengths{suffix}": jnp.array([8, 3, 5]),
    }


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_hidden_tokens_and_padding_are_not_seen(pooling) -> None:
    """A hidden token has no part in the logits; one that is shown has."""
    settings = {"pooling": pooling, "reconstructs": True}
    model = SequenceClassifier(5, 2, **settings, **SIZES, rngs=nnx.Rngs(0))
    tokens, lengths = _batch()["tokens"], _batch()["lengths"]
    hidden = jnp.zeros((3, 8), bool).at[:, 1].set(True)

    def logits(at: int) -> jax.Array:
        changed = tokens.at[:, at].set((tokens[:, at] + 1) % 5)
        return model.reconstructed(changed, lengths, hidden)[1, :3]

    plain = model.reconstructed(tokens, lengths, hidden)[1, :3]
    np.testing.assert_array_equal(logits(1), plain)
    np.testing.assert_array_equal(logits(3), plain)
    assert np.abs(np.asarray(logits(0) - plain)).max() > 1e-3


def test_only_real_hidden_tokens_count() -> None:
    model = SequenceClassifier(5, 2, reconstructs=True, **SIZES, rngs=nnx.Rngs(0))
    batch = _batch()
    sums = _sums(model, batch, rate=0.999)
    assert sums["count"] == 16
    # Of equal logits at first, near the entropy of five tokens.
    assert sums["loss"] / 16 == pytest.approx(np.log(5), rel=0.3)
    beyond = jnp.arange(8)[None] >= batch["lengths"][:, None]
    noise = jnp.where(beyond, jnp.uint8(4), batch["tokens"])
    assert _sums(model, batch | {"tokens": noise}) == pytest.approx(_sums(model, batch))


def test_both_sequences_of_a_pair_count() -> None:
    model = MatchingClassifier(5, 2, reconstructs=True, **SIZES, rngs=nnx.Rngs(0))
    assert _sums(model, _batch("_1") | _batch("_2"), rate=0.999)["count"] == 32


def test_a_model_without_the_vector_says_so() -> None:
    model = SequenceClassifier(5, 2, **SIZES, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="hidden: expected None without reconstructs"):
        _sums(model, _batch())


def test_each_part_has_a_schedule_of_its_own() -> None:
    train = helpers.tiny("").train
    half = train.steps // 2

    def rates(**settings) -> list[float]:
        parts = make_schedule(train, PretrainConfig(steps=half, **settings))
        return [float(parts(step)) for step in range(train.steps)]

    same = rates()
    assert same[:half] == pytest.approx(same[half:])
    assert same[half] == 0 < max(same)
    own = rates(learning_rate=3 * train.learning_rate)
    assert own[:half] == pytest.approx([3 * rate for rate in same[:half]])
    assert own[half:] == same[half:]


def test_one_run_interrupted_and_resumed(data_dir, tmp_path) -> None:
    """In its first part; the same bits as a run that nothing stopped."""
    settings = {
        "train": {"steps": 20, "eval_every": 5, "log_every": 5, "warmup": 2},
        "pretrain": {"steps": 10},
        "data": helpers.ONE_LENGTH,
    }
    config = helpers.tiny(data_dir, tmp_path / "whole", **settings)
    with Session(config, quiet=True) as whole:
        result = whole.run()
    lines = read_metrics(tmp_path / "whole")
    kinds = [(line["step"], line["split"]) for line in lines]
    assert kinds == [
        (5, "pretrain"),
        (10, "pretrain"),
        *((step, split) for step in (15, 20) for split in ("train", "valid")),
    ]
    again = config.replace(workdir=str(tmp_path / "again"))
    with Session(again, quiet=True) as first, pytest.raises(Interrupted):
        fit(first.trainer, helpers.Closed(20, quiet=True))
    with Session(again, quiet=True) as second:
        assert second.console.start == 7
        assert second.run()["test_loss_last"] == result["test_loss_last"]


@pytest.mark.parametrize(("share", "where"), [(0.5, ", all in pretraining"), (1, "")])
def test_beginnings_that_are_over_before_the_labels_are_said(
    data_dir, share: float, where: str
) -> None:
    train = {"steps": 20, "warmup": 2, "length_warmup": f"8:{share}"}
    config = helpers.tiny(data_dir, train=train, pretrain={"steps": 10})
    with Session(config, quiet=True, dry=True) as session:
        assert f"beginnings first (8:{share}{where})" in session._facts()["training"]


@pytest.mark.parametrize(
    ("target", "taught"),
    [("values", range(MIN, CLOSE + 1)), ("running_values", range(1, CLOSE + 1))],
)
def test_values_are_learned_where_they_are(
    data_dir, tmp_path, target: str, taught: range
) -> None:
    """Targets come with the batches of pretraining, of packed rows too."""
    for packing in (False, True):
        config = helpers.tiny(
            data_dir,
            tmp_path / str(packing),
            train={"steps": 6, "eval_every": 6, "log_every": 3, "warmup": 1},
            pretrain={"steps": 3, "target": target, "learning_rate": 1e-3},
            data={"packing": packing},
        )
        with Session(config, quiet=True) as session:
            first, *_, last = list(session.trainer.data)
            assert "targets" not in last
            places = np.isin(first["tokens"], taught)
            np.testing.assert_array_equal(first["targets"] > 0, places)
            sums = reconstruction_loss(
                session.trainer.model_at(session.trainer.state.params),
                {name: jnp.asarray(array) for name, array in first.items()},
                nnx.Rngs(dropout=0),
                mask_rate=0.5,
            )
            assert float(sums["count"]) == places.sum()


def test_notes_are_learned_and_then_read(data_dir, tmp_path) -> None:
    """Batches of pretraining hold notes; the finished model takes its own."""
    config = helpers.tiny(
        data_dir,
        tmp_path,
        train={"steps": 8, "eval_every": 8, "log_every": 4, "warmup": 1},
        pretrain={"steps": 4, "target": "notes", "learning_rate": 1e-3},
        model={"readings": 3},
        data=helpers.ONE_LENGTH,
    )
    with Session(config, quiet=True) as session:
        first, *_, last = list(session.trainer.data)
        assert "notes" not in last
        changes = first["targets"] != first["notes"]
        brackets = first["tokens"] <= CLOSE
        assert ((first["notes"] == 0) | brackets)[changes].all()
        session.trainer.data = iter(())
    again = config.replace(workdir=str(tmp_path / "again"))
    with Session(again, quiet=True) as session:
        session.run()
    lines = read_metrics(tmp_path / "again")
    assert [line["split"] for line in lines] == ["pretrain", "train", "valid"]
    found = saved.load(tmp_path / "again")
    assert found.model.encoder.config.readings == 3
    assert 0 <= found.predict(["[MAX 2 [MIN 3 4 ] ]"]).labels[0] < 10


def _is_adam(part: Any) -> bool:
    return isinstance(part, optax.ScaleByAdamState)


def test_the_head_learns_first(data_dir, tmp_path) -> None:
    """In the steps of probing, the encoder stays as it is; before, the head.

    Adam's moments begin anew with each part.
    """
    config = helpers.tiny(
        data_dir,
        tmp_path,
        train={"steps": 9, "eval_every": 9, "warmup": 0, "weight_decay": 0.1},
        pretrain={"steps": 3, "probe_steps": 3},
        data=helpers.ONE_LENGTH,
    )
    seen, counts = [], []
    with Session(config, quiet=True) as session:
        trainer = session.trainer
        for step, batch in enumerate(trainer.data):
            before = jax.device_get(nnx.to_pure_dict(trainer.state.params))
            trainer.advance(step, batch)
            after = jax.device_get(nnx.to_pure_dict(trainer.state.params))
            changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
            inside = jax.tree.leaves(changed["encoder"])
            rest = changed["tokens"]["kernel"], changed["logits"]["kernel"]
            seen.append((any(inside), *rest))
            found = jax.tree.leaves(trainer.state.opt_state, is_leaf=_is_adam)
            counts += [int(part.count) for part in found if _is_adam(part)]
        assert int(trainer.state.step) == 9
    assert counts == [1, 2, 3] * 3
    assert seen[:3] == [(True, True, False)] * 3
    # Labels do not teach the head that reconstructs, so nothing may move it.
    assert seen[3:] == [(False, False, True)] * 3 + [(True, False, True)] * 3


def test_only_notes_that_change_are_scored() -> None:
    own = {"reconstructs": True, "readings": 2, "dropout": 0.0}
    model = SequenceClassifier(5, 2, **own, **SIZES, rngs=nnx.Rngs(0))
    batch = _batch()
    notes = jnp.zeros((3, 8), jnp.uint8).at[:, 0].set(3)
    targets = notes.at[:, 1].set(2).at[:, 7].set(4)  # 7 is real in one row only.
    batch |= {"notes": notes, "targets": targets}
    sums = _sums(model, batch)
    assert sums["count"] == 3 + 1
    logits = model.reconstructed(batch["tokens"], batch["lengths"], None, notes=notes)
    scores = np.asarray(jax.nn.log_softmax(logits))
    rows, places = np.indices((3, 8))
    losses = -scores[rows, places, np.asarray(targets)]
    real = places < np.asarray(batch["lengths"])[:, None]
    weights = np.where(np.asarray(targets != notes), 1, 0.2) * real
    assert sums["loss"] == pytest.approx(float((losses * weights).sum()), rel=1e-5)


def test_a_batch_in_which_no_note_changes_teaches_nothing() -> None:
    """Of expressions that are cut short, no operator may be complete."""
    own = {"reconstructs": True, "readings": 2, "dropout": 0.0}
    model = SequenceClassifier(5, 2, **own, **SIZES, rngs=nnx.Rngs(0))
    none = jnp.zeros((3, 8), jnp.uint8)
    sums = _sums(model, _batch() | {"notes": none, "targets": none})
    assert sums["loss"] == sums["correct"] == 0
    assert 0 < sums["count"] < 1e-3


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (lambda x: x + 200, "got 200 to "),
        (lambda x: x[1:], "got uint8"),
        (lambda x: x / 2, "got float"),
        (lambda x: [0.5] * len(x), "got float64"),
    ],
)
def test_targets_that_are_no_ids_are_refused(dataset, made, got) -> None:
    def targets(tokens, generator):
        return {"targets": made(tokens * 0)}

    wanted = rf"^--x=y: expected ids from 0 to {dataset.vocab_size - 1}, .*{got}"
    with pytest.raises(ValueError, match=wanted):
        pipeline.check_targets("--x=y", targets, dataset)


@pytest.mark.parametrize("made", [[0], {"target": [0]}])
def test_targets_without_their_name_are_refused(dataset, made) -> None:
    with pytest.raises(ValueError, match=r'^--x=y: expected a dict with "targets"'):
        pipeline.check_targets("--x=y", lambda tokens, generator: made, dataset)


def test_pairs_have_no_targets_from_a_function() -> None:
    pairs: Any = SimpleNamespace(sequences=("tokens_1", "tokens_2"), vocab_size=5)
    with pytest.raises(ValueError, match=r"^--x=y: expected a task .* got pairs"):
        pipeline.check_targets("--x=y", lambda tokens, generator: {}, pairs)


def test_padding_is_no_target() -> None:
    """A function of a padded row may give its padding a target, too."""
    own = {"reconstructs": True, "dropout": 0.0}
    model = SequenceClassifier(5, 2, **own, **SIZES, rngs=nnx.Rngs(0))
    batch = _batch()
    sums = _sums(model, batch | {"targets": jnp.ones((3, 8), jnp.uint8)})
    assert sums["count"] == int(batch["lengths"].sum())


def test_other_tasks_have_no_values(data_dir) -> None:
    config = helpers.tiny(data_dir, train={"steps": 20, "warmup": 2})
    config = config.replace(pretrain={"steps": 10, "target": "values"})
    task = dataclasses.replace(tasks.get_task("listops"), targets={})
    with pytest.raises(ValueError, match=r"--pretrain.target: expected tokens for"):
        task.check(config)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrain": {"steps": -1}}, "--pretrain.steps: expected .* got -1"),
        (
            {"pretrain": {"steps": 20}},
            "--pretrain.steps: expected more than 2, the --train.warmup",
        ),
        ({"pretrain": {"mask_rate": 1.0}}, "--pretrain.mask_rate: expected a number"),
        (
            {"pretrain": {"target": "values", "steps": 9, "mask_rate": 0.2}},
            "--pretrain.mask_rate: expected 0.5 with .*=values, which masks no token",
        ),
        ({"pretrain": {"learning_rate": 0.0}}, "--pretrain.learning_rate: expected a"),
        (
            {"pretrain": {"target": "values"}},
            "--pretrain.steps: expected more than 2, the --train.warmup, .* got 0",
        ),
        (
            {"pretrain": {"steps": 9, "probe_steps": 12}},
            "--pretrain.probe_steps: expected at most 11, --train.steps less --pre",
        ),
        ({"pretrain": {"steps": 9, "probe_steps": -1}}, "--pretrain.probe_steps: exp"),
        (
            {"pretrain": {"probe_steps": 5}},
            "--pretrain.steps: expected more than 2, the --train.warmup, .* got 0",
        ),
        ({"pretrain": {"target": "value", "steps": 9}}, "--pretrain.target: expected"),
        (
            {"pretrain": {"steps": 10}, "model": {"is_causal": True}},
            "--pretrain.steps: expected 0 for a decoder",
        ),
        (
            {"pretrain": {"steps": 10, "target": "notes"}},
            "--model.readings: expected at least 2 with --pretrain.target=notes, got 1",
        ),
        (
            {"pretrain": {"steps": 10, "target": "values"}, "model": {"readings": 2}},
            "--model.readings: expected 1 without --pretrain.target=notes",
        ),
        ({"model": {"readings": 0}}, "--model.readings: expected a positive int"),
    ],
)
def test_what_cannot_be_pretrained(data_dir, changes: dict, words: str) -> None:
    config = helpers.tiny(data_dir, train={"steps": 20, "warmup": 2}).replace(**changes)
    with pytest.raises(ValueError, match=words):
        tasks.get_task("listops").check(config)
