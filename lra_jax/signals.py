"""SIGINT, SIGTERM and SIGPIPE: how a command reacts when asked to stop.

A command ends within three seconds, with one line and exit code 128 + signal: at once
if nothing is lost, after cleaning up if it makes data, and after saving if it trains a
model; a training step that takes longer is finished first. A second signal ends it at
once.

Python calls handlers of signals in the main thread, between two of its own
instructions. While that thread is in XLA's compiler, for minutes with a large model, or
waits for a device, no handler runs. So a thread that only waits for signals keeps these
promises. Before the first line of a command, for a few hundredths of a second, Python
handles signals in its own way.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PATIENCE = 2.5
# Ctrl-C reaches a sweep and the run that it started, to which the sweep passes it on:
# a signal within this many seconds of one that was acted on is the same.
_AGAIN = 1.0

Handler = Callable[[int, FrameType | None], object]
Reaction = Callable[[int], None]


def watch() -> None:
    """Handles signals from now on; call it at the start of a command's process.

    Closed streams become empty ones, since files opened later would take their numbers.
    """
    global _watch
    if _watch is None:
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(number, True)
        os.close(number)
        sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
        sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115
        _watch = _Watch()
        _watch.start()
    unblock()


def block() -> None:
    """Holds signals back while this process becomes another program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def unblock() -> None:
    """Lets signals through, also those that came in the meantime."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def advise(line: str) -> None:
    """Sets the line printed when the command is interrupted."""
    global advice
    advice = line


advice = "interrupted"


def ignore() -> None:
    """Lets no signal interrupt Python's own shutdown, which saves nothing."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


@contextlib.contextmanager
def raise_in_context() -> Iterator[None]:
    """Context that a signal ends by an exception, so that it can clean up.

    Then the command ends. Outside a command's process, signals act as usual.
    """
    if _watch is None:
        yield
        return
    came: list[int] = []

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not came:
            came.append(signum)
            raise KeyboardInterrupt

    with _reacting(_watch.end_later, interrupt):
        try:
            yield
        finally:
            if came:  # Whatever other code made of the exception.
                _watch.tell()
                raise Exit(128 + came[0]) from None


@contextlib.contextmanager
def leave_to(handler: Handler) -> Iterator[None]:
    """Context in which only this function handles signals, in the main thread.

    It also gets a signal that came just before, which the thread leaves to it.
    """
    with _reacting(None, handler):
        if _watch is not None and _watch.noted:
            handler(_watch.noted.pop(), None)
        yield


class StopRequest:
    """Context in which the first signal is recorded, and a second one acts as usual.

    Orbax's own preemption check needs jax.distributed and is silent in one process. If
    the process is not ``alone``, others of the same run would lose it.

    Attributes:
      signum: the signal received, or None.
      unsaved: whether anything would be lost; if not, a command that is alone ends at
        once.
    """

    def __init__(self, alone: bool = True) -> None:
        self.signum: int | None = None
        self.unsaved = False
        self._alone = alone
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # Not the main thread, as in notebooks.
            self._stack.enter_context(_reacting(self._react, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        if _watch is None:
            self._stack.close()

    def _react(self, signum: int) -> None:
        if self.unsaved or not self._alone:
            _later(self._say)
        elif _watch is not None:
            _watch.end(signum)

    def _say(self) -> None:
        if self.unsaved or not self._alone:
            when = (
                "after the current step" if self._alone else "with the other processes"
            )
            _say(f"stopping {when}; a second signal ends at once")


class Exit(SystemExit):
    """The end of a command, unlike a `SystemExit` that a user's attention raises."""


class _Watch(threading.Thread):
    """Waits for signals, and reacts to each.

    Attributes:
      noted: signals for which no other handler was there.
      react: called with the next signal; None leaves all of them to the handler.
    """

    def __init__(self) -> None:
        super().__init__(name="signals", daemon=True)
        self.noted: list[int] = []
        self.react: Reaction | None = self.end
        self._untold = threading.Lock()
        self._reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)
        for signum in SIGNALS:  # Otherwise a shell's background job ignores SIGINT.
            signal.signal(signum, lambda signum, _: self.noted.append(signum))

    def run(self) -> None:
        """Reacts to the first signal as the context says; a second one ends at once."""
        last = -math.inf
        while True:
            (signum,) = os.read(self._reading, 1)
            now, react = time.monotonic(), self.react
            if signum in SIGNALS and now - last > _AGAIN:
                last = now
                if react is not None:
                    self.react = self.end
                    react(signum)

    def end(self, signum: int) -> None:
        """Ends the process, whatever the main thread is doing."""
        self.tell()
        os._exit(128 + signum)

    def end_later(self, signum: int) -> None:
        """Ends the process if it has not cleaned up in time."""
        _later(lambda: self.end(signum))

    def tell(self) -> None:
        """Prints once that the command was interrupted."""
        if self._untold.acquire(blocking=False):
            _say(f"error: {advice}")


_watch: _Watch | None = None


@contextlib.contextmanager
def _reacting(react: Reaction | None, handler: Handler) -> Iterator[None]:
    """Context in which a signal calls ``react`` at once, in the thread that waits for
    signals, if there is one, and ``handler`` in the main thread, as soon as it can."""
    usual = None if _watch is None else _watch.react
    if _watch is not None:
        _watch.react = react
    try:
        before = {signum: signal.signal(signum, handler) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, earlier in before.items():
                signal.signal(signum, earlier)
    finally:
        if _watch is not None:
            _watch.react = usual


def _later(call: Callable[[], None]) -> None:
    """Calls a function after a while, if the process is still running."""
    timer = threading.Timer(_PATIENCE, call)
    timer.daemon = True
    timer.start()


def _say(line: str) -> None:
    """Writes a line bypassing Python's buffers, which the main thread may hold."""
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")  # A progress bar hides the cursor.
        os.write(2, f"{line}\n".encode())
