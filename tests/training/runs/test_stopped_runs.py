"""SIGINT, SIGTERM and closed pipes at chosen moments: one line, and an exit code.

A hook sends the signal to its own process as soon as it imports a module or calls a
function; benchmarks/soak.py does the same at random moments.
"""

import contextlib
import os
import re
import signal
import sys
from typing import Any

import helpers
import pytest
from run_helpers import main

from lra_jax.training.checkpoints import Checkpoints
from lra_jax.training.session import Session
from lra_jax.training.trainer import Trainer

pytestmark = pytest.mark.slow

# Sends the signal as a module is imported, or as a function of it is called.
HOOK = """
import importlib, os, runpy, sys, time
MODULE, FUNCTION, SIGNAL = sys.argv[1], sys.argv[2], int(sys.argv[3])

def stop():
    os.kill(os.getpid(), SIGNAL)
    time.sleep(0.1)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE and not FUNCTION:
            sys.meta_path.remove(self)
            stop()

sys.meta_path.insert(0, Finder())
if FUNCTION:
    owner = importlib.import_module(MODULE)
    *classes, last = FUNCTION.split(".")
    for name in classes:
        owner = getattr(owner, name)
    function = getattr(owner, last)
    def hooked(*args, **keywords):
        setattr(owner, last, function)
        stop()
        return function(*args, **keywords)
    setattr(owner, last, hooked)
sys.argv[1:] = sys.argv[4:]
sys.argv[0] = "train"
runpy.run_module("lra_jax.train", run_name="__main__", alter_sys=True)
"""
NOTHING = r"error: interrupted; to resume: python -m lra_jax\.train --task"
SAVED = r"saved step 10 in .*; to resume: \S*python -m lra_jax\.train --task"
MOMENTS = {
    "first imports": ("argparse", "", "error: interrupted"),
    "data": ("lra_jax.data.listops_trees", "iterate", NOTHING),
    "the scores": ("lra_jax.training.session", "Session._score", NOTHING),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_at_a_moment(data_dir, dataset, tmp_path, moment):
    """Nothing is to be saved, and a thread that waits for signals ends the process."""
    module, function, line = MOMENTS[moment]
    place = tmp_path / "data" if moment == "data" else data_dir
    few = {"steps": 2, "warmup": 0, "eval_every": 2}
    config = helpers.tiny(place, tmp_path / "run", train=few)
    number = list(MOMENTS).index(moment)
    signum = (signal.SIGINT, signal.SIGTERM)[number % 2]
    arguments = (module, function, str(int(signum)), *helpers.flags(config))
    ended = helpers.run("-c", HOOK, *arguments)
    assert ended.returncode == 128 + signum, ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
    assert_told_once(ended.stdout + ended.stderr, line)
    if moment == "data":
        assert not list(tmp_path.rglob("incomplete.*"))


def assert_told_once(text: str, line: str) -> None:
    told = [x for x in text.splitlines() if "interrupted" in x or "saved step" in x]
    assert len(told) == 1 and re.match(line, told[0]), text


@pytest.mark.parametrize(
    ("owner", "name", "signum"),
    [
        (Trainer, "evaluate", signal.SIGINT),
        (Checkpoints, "save_latest", signal.SIGTERM),
    ],
)
def test_a_signal_while_training(
    finished, tmp_path, monkeypatch, capsys, owner, name, signum
):
    """The step is saved; the next session goes on with what was broken off."""
    usual = getattr(owner, name)

    def hooked(*args, **keywords):
        monkeypatch.undo()
        os.kill(os.getpid(), signum)
        return usual(*args, **keywords)

    monkeypatch.setattr(owner, name, hooked)
    config = finished.config.replace(workdir=str(tmp_path / "run"))
    assert main(config) == 128 + signum
    shown = capsys.readouterr()
    assert_told_once(shown.out + shown.err, SAVED)
    if name == "evaluate":
        with Session(config, quiet=True) as session:
            session.run()
        assert helpers.without_times(tmp_path / "run") == helpers.without_times(
            finished.workdir
        )


def test_nobody_reads_the_output(dataset, data_dir):
    flags = [flag for flag in helpers.flags(helpers.tiny(data_dir)) if "data." in flag]
    process: Any = helpers.start("-m", "lra_jax.data", "describe", *flags)
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 128 + signal.SIGPIPE
    assert stderr == "error: the output was closed\n"


@pytest.mark.parametrize("is_full", [False, True])
def test_training_that_nobody_reads_is_saved(
    data_dir, tmp_path, monkeypatch, capsys, is_full
):
    reader, writer = os.pipe()
    os.close(reader)
    if is_full:
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    output = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(helpers.tiny(data_dir, tmp_path / "run")) == 128 + signal.SIGPIPE
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        output.close()
    stderr = capsys.readouterr().err
    step = r"error: the output was closed; saved step \d+ in .*; to resume: \S*python"
    assert re.match(step, stderr) and len(stderr.splitlines()) == 1, stderr
    assert any((tmp_path / "run" / "checkpoints" / "latest").iterdir())
