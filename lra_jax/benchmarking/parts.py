"""The parts of the accelerator's view, each in its own process.

A part that crashes, hangs or fills the memory affects only itself, and one process at a
time holds the accelerator. Nothing here imports jax.
"""

import dataclasses
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lra_jax import signals

# Time between the request to end and the kill: a training saves first.
_GRACE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
      name: its name, and that of its files.
      seconds: its time limit. All parts together have 20 minutes.
      title: its name on the page.
      task: the task, if the part is a training.
      environment: its process's variables, in addition to the caller's.
    """

    name: str
    seconds: float
    title: str = ""
    task: str | None = None
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


_ON_THE_CPU = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}

DEVICE = Part("device", 40)
"""Reports the device. It runs in every call, as a check on the others."""

PARTS = (
    Part("reference", 90, "References on the CPU, in float64", environment=_ON_THE_CPU),
    Part("correctness", 360, "Errors of the mechanisms"),
    Part("times", 190, "Times"),
    Part("times-causal", 190, "Times of the causal forms"),
    Part("listops", 150, "Training on ListOps", task="listops"),
    Part("lm", 90, "Training of a language model", task="lm"),
)


def names() -> list[str]:
    """The names that ``--part`` accepts."""
    return [part.name for part in (DEVICE, *PARTS) if part.task is None]


def run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, seconds: float
) -> str | None:
    """Runs a process to its end, with its output written to a log.

    After its seconds, or on Ctrl-C, it is asked to end.

    Returns:
      None if it succeeded; else what went wrong, in words.
    """
    # A training allocates memory as needed, so other programs keep theirs.
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, **environment}
    with (
        log.open("w", encoding="utf-8") as output,
        signals.leave_to(signal.default_int_handler),
        subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A terminal's Ctrl-C reaches only this process, which passes it on once.
            process_group=0,
        ) as child,
    ):
        try:
            child.wait(seconds)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            child.terminate()
            try:
                child.wait(_GRACE_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(child.pid, signal.SIGKILL)
            if isinstance(stop, KeyboardInterrupt):
                raise
            return f"ended after {seconds:g} s, its time limit"
    return None if child.returncode == 0 else _in_words(child.returncode, log)


def _in_words(code: int, log: Path) -> str:
    """The last line that a process wrote, and the signal that ended it, if one did."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1].removeprefix("error: ")[:300] if lines else "no output"
    if code >= 0:
        return f"exit code {code}: {last}"
    return f"ended by {signal.Signals(-code).name}: {last}"
