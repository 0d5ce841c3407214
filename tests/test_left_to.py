"""How a command's process reacts when asked to stop."""

import helpers

# The thread that reads signals sees this one only when the context has begun to leave
# them to its function, which is not there yet.
_IN_BETWEEN = """
import contextlib, os, signal, time
from lra_jax import signals

signals.watch()
acting = signals._watch.acting

@contextlib.contextmanager
def slow(action):
    with acting(action):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        yield

signals._watch.acting = slow
came = []
with signals.left_to(lambda signum, frame: came.append(int(signum))):
    print(came)
"""


def test_a_signal_before_its_handler_is_not_lost() -> None:
    end = helpers.run("-c", _IN_BETWEEN)
    assert end.stdout == "[2]\n", end.stderr
