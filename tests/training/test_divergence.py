"""Runs that become NaN: they stop, say where, and keep the last good checkpoint."""

import helpers
import jax
import numpy as np
import pytest

from lra_jax import train
from lra_jax.configs import Config
from lra_jax.training import NonFiniteLoss
from lra_jax.training.metrics import read_metrics
from lra_jax.training.session import Session

# Constant and large from the first step on.
STEEP = {"schedule": "constant", "warmup": 0, "clip_norm": 0.0}
# Nothing that keeps the values small.
STEEP |= {"weight_decay": 0.0, "adam_b2": 0.999}


def steep(data_dir, workdir, **changes) -> Config:
    """A run that becomes NaN after its first checkpoint."""
    return helpers.tiny(
        data_dir,
        workdir,
        attention="helpers:fragile",
        train=STEEP | {"learning_rate": 0.055},
        data={"buckets": "60"},
        **changes,
    )


def saved_steps(workdir, name: str) -> list[int]:
    return [int(p.name) for p in (workdir / "checkpoints" / name).iterdir()]


def test_stops_with_the_step_and_keeps_the_last_good_checkpoint(
    data_dir, tmp_path, capsys
):
    config = steep(data_dir, tmp_path)
    with pytest.raises(SystemExit) as stop:
        train.main(helpers.flags(config))
    saved = max(saved_steps(tmp_path, "latest"))
    assert saved >= 10
    helpers.assert_one_error(
        stop.value.code,
        capsys.readouterr().err,
        1,
        "not finite at step",
        f"the checkpoint of step {saved} is kept",
    )
    *lines, last = read_metrics(tmp_path)
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert last["split"] == "not_finite" and last["step"] > saved
    assert not (tmp_path / "result.json").exists()
    # The checkpoint is good, and the same command ends in the same way.
    with Session(config, quiet=True) as session:
        assert session.trainer.restore() == saved
        leaves = jax.tree.leaves(session.trainer.state.params)
        assert all(np.isfinite(x).all() for x in leaves)
        assert session.trainer.progress.best_step in saved_steps(tmp_path, "best")
        with pytest.raises(NonFiniteLoss) as error:
            session.run()
    assert saved < error.value.step < 40
    assert error.value.saved_step == saved


@pytest.mark.parametrize(
    ("attention", "learning_rate"),
    [("cosformer", 1e30), ("helpers:bad_gradient", 1e-3)],
)
def test_parameters_that_are_lost_are_not_saved(
    data_dir, tmp_path, attention, learning_rate
):
    """The loss of the first step is finite, the parameters after it are useless."""
    config = helpers.tiny(
        data_dir,
        tmp_path,
        attention=attention,
        train=STEEP | {"learning_rate": learning_rate, "eval_every": 1},
        data={"buckets": "60"},
    )
    with pytest.raises(NonFiniteLoss, match="no checkpoint was saved") as error:
        train.run(config, quiet=True)
    assert error.value.step == 1 and error.value.saved_step is None
    assert not saved_steps(tmp_path, "latest") and not saved_steps(tmp_path, "best")


def test_is_noticed_at_the_next_report(data_dir, tmp_path):
    config = helpers.tiny(
        data_dir,
        tmp_path,
        train=STEEP | {"learning_rate": 1e30},
        data={"buckets": "60"},
    )
    with pytest.raises(NonFiniteLoss) as error:
        train.run(config, quiet=True)
    assert error.value.step == 2
    assert read_metrics(tmp_path) == [{"step": 2, "split": "not_finite"}]
