"""Mechanisms with arrays of their own train on ListOps through the one trainer."""

import helpers
import jax
import numpy as np
import pytest
from flax import nnx
from run_helpers import trainer as make_trainer

from lra_jax.attention import names, resolve
from lra_jax.training import Trainer
from lra_jax.training.sharding import shard_batch
from lra_jax.training.step import NO_STEP, drain

pytestmark = pytest.mark.slow

STEPS = {
    "steps": 2,
    "warmup": 1,
    "eval_every": 2,
    "eval_batch_size": 15,
    "log_every": 1,
}
OPTIONS = {"linformer": "features=8", "sinkhorn": "block=16"}


def moves(dataset, workdir, attention: str, dtype: str = "float32", **model) -> None:
    """Two steps move every matrix of the model, and its loss is a number."""
    options = {"attention_options": OPTIONS.get(attention, "")}
    # A memory is carried on by the second layer.
    layers = {"num_layers": 2 if attention == "luna" else 1}
    config = helpers.tiny(
        workdir,
        attention=attention,
        train=STEPS | {"dtype": dtype},
        model=options | layers | model,
    )
    trainer = make_trainer(config, dataset, workdir)
    before = _arrays(trainer)
    for _ in range(STEPS["steps"]):
        batch = shard_batch(trainer.mesh, next(trainer.data))
        trainer.state = trainer.train_step(trainer.state, batch)
    sums, bad_step, *_ = jax.device_get(drain(trainer.state))
    assert bad_step == NO_STEP and np.isfinite(sums["loss"])
    assert sums["count"] == STEPS["steps"] * config.train.batch_size
    after = _arrays(trainer)
    for path, old in before.items():
        new = after[path]
        assert np.isfinite(new).all(), path
        assert new.ndim < 2 or (new != old).any(), path


def _arrays(trainer: Trainer) -> dict[str, np.ndarray]:
    trained = nnx.filter_state(trainer.state.params, nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


# The others have projections alone, as cosFormer in all other tests of the trainer; the
# gated delta rule has all that the delta rule has.
KINDS = [x for x in names() if resolve(x).make_parameters or resolve(x).gates]
KINDS.remove("delta")


@pytest.mark.parametrize("attention", KINDS)
def test_trains(attention: str, dataset, tmp_path) -> None:
    moves(dataset, tmp_path, attention)


def test_a_hybrid_trains(dataset, tmp_path) -> None:
    moves(dataset, tmp_path, "cosformer", hybrid="hgrn,cosformer", num_layers=2)


def test_trains_in_bfloat16(dataset, tmp_path) -> None:
    moves(dataset, tmp_path, "cosformer", dtype="bfloat16")


def test_trains_with_a_memory_for_an_mlp(dataset, tmp_path) -> None:
    options = "keys=4,heads=2,top=2,query_dim=4"
    more = {"mlp": "product_key", "mlp_options": options}
    moves(dataset, tmp_path, "cosformer", **more)
