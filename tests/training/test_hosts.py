"""Two real processes on this machine: one run, also after one of them has failed."""

import re
import signal
import socket
import subprocess

import helpers
import numpy as np
import pytest
from run_helpers import latest, wait

from lra_jax.training import hosts
from lra_jax.training.metrics import read_metrics
from lra_jax.training.session import Session

pytestmark = pytest.mark.slow

# After the first checkpoint is whole, and while no process waits for the other to write
# one: that would last until JAX misses its sign of life.
FAILING = """
from lra_jax import train
from lra_jax.training import hosts
from lra_jax.training.trainer import Trainer

usual = Trainer.advance


def fail(self, step, batch):
    if step == 14:
        raise OSError(28, "No space left on device")
    usual(self, step, batch)


hosts.LEAVE_SECONDS = 1
Trainer.advance = fail
train.main({flags})
"""


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_both(flags: list[str], second: str = "") -> list[subprocess.Popen[str]]:
    """Both processes of a job, each with one CPU device; the second may be a script."""
    job = ["--distributed", f"--coordinator=127.0.0.1:{free_port()}"]
    job += ["--num-processes=2"]
    flag_lists = [[*flags, *job, f"--process-id={index}"] for index in range(2)]
    commands = [("-m", "lra_jax.train", *arguments) for arguments in flag_lists]
    if second:
        commands[1] = ("-c", second.replace("{flags}", repr(flag_lists[1])))
    return [
        helpers.start(*command, LRA_JAX_CPU_DEVICES="1", JAX_PLATFORMS="cpu")
        for command in commands
    ]


def end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit codes, outputs and errors."""
    ended = []
    for process in processes:
        out, err = process.communicate(timeout=200)
        ended.append((process.returncode, out, err))
    return ended


def test_an_error_of_one_process_ends_the_job_and_the_job_resumes(
    finished, tmp_path
) -> None:
    """With the losses of one process throughout."""
    two = finished.config.replace(workdir=str(tmp_path))
    # An orderly exit would wait for the other, which waits in an all-reduce.
    (code, _, err), (failed, _, why) = end(start_both(helpers.flags(two), FAILING))
    assert failed == 1 and "No space left on device" in why, why
    # Or JAX aborts the other, if its service notices first.
    assert code in (1, -signal.SIGABRT), err
    assert "lost another one" in err or "JAX distributed service" in err
    assert latest(tmp_path) == 10

    # A signal to one of them stops both after the same step, also where all is saved.
    processes = start_both(helpers.flags(two))
    wait(processes[0], lambda: latest(tmp_path) >= 20)
    processes[1].send_signal(signal.SIGTERM)
    ended = end(processes)
    codes = {code for code, _, _ in ended}
    assert codes == {128 + signal.SIGTERM}, ended
    assert "saved step" in ended[0][1] + ended[0][2], ended

    (code, out, err), (second, quiet, _) = end(start_both(helpers.flags(two)))
    assert (code, second) == (0, 0), err
    assert re.search(r"resuming from step (10|20|30|40)\b", out), out
    assert "2 processes" in out and "step" not in quiet
    lines = map(read_metrics, (tmp_path, finished.workdir))
    for mine, theirs in zip(*lines, strict=True):
        assert (mine["step"], mine["split"]) == (theirs["step"], theirs["split"])
        np.testing.assert_allclose(mine["loss"], theirs["loss"], rtol=1e-5)
    assert f"{finished.result.test_accuracy_last:.2f}" in out
    with Session(two, quiet=True) as session:
        few = "a checkpoint by 1 process, got one by 2 processes; start as many"
        with pytest.raises(ValueError, match=few):
            session.trainer.restore()


def test_a_coordinator_that_is_not_there(data_dir) -> None:
    """``--distributed`` alone, where no cluster is found."""
    flags = helpers.flags(helpers.tiny(data_dir))
    result = helpers.run("-m", "lra_jax.train", *flags, "--distributed")
    helpers.assert_one_error(
        result.returncode,
        result.stderr,
        2,
        "--distributed: expected a cluster",
        "--coordinator",
    )


def test_a_process_that_never_comes(data_dir) -> None:
    """The one that waits ends with a line, before JAX ends it with a stack trace."""
    flags = helpers.flags(helpers.tiny(data_dir))
    job = ["--distributed", f"--coordinator=127.0.0.1:{free_port()}"]
    job += ["--num-processes=2", "--process-id=0"]
    code = "from lra_jax import train; from lra_jax.training import hosts; "
    code += f"hosts.START_SECONDS = 1; train.main({[*flags, *job]})"
    result = helpers.run("-c", code, JAX_PLATFORMS="cpu")
    expected = (
        "--distributed: expected 2 processes at 127.0.0.1",
        "within 1 s, got fewer",
    )
    helpers.assert_one_error(result.returncode, result.stderr, 2, *expected)


def test_an_error_of_one_process_alone_is_no_lost_process() -> None:
    assert hosts.lost_process(RuntimeError("disk")) is None
    assert hosts.agree(3) == 3


def test_a_writer_that_fails_says_why() -> None:
    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        hosts.writer_first(fail)


def test_a_process_with_other_settings_stops_all(data_dir, tmp_path, monkeypatch):
    """Not its own: what it would train is another model on the same batches."""
    config = helpers.tiny(data_dir, tmp_path)
    with Session(config, quiet=True):
        pass
    monkeypatch.setattr(hosts, "is_writer", lambda: False)
    with Session(config.replace(data={"processes": 2}), quiet=True):
        pass
    other = Session(config.replace(seed=1), quiet=True)
    with pytest.raises(ValueError, match=r"another config: seed=0 \(now 1\)"), other:
        pass
