"""The parts of the accelerator's view, each in a process of its own.

A part that crashes, hangs or fills the memory costs itself alone, and one process at a
time holds the accelerator. Nothing here imports jax.
"""

import contextlib
import dataclasses
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from lra_jax import signals

# From being told to end until it is made to: a training saves first.
_GRACE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
      name: also of its files.
      seconds: it is ended after so long. All parts together have 20 minutes.
      task: the training's, for a part that is one.
      environment: what its process has beside the caller's variables.
    """

    name: str
    seconds: float
    task: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


_ON_THE_CPU = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}

DEVICE = Part("device", 40)
"""Says which device there is. It is done in every call, as a check on the others."""

PARTS = (
    Part("reference", 150, environment=_ON_THE_CPU),
    Part("correctness", 170),
    Part("times", 190),
    Part("times-causal", 190),
    Part("kernels", 60),
    Part("kernel-times", 40),
    Part("kernel-times-causal", 40),
    Part("flash-linear-attention", 50),
    Part("listops", 150, task="listops"),
    Part("lm", 100, task="lm"),
)


def names() -> list[str]:
    """Of the parts that ``--part`` does."""
    return [part.name for part in (DEVICE, *PARTS) if part.task is None]


class Stopped(Exception):
    """A signal ended the command.

    Attributes:
      signum: the signal.
    """

    def __init__(self, signum: int):
        super().__init__(f"stopped by signal {signum}")
        self.signum = signum


def run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
) -> str | None:
    """Runs a process to its end; its output goes into a file.

    Args:
      command: program and arguments.
      environment: what it has beside this process's variables.
      log: the file.
      seconds: after which it is told to end.

    Returns:
      None if it succeeded; else what went wrong, in words.

    Raises:
      Stopped: this process was told to stop, and has stopped the other.
    """
    # A training takes memory as it needs it, so what other programs hold is left alone.
    own = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **environment}
    received: list[int] = []
    child = None

    def stop(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if child is not None:
            _tell(child, signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    with log.open("w", encoding="utf-8") as output, signals.left_to(stop):
        child = subprocess.Popen(
            command,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A terminal's Ctrl-C reaches this process alone, which passes it on once.
            process_group=0,
        )
        if received:
            _tell(child, signal.SIGTERM)
        timed_out = not _ended(child, seconds, received)
        if timed_out:
            _tell(child, signal.SIGTERM)
            if not _ended(child, _GRACE_SECONDS, []):
                _tell(child, signal.SIGKILL)
        code = child.wait()
    if received:
        raise Stopped(received[0])
    if timed_out:
        return f"ended after {seconds:g} s, its time limit"
    return None if code == 0 else _in_words(code, log)


def _ended(
    child: subprocess.Popen[bytes], seconds: float, received: Sequence[int]
) -> bool:
    """Whether a process ends in time; after a signal it has but the grace."""
    left = seconds
    while left > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(min(left, 1.0))
            return True
        left = min(left - 1.0, _GRACE_SECONDS) if received else left - 1.0
    return False


def _tell(child: subprocess.Popen[bytes], signum: int) -> None:
    """Sends a signal; that to end at once also goes to the processes it started."""
    with contextlib.suppress(ProcessLookupError):
        if signum == signal.SIGKILL:
            os.killpg(child.pid, signum)
        else:
            child.send_signal(signum)


def _in_words(code: int, log: Path) -> str:
    """The last line that a process wrote, with how it ended if that was a signal."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1].removeprefix("error: ")[:300] if lines else "no output"
    if code >= 0:
        return f"exit code {code}: {last}"
    return f"ended by {signal.Signals(-code).name}: {last}"
