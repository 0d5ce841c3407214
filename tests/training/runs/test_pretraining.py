"""Pretraining on hidden tokens, then labels, in one run."""

from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lra_jax import tasks
from lra_jax.configs import Config, get_preset
from lra_jax.configs.base import PretrainConfig
from lra_jax.models import MatchingClassifier, SequenceClassifier
from lra_jax.tasks.reconstruction import reconstruction_loss
from lra_jax.training import summary
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
        return model.reconstruct(changed, lengths, hidden)[1, :3]

    plain = model.reconstruct(tokens, lengths, hidden)[1, :3]
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
    faster = rates(learning_rate=3 * train.learning_rate)
    assert faster[:half] == pytest.approx([3 * rate for rate in same[:half]])
    assert faster[half:] == same[half:]


def test_one_run_interrupted_and_resumed(data_dir, tmp_path) -> None:
    """In its first part; the same bits as a run that nothing stopped."""
    settings = {
        "train": {"steps": 20, "eval_every": 10, "log_every": 5, "warmup": 2},
        "pretrain": {"steps": 15},
    }
    config = helpers.tiny(data_dir, tmp_path / "whole", **settings)
    with Session(config, quiet=True) as whole:
        result = whole.run()
    lines = read_metrics(tmp_path / "whole")
    kinds = [(line["step"], line["split"]) for line in lines]
    assert kinds == [
        (5, "pretrain"),
        (10, "pretrain"),
        (15, "pretrain"),
        (20, "train"),
        (20, "valid"),
    ]
    assert helpers.resume(config, 10).run().test_loss_last == result.test_loss_last


@pytest.mark.parametrize(("share", "where"), [(0.5, ", all in pretraining"), (1, "")])
def test_beginnings_that_are_over_before_the_labels_are_said(
    data_dir, share: float, where: str
) -> None:
    train = {"steps": 20, "warmup": 2, "length_warmup": f"8:{share}"}
    config = helpers.tiny(data_dir, train=train, pretrain={"steps": 10})
    with Session(config, quiet=True, dry=True) as session:
        assert (
            f"beginnings first (8:{share}{where})"
            in summary.facts(session.trainer)["training"]
        )


def _is_adam(part: Any) -> bool:
    return isinstance(part, optax.ScaleByAdamState)


def test_each_part_trains_its_own_head(data_dir, tmp_path) -> None:
    """Both train the encoder. Adam's moments begin anew with the labels."""
    config = helpers.tiny(
        data_dir,
        tmp_path,
        train={"steps": 6, "eval_every": 6, "warmup": 0, "weight_decay": 0.1},
        pretrain={"steps": 3},
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
            states = jax.tree.leaves(trainer.state.opt_state, is_leaf=_is_adam)
            counts += [int(part.count) for part in states if _is_adam(part)]
    assert counts == [1, 2, 3] * 2
    # Labels do not teach the head that reconstructs, so nothing may move it.
    assert seen == [(True, True, False)] * 3 + [(True, False, True)] * 3


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("pretrain", "target", "values"),
        ("pretrain", "probe_steps", 80),
        ("model", "readings", 12),
        ("data", "paths", True),
    ],
)
def test_a_run_of_an_earlier_version_with_another_target(part, setting, value) -> None:
    """Other runs of that version, which have the setting's default, can be read."""
    config = get_preset("pathfinder", "modern", "hgrn")
    defaults = {"target": "tokens", "probe_steps": 0, "readings": 1, "paths": False}
    stored = config.to_dict()
    stored[part][setting] = defaults[setting]
    assert Config.from_dict(stored) == config
    stored[part][setting] = value
    words = rf"^config: expected {part}.{setting}=.*, the only value .*, got {value!r}$"
    with pytest.raises(ValueError, match=words):
        Config.from_dict(stored)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrain": {"steps": -1}}, "--pretrain.steps: expected .* got -1"),
        (
            {"pretrain": {"steps": 20}},
            "--pretrain.steps: expected less than --train.steps=20, got 20",
        ),
        ({"pretrain": {"mask_rate": 1.0}}, "--pretrain.mask_rate: expected a number"),
        ({"pretrain": {"learning_rate": 0.0}}, "--pretrain.learning_rate: expected a"),
    ],
)
def test_what_cannot_be_pretrained(data_dir, changes: dict, words: str) -> None:
    config = helpers.tiny(data_dir, train={"steps": 20, "warmup": 2}).replace(**changes)
    with pytest.raises(ValueError, match=words):
        tasks.get_task("listops").check(config)
