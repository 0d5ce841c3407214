"""Whole runs: several in turn, resumed elsewhere, made longer, with moved data."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from typing import Any

import helpers
import pytest
from run_helpers import broken_off, constant, last_step, latest, steps_and_losses, wait

from lra_jax import seals, train
from lra_jax.configs.listops import ListOpsData
from lra_jax.data import listops
from lra_jax.reports.runs import read_runs
from lra_jax.training import session as sessions
from lra_jax.training import workdir as workdirs
from lra_jax.training.loop import Interrupted
from lra_jax.training.restore import load_run
from lra_jax.training.session import Session
from lra_jax.training.trainer import Trainer


def test_several_runs_are_interrupted(data_dir, dataset, tmp_path):
    """By Ctrl-C, which reaches both processes; tests/test_sweep.py has a signal to the
    command alone."""
    train = {"steps": 4000, "eval_every": 4000}
    config = helpers.tiny(data_dir, tmp_path / "runs", train=train)
    command = ("-m", "lra_jax.train", "--seeds=2", *helpers.flags(config))
    process = subprocess.Popen(
        [sys.executable, *command],
        env=helpers.environment({}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    try:
        wait(process, lambda: any((tmp_path / "runs").rglob("metrics.jsonl")))
        (first,) = (x.parent for x in (tmp_path / "runs").rglob("metrics.jsonl"))
        wait(process, lambda: last_step(first) > 0)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT, err
    assert f"saved step {latest(first)} in {first}" in out and latest(first) > 0
    assert "the same command continues with all runs" in err


def test_a_run_resumed_elsewhere_names_all_its_origins(data_dir, tmp_path, monkeypatch):
    """Also those of sessions before the last two, and after a kill before a seal."""
    steps = {"steps": 8, "eval_every": 4}
    config = helpers.tiny(data_dir, tmp_path, train=steps)
    ours = {"device": [sessions.describe_devices()], "commit": [sessions.commit()]}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", broken_off)
        patch.setattr(sessions, "describe_devices", lambda: "a GPU")
        patch.setattr(sessions, "commit", lambda: "another")
        with Session(config, quiet=True) as session, pytest.raises(Interrupted):
            # The checkout may move on while a run trains.
            patch.setattr(sessions, "commit", lambda: "later")
            session.run()
    for lost in ("", "result.json", f"checkpoints/latest/8/{seals.NAME}"):
        if lost:
            (tmp_path / "result.json").unlink()
            (tmp_path / lost).unlink(missing_ok=True)
        with Session(config, quiet=True) as session:
            result = session.run()
        for name, first in (("device", "a GPU"), ("commit", "another")):
            origins = getattr(result, name).split("; ")
            assert origins == [first, *filter(None, ours[name])]


def test_a_finished_run_is_shown_and_not_trained_again(finished, capsys):
    before = (finished.workdir / "metrics.jsonl").read_bytes()
    train.main(helpers.flags(finished.config))
    shown = capsys.readouterr().out
    assert "already finished" in shown
    assert f"{finished.result.test_accuracy_best:.2f}" in shown
    assert not re.search(r"loss \d", shown)
    assert (finished.workdir / "metrics.jsonl").read_bytes() == before
    assert train.run(finished.config, quiet=True) == finished.result.to_dict()


def test_a_finished_run_needs_no_checkpoints(finished, tmp_path, monkeypatch):
    """They may have been deleted, on a disk that is full."""
    for name in ("config.json", "result.json"):
        shutil.copyfile(finished.workdir / name, tmp_path / name)
    full = types.SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    config = finished.config.replace(workdir=str(tmp_path))
    with Session(config, quiet=True) as session:
        assert session.run() == finished.result
    assert not (tmp_path / "checkpoints").exists()


def test_a_longer_run_ends_as_one_from_the_start(data_dir, tmp_path):
    """Bit for bit; and the shorter one stays what it was until then."""
    whole = constant(data_dir, tmp_path / "whole", 12)
    with Session(whole, quiet=True) as session:
        expected = session.run()
    unbroken = session.trainer.state
    short = constant(data_dir, tmp_path / "run", 4)
    first = train.run(short, quiet=True)
    longer = constant(data_dir, tmp_path / "run", 12)
    with Session(longer, quiet=True) as session:
        session.console = helpers.Closed(12, quiet=True)
        begun = helpers.steps_resumed(session)
        with pytest.raises(Interrupted):
            session.run()
    assert begun == [4]
    assert train.run(short, quiet=True) == first
    assert load_run(str(tmp_path / "run"), "last").step == 7
    with Session(longer, quiet=True) as session:
        begun = helpers.steps_resumed(session)
        result = session.run()
    assert begun == [7]
    helpers.assert_equal_trees(session.trainer.state, unbroken)
    for name in ("test_loss_best", "test_loss_last", "best_step", "steps"):
        assert getattr(result, name) == getattr(expected, name)
    assert steps_and_losses(tmp_path / "run") == steps_and_losses(tmp_path / "whole")
    assert train.run(longer, quiet=True) == result.to_dict()
    assert load_run(str(tmp_path / "run")).step == result.best_step
    curves, end = (tmp_path / "run" / n for n in ("curves.png", "result.json"))
    assert curves.stat().st_mtime >= end.stat().st_mtime
    with pytest.raises(ValueError, match="can be made longer, not shorter"):
        Session(short, quiet=True)


def test_a_longer_run_counts_a_best_checkpoint_again(data_dir, tmp_path):
    """It goes back to before the shorter one's end, whose parameters were the best."""
    short = constant(data_dir, tmp_path / "run", 6)
    assert train.run(short, quiet=True)["best_step"] == 6
    longer = short.replace(train={"steps": 9})
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    expected = train.run(longer.replace(workdir=str(tmp_path / "whole")), quiet=True)
    (tmp_path / "run/checkpoints/latest/6/state/_METADATA").unlink()
    with Session(longer, quiet=True) as session:
        begun = helpers.steps_resumed(session)
        result = session.run()
    assert begun == [4]
    scored, others = (
        [line for line in steps_and_losses(tmp_path / name) if line[1] == "valid"]
        for name in ("run", "whole")
    )
    assert scored == others and [line[0] for line in scored] == [4, 6, 8, 9]
    for name in ("best_step", "test_loss_best", "valid_accuracy_best"):
        assert getattr(result, name) == expected[name]
    assert load_run(str(tmp_path / "run")).step == result.best_step


def test_a_best_checkpoint_is_the_one_that_is_there(data_dir, tmp_path, monkeypatch):
    """On another device the steps after a crash may end with a lower score. Outside of
    a checkout there is no commit."""
    scores = [0.1, 0.5]

    def evaluate(self, params, split, *_, **__):
        accuracy = scores.pop(0) if split == "valid" else 0.0
        return {"accuracy": accuracy, "loss": 1.0}

    monkeypatch.setattr(Trainer, "evaluate", evaluate)
    monkeypatch.setattr(sessions, "commit", lambda: None)
    config = constant(data_dir, tmp_path, 12).replace(train={"best_by": "accuracy"})
    with Session(config, quiet=True) as session, pytest.raises(OSError, match="full"):
        save = session.trainer.checkpoints.save_latest

        def full(step, *rest):
            if step == 8:
                raise OSError("full")
            save(step, *rest)

        monkeypatch.setattr(session.trainer.checkpoints, "save_latest", full)
        session.run()
    scores += [0.05, 0.02]
    with Session(config, quiet=True) as session:
        begun = helpers.steps_resumed(session)
        result = session.run()
    assert begun == [4]
    assert result.best_step == load_run(str(tmp_path)).step == 8
    assert result.valid_accuracy_best == pytest.approx(5) and result.commit is None


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    sizes = {"num_train": 60, "num_valid": 8, "num_test": 8, "processes": 1}
    lengths = {"min_length": 10, "max_length": 60}
    folder = tmp_path_factory.mktemp("table")
    dataset = listops.prepare(folder / "data", **sizes, **lengths)
    listops.write_tsv(dataset, folder / "files")
    return folder / "files"


def config_of(tmp_path, path):
    unread = {name: getattr(ListOpsData, name) for name in ListOpsData.generator_fields}
    return helpers.tiny(
        tmp_path / "prepared",
        tmp_path / "run",
        train={"steps": 12, "eval_every": 4, "schedule": "constant"},
        data={**unread, "path": str(path)},
    )


@pytest.mark.slow
def test_a_run_goes_on_with_moved_data(table, tmp_path):
    """With the same examples, from where it stopped."""
    places = [shutil.copytree(table, tmp_path / name) for name in ("one", "other")]
    first, moved = (config_of(tmp_path, place) for place in places)
    with Session(first, quiet=True) as session, pytest.raises(Interrupted):
        session.console = helpers.Closed(12, quiet=True)
        session.run()
    left, read = session.trainer.state, session.dataset.fingerprint
    shutil.rmtree(places[0])
    with Session(moved, quiet=True) as session:
        assert session.trainer.restore() == 7
        helpers.assert_equal_trees(session.trainer.state, left)
        assert session.dataset.fingerprint == read
        result = session.run()
    # Whatever reads the run afterwards finds the data, and its seals are whole.
    assert train.run(moved, quiet=True) == result.to_dict()
    data: Any = load_run(str(tmp_path / "run")).config.data
    assert data.path == str(places[1])
    runs, problems = read_runs(tmp_path / "run")
    assert len(runs) == 1 and not problems


@pytest.mark.slow
def test_other_data_are_refused_wherever_they_are(table, tmp_path):
    config = config_of(tmp_path, table)
    (tmp_path / "run").mkdir()
    workdirs.open_workdir(tmp_path / "run", config, "ab")
    before = (tmp_path / "run" / "config.json").read_text()
    moved = config.replace(data={"path": "elsewhere"})
    with pytest.raises(ValueError, match="on other data, ab"):
        workdirs.open_workdir(tmp_path / "run", moved, "cd")
    generated = config.replace(data={"path": None})
    with pytest.raises(ValueError, match=r"of another config: data\.path="):
        workdirs.open_workdir(tmp_path / "run", generated, "ab")
    assert (tmp_path / "run" / "config.json").read_text() == before
    name = workdirs.identify(tmp_path / "run")
    workdirs.open_workdir(tmp_path / "run", moved, "ab")
    assert workdirs.identify(tmp_path / "run") == name
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["first_path"] == str(table)
    assert written["data"]["path"] == "elsewhere"
