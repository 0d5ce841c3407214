"""The loop: what it learns, reports and keeps, and how it is stopped and resumed."""

import json
import os
import signal
import types
from typing import Any

import helpers
import jax
import numpy as np
import pytest
from run_helpers import (
    STEPS,
    VARYING,
    broken_off,
    last_step,
    latest,
    losses,
    trainer,
    wait,
)

from lra_jax import tasks, train
from lra_jax.configs import Config
from lra_jax.training import NonFiniteLoss, Trainer, fit, meter
from lra_jax.training.console import RunConsole
from lra_jax.training.loop import Interrupted
from lra_jax.training.metrics import read_metrics
from lra_jax.training.session import Session


def test_training_learns(data_dir, dataset, tmp_path):
    """The loss falls below that of the best guess, on examples seen again and again."""
    config = helpers.tiny(
        data_dir,
        train={"steps": 150, "learning_rate": 0.01, "eval_every": 150},
        model={"dropout": 0.0},
        data={"num_train": 16, "num_valid": 8, "num_test": 8},
    )
    small = tasks.get_task("listops").prepare(config.data)
    learner = trainer(config, small, tmp_path)
    fit(learner, RunConsole(150, quiet=True))
    learner.checkpoints.close()
    assert losses(tmp_path)[0] > 2
    assert losses(tmp_path)[-1] < 0.5


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


def killed(command, workdir) -> None:
    """Starts the command and kills it while it writes a checkpoint, not the first.

    On a machine with much to do, also a little later.
    """
    incomplete = "checkpoints/*/*.orbax-checkpoint-tmp*"

    def writes_another() -> bool:
        return latest(workdir) > 0 and any(workdir.glob(incomplete))

    process = helpers.start(*command)
    try:
        wait(process, lambda: writes_another() or last_step(workdir) > 20)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_an_interrupted_run_ends_as_an_unbroken_one(finished, tmp_path, monkeypatch):
    """To the last bit: killed, then left alone.

    The data are made anew, by processes whose hashes differ from those of this one.
    """
    workdir = tmp_path / "run"
    config = helpers.tiny(tmp_path / "data", workdir, data=helpers.TWO_LENGTHS)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    command = ("-m", "lra_jax.train", *helpers.flags(config))
    killed(command, workdir)
    begun = latest(workdir)
    end = helpers.run(*command)
    assert end.returncode == 0, end.stderr
    assert end.stderr == ""
    assert f"resuming from step {begun}\n" in end.stdout
    result = json.loads((workdir / "result.json").read_text())
    for name, value in finished.result.to_dict().items():
        if name not in VARYING:
            assert result[name] == value, name
    assert f"{result['test_accuracy_best']:.2f}" in end.stdout
    assert helpers.without_times(workdir) == helpers.without_times(finished.workdir)
    with Session(config, quiet=True) as session:
        session.trainer.restore()
    helpers.assert_equal_trees(session.trainer.state, finished.trainer.state)


def test_a_last_validation_that_was_broken_off(data_dir, tmp_path, monkeypatch):
    """The session that makes up for it saves what came of it."""
    steps = {"steps": 8, "eval_every": 8}
    config = helpers.tiny(data_dir, tmp_path, train=steps)
    monkeypatch.setattr(Trainer, "evaluate", broken_off)
    with Session(config, quiet=True) as session, pytest.raises(Interrupted):
        session.run()
    monkeypatch.undo()
    for validated in (False, True, True):
        with Session(config, quiet=True) as session:
            trainer = session.trainer
            _, progress = trainer.checkpoints.restore(trainer.state, None)
            assert progress.best_step == (8 if validated else -1)
            assert trainer.checkpoints.seal["validated"] == validated
            session.run()
    assert latest(tmp_path) == 8


@pytest.mark.parametrize("steps", [8, 12])
def test_a_validation_that_is_broken_off_again(data_dir, tmp_path, monkeypatch, steps):
    """It is neither left out, in the middle of a run, nor taken for the end of one."""
    train = {"steps": steps, "eval_every": 8}
    config = helpers.tiny(data_dir, tmp_path, train=train)
    monkeypatch.setattr(Trainer, "evaluate", broken_off)
    for _ in range(2):
        with Session(config, quiet=True) as session:
            with pytest.raises(Interrupted) as stop:
                session.run()
            assert stop.value.step == latest(tmp_path) == 8


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
    )
    with pytest.raises(NonFiniteLoss, match="no checkpoint was saved") as error:
        train.run(config, quiet=True)
    assert error.value.step == 1 and error.value.saved_step is None
    assert not saved_steps(tmp_path, "latest") and not saved_steps(tmp_path, "best")


def test_the_search_for_nan_names_the_operation(data_dir, tmp_path):
    """In the second step, too: in the first, jax itself turns the search off."""
    settings = STEEP | {"learning_rate": 1e30}
    config = helpers.tiny(data_dir, tmp_path, train=settings)
    jax.config.update("jax_debug_nans", True)
    try:
        with pytest.raises(FloatingPointError, match="encountered in dot_general"):
            train.run(config, quiet=True)
    finally:
        jax.config.update("jax_debug_nans", False)
