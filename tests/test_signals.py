"""How a command's process reacts when asked to stop, whatever the command does."""

import signal

import helpers
import pytest

from lra_jax import signals

# The thread that reads signals sees this one only when the context has begun to leave
# them to its function, which is not there yet.
IN_BETWEEN = """
import os, signal, time
from lra_jax import signals

signals.watch()
set_handler = signal.signal

def slow(signum, handler):
    signal.signal = set_handler
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    return set_handler(signum, handler)

signal.signal = slow
came = []
with signals.leave_to(lambda signum, frame: came.append(int(signum))):
    print(came)
"""


def test_a_signal_before_its_handler_is_not_lost() -> None:
    end = helpers.run("-c", IN_BETWEEN)
    assert end.stdout == "[2]\n", end.stderr


# As in a compiler: the main thread does not come back to Python in time.
BUSY = """
import hashlib, os, signal, threading, time
from lra_jax import signals

signals.watch()
signals.advise("interrupted, as advised")

def send(count):
    for _ in range(count):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.2)

threading.Thread(target=send, args=({count},), daemon=True).start()
with signals.StopRequest() as stop:
    stop.unsaved = {unsaved}
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("unsaved", "count"), [(False, 1), (True, 2)])
def test_a_busy_main_thread_is_ended(unsaved: bool, count: int) -> None:
    """At once if all is saved, else by the second signal, with one line and a code."""
    end = helpers.run("-c", BUSY.format(unsaved=unsaved, count=count))
    assert end.returncode == 128 + signal.SIGTERM
    assert end.stderr == "error: interrupted, as advised\n"


@pytest.mark.parametrize(("alone", "ends"), [(True, True), (False, False)])
def test_one_of_several_processes_does_not_end_at_once(
    alone: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if all is saved: the others would lose it."""
    ended: list[int] = []
    monkeypatch.setattr(
        signals._Watch, "end", lambda self, signum: ended.append(signum)
    )
    monkeypatch.setattr(signals, "_later", lambda call: None)
    monkeypatch.setattr(signals, "_watch", signals._Watch.__new__(signals._Watch))
    signals.StopRequest(alone)._react(signal.SIGTERM)
    assert ended == [signal.SIGTERM] * ends
