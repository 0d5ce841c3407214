"""Whole runs in processes of their own: interruption, resumption, run directories."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import helpers
import pytest

from lra_jax import seals, train
from lra_jax.report import write_report
from lra_jax.training import Trainer
from lra_jax.training import session as sessions
from lra_jax.training.loop import Interrupted
from lra_jax.training.metrics import read_metrics
from lra_jax.training.session import Session
from lra_jax.training.trainer import Stopped
from lra_jax.training.workdir import exclusive, open_workdir

STEPS = helpers.TRAIN["steps"]
# Of a report: whether its steps were all compiled hangs on where a session began.
TIMES = ("seconds", "steps_per_second", "warm", "data_wait")
# Fields of a result that differ from one run to the next, and the seal over it.
VARYING = (
    *("seconds", "steps_per_second", "data_wait", "command", "peak_memory_bytes"),
    "seal",
)


def main(config) -> int | str | None:
    """The command line in this process; its exit code."""
    with pytest.raises(SystemExit) as stop:
        train.main(helpers.flags(config))
    return stop.value.code


def wait(process, condition) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no progress within the time"
        time.sleep(0.002)


def last_step(workdir) -> int:
    with contextlib.suppress(json.JSONDecodeError, FileNotFoundError):
        return max([line["step"] for line in read_metrics(workdir)], default=0)
    return 0


def latest(workdir) -> int:
    folder = workdir / "checkpoints" / "latest"
    steps = folder.iterdir() if folder.exists() else ()
    return max([int(p.name) for p in steps if p.name.isdecimal()], default=0)


def without_times(workdir) -> list[dict]:
    lines = read_metrics(workdir)
    return [{k: v for k, v in x.items() if k not in TIMES} for x in lines]


def stopped(command, workdir, signum) -> int:
    """Starts the command, stops it after a report of new steps; the step saved."""
    begun = latest(workdir)
    process = helpers.start(*command)
    try:
        wait(process, lambda: last_step(workdir) > begun)
        process.send_signal(signum)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + signum, err
    step = latest(workdir)
    assert step > begun
    advice = f"saved step {step} in {workdir}; to resume: python {' '.join(command)}"
    assert out.splitlines()[-1] == advice
    # On a machine with much to do a step and a save take their time.
    assert err in (
        "",
        "stopping after the current step; a second signal ends at once\n",
    )
    return step


@pytest.mark.parametrize("to", ["the command alone", "both processes"])
def test_several_runs_are_interrupted(data_dir, dataset, tmp_path, to):
    """Ctrl-C reaches both, and a supervisor's signal only the command."""
    train = {"steps": 4000, "eval_every": 4000}
    config = helpers.tiny(
        data_dir, tmp_path / "runs", train=train, data=helpers.ONE_LENGTH
    )
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
        send = os.kill if to == "the command alone" else os.killpg
        send(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=100)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 128 + signal.SIGINT, err
    assert f"saved step {latest(first)} in {first}" in out and latest(first) > 0
    assert "the same command continues with all runs" in err


def killed(command, workdir) -> None:
    begun = latest(workdir)
    process = helpers.start(*command)
    try:
        wait(process, lambda: latest(workdir) > begun)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0)  # It may have just ended.


@pytest.mark.core
def test_an_interrupted_run_ends_as_an_unbroken_one(finished, tmp_path, monkeypatch):
    """SIGTERM, SIGINT and SIGKILL in turn; equal to the last bit at the end.

    The data are made anew, by processes whose hashes differ from those of this one.
    """
    workdir = tmp_path / "run"
    config = helpers.tiny(tmp_path / "data", workdir)
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    command = ("-m", "lra_jax.train", *helpers.flags(config))
    first = stopped(command, workdir, signal.SIGTERM)
    second = stopped(command, workdir, signal.SIGINT)
    assert first < second
    if second < STEPS:
        killed(command, workdir)
    begun = latest(workdir)
    end = helpers.run(*command)
    assert end.returncode == 0, end.stderr
    assert end.stderr == ""
    assert begun == STEPS or f"resuming from step {begun}\n" in end.stdout
    result = json.loads((workdir / "result.json").read_text())
    for name, value in finished.result.to_dict().items():
        if name not in VARYING:
            assert result[name] == value, name
    assert f"{result['test_accuracy_best']:.2f}" in end.stdout
    assert without_times(workdir) == without_times(finished.workdir)
    with Session(config, quiet=True) as session:
        session.trainer.restore()
    helpers.assert_equal_trees(session.trainer.state, finished.trainer.state)


def broken_off(self, params, split, stop, console):
    """Takes the place of a validation, which a signal ends."""
    stop.signum = signal.SIGTERM
    raise Stopped


def test_a_last_validation_that_was_broken_off(data_dir, tmp_path, monkeypatch):
    """The session that makes up for it saves what came of it."""
    steps = {"steps": 8, "eval_every": 8}
    config = helpers.tiny(data_dir, tmp_path, train=steps, data=helpers.ONE_LENGTH)
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


@pytest.mark.parametrize("unsealed", [False, True])
def test_a_run_resumed_elsewhere_names_all_its_origins(
    data_dir, tmp_path, monkeypatch, unsealed
):
    """Also those of sessions before the last two, and after a kill before a seal."""
    steps = {"steps": 8, "eval_every": 4}
    config = helpers.tiny(data_dir, tmp_path, train=steps, data=helpers.ONE_LENGTH)
    ours = {"device": [sessions.describe_devices()], "commit": [sessions.commit()]}
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", broken_off)
        patch.setattr(sessions, "describe_devices", lambda: "a GPU")
        patch.setattr(sessions, "commit", lambda: "another")
        with Session(config, quiet=True) as session, pytest.raises(Interrupted):
            session.run()
    with Session(config, quiet=True) as session:
        session.run()
    (tmp_path / "result.json").unlink()
    if unsealed:
        (tmp_path / "checkpoints" / "latest" / "8" / seals.NAME).unlink()
    with Session(config, quiet=True) as session:
        result = session.run()
    for name, first in (("device", "a GPU"), ("commit", "another")):
        assert getattr(result, name).split("; ") == [first, *filter(None, ours[name])]


@pytest.mark.parametrize("steps", [8, 12])
def test_a_validation_that_is_broken_off_again(data_dir, tmp_path, monkeypatch, steps):
    """It is neither left out, in the middle of a run, nor taken for the end of one."""
    train = {"steps": steps, "eval_every": 8}
    config = helpers.tiny(data_dir, tmp_path, train=train, data=helpers.ONE_LENGTH)
    monkeypatch.setattr(Trainer, "evaluate", broken_off)
    for _ in range(2):
        with Session(config, quiet=True) as session:
            with pytest.raises(Interrupted) as stop:
                session.run()
            assert stop.value.step == latest(tmp_path) == 8


def test_evaluate_in_a_new_process(finished):
    end = helpers.run("-m", "lra_jax.evaluate", f"--workdir={finished.workdir}")
    assert end.returncode == 0, end.stderr
    result = finished.result
    assert f"test accuracy {result.test_accuracy_best:.2f} %" in end.stdout
    assert f"loss {result.test_loss_best:.4f}" in end.stdout
    assert f"45 examples, best checkpoint, step {result.best_step}" in end.stdout


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


def test_another_config_in_the_same_directory(finished, capsys):
    changed = finished.config.replace(train={"learning_rate": 0.5})
    code = main(changed)
    rate = finished.config.train.learning_rate
    named = (f"train.learning_rate={rate} (now 0.5)", str(finished.workdir))
    err = capsys.readouterr().err
    helpers.assert_one_error(code, err, 2, *named)
    assert "steps" not in err


def test_other_data_in_the_same_directory(finished, data_dir, tmp_path):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    values = json.loads((workdir / "config.json").read_text())
    values["data_fingerprint"] = "00"
    (workdir / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"on other data, 00$"):
        Session(helpers.tiny(data_dir, workdir), quiet=True)


def test_settings_without_effect_may_change(finished, tmp_path):
    moved = shutil.copytree(finished.workdir, tmp_path / "run")
    config = finished.config.replace(workdir=str(moved), data={"processes": 2})
    assert train.run(config, quiet=True) == finished.result.to_dict()


def test_two_processes_in_one_directory(data_dir, tmp_path, capsys):
    with exclusive(tmp_path):
        code = main(helpers.tiny(data_dir, tmp_path))
    err = capsys.readouterr().err
    parts = (str(tmp_path), "in use by another process")
    helpers.assert_one_error(code, err, 2, *parts)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "[1]", "3", "{}", '{"data_fingerprint": "a", "task": 3}', "\xff"],
)
def test_damaged_config(data_dir, tmp_path, capsys, content):
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    code = main(helpers.tiny(data_dir, tmp_path))
    helpers.assert_one_error(code, capsys.readouterr().err, 2, "config")


@pytest.mark.parametrize("content", ["{", "", "[]", "{}", "3", "NaN"])
def test_damaged_result(finished, tmp_path, capsys, content):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").write_text(content)
    code = main(finished.config.replace(workdir=str(workdir)))
    helpers.assert_one_error(
        code, capsys.readouterr().err, 2, "result.json: ", "delete it to score"
    )


def test_a_cut_line_of_metrics_is_dropped(tmp_path):
    line = '{"step": 4, "split": "train"}'
    (tmp_path / "metrics.jsonl").write_text(f'{line}\n{{"step": 8, "spl')
    assert read_metrics(tmp_path) == [{"step": 4, "split": "train"}]


@pytest.mark.parametrize(
    "line", ['{"step": 4, "spl', "[]", "4", '{"split": "train"}', "\xff", ""]
)
def test_damaged_metrics(finished, tmp_path, capsys, line):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    file = workdir / "metrics.jsonl"
    first, _, *rest = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, line + "\n", *rest]), encoding="latin-1")
    code = main(finished.config.replace(workdir=str(workdir)))
    parts = f"{file}, line 2: expected metrics", "got "
    helpers.assert_one_error(code, capsys.readouterr().err, 2, *parts)


def test_what_a_finished_run_has_lost_is_named(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "metrics.jsonl").unlink()
    (workdir / "model.safetensors").unlink()
    train.main(helpers.flags(finished.config.replace(workdir=str(workdir))))
    out = capsys.readouterr().out
    assert "metrics.jsonl: expected a report every 4 steps, got 10 fewer" in out
    command = f"python -m lra_jax.evaluate --workdir={workdir} --save="
    assert f"model.safetensors is missing; `{command}" in out
    assert len(write_report(workdir, out=tmp_path / "report")) == 1
    page = (tmp_path / "report" / "report.md").read_text()
    assert "without some of its metrics:" in page


def test_lost_metrics_are_named_and_the_run_goes_on(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    (workdir / "metrics.jsonl").write_text("")
    train.main(helpers.flags(finished.config.replace(workdir=str(workdir))))
    out = capsys.readouterr().out
    assert "expected a report every 4 steps, got 10 fewer, the first of step 4" in out
    result = json.loads((workdir / "result.json").read_text())
    assert result["test_accuracy_best"] == finished.result.test_accuracy_best


def test_checkpoints_without_their_config(finished, tmp_path, capsys):
    """Another seed would otherwise go on from them, and claim them."""
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "config.json").unlink()
    code = main(finished.config.replace(workdir=str(workdir), seed=5))
    parts = f"{workdir}/config.json", "got none, but checkpoints"
    helpers.assert_one_error(code, capsys.readouterr().err, 2, *parts)
    assert not (workdir / "config.json").exists()


# Orbax leaves tasks in its closed event loop when a load fails.
orbax_leaves_tasks = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


@orbax_leaves_tasks
def test_a_damaged_checkpoint_is_set_aside(finished, tmp_path, caplog):
    """The run goes back to the one before, and ends as it did."""
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    newest = workdir / "checkpoints" / "latest" / str(STEPS)
    helpers.damage(newest / "state/manifest.ocdbt", "cut")
    (newest / seals.NAME).unlink()
    config = finished.config.replace(workdir=str(workdir))
    with Session(config, quiet=True) as session:
        result = session.run()
        assert session.console.start == 30
    ours = [record for record in caplog.records if record.name.startswith("lra_jax")]
    (line,) = [record.getMessage() for record in ours]
    assert line.startswith(f"{newest}: expected a whole checkpoint, got ")
    assert line.endswith("; going back to step 30") and "\n" not in line
    helpers.assert_equal_trees(session.trainer.state, finished.trainer.state)
    assert result.test_loss_last == finished.result.test_loss_last
    assert without_times(workdir) == without_times(finished.workdir)
    (aside,) = (workdir / "checkpoints" / "damaged").iterdir()
    assert aside.name.startswith(f"{STEPS}-")


@orbax_leaves_tasks
def test_no_checkpoint_is_whole(finished, tmp_path, capsys):
    workdir = shutil.copytree(finished.workdir, tmp_path / "run")
    (workdir / "result.json").unlink()
    for folder in (workdir / "checkpoints" / "latest").iterdir():
        helpers.damage(folder / "state" / "_METADATA", "gone")
    before = sorted(workdir.rglob("*"))
    code = main(finished.config.replace(workdir=str(workdir)))
    parts = "latest/40: expected a whole checkpoint", "latest/30: expected a whole"
    helpers.assert_one_error(code, capsys.readouterr().err, 2, *parts)
    after = [p for p in workdir.rglob("*") if p.name != ".lock"]
    assert sorted(after) == [p for p in before if p.name != ".lock"]


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_place_of_the_directory(tmp_path, capsys, below):
    file = tmp_path / "file"
    file.touch()
    code = main(helpers.tiny(tmp_path / "data", file / below))
    helpers.assert_one_error(code, capsys.readouterr().err, 2, "cannot be written")
    assert not (tmp_path / "data").exists()  # Before the data are made.


def test_a_directory_of_another_run_is_refused_before_its_data_are_made(
    tmp_path, capsys
):
    config = helpers.tiny(tmp_path / "data", tmp_path / "run")
    (tmp_path / "run").mkdir()
    theirs = config.replace(seed=5).to_dict() | {"data_fingerprint": "ab"}
    (tmp_path / "run" / "config.json").write_text(json.dumps(theirs))
    helpers.assert_one_error(main(config), capsys.readouterr().err, 2, "seed=5 (now 0)")
    assert not (tmp_path / "data").exists()


def test_the_default_directory_is_named_after_the_settings(
    data_dir, tmp_path, monkeypatch
):
    from lra_jax.training.session import default_workdir

    monkeypatch.chdir(tmp_path)
    plain = default_workdir(helpers.tiny(data_dir))
    assert plain.parts[0] == "runs"
    assert plain.name.startswith("listops-cosformer-compact-seed0-")
    assert plain != default_workdir(helpers.tiny(data_dir, model={"dropout": 0.2}))
    assert default_workdir(helpers.tiny(data_dir, tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "curves.png"])
def test_files_of_something_else_are_left_alone(data_dir, tmp_path, name) -> None:
    """A run would replace them at its end."""
    (tmp_path / name).write_text("mine")
    config = helpers.tiny(data_dir, tmp_path)
    with pytest.raises(ValueError, match=f"got none, but {name}"):
        open_workdir(tmp_path, config, "fingerprint")
    assert [x.name for x in tmp_path.iterdir()] == [name]
