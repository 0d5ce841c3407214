"""Says how far long work is, where nothing else does: a line now and then."""

import contextlib
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

# The first line comes after so many seconds, the next after twice as many, and so on,
# up to the most on a terminal, or in a file.
_FIRST, _MOST_SHOWN, _MOST_KEPT = 2.0, 5.0, 10.0


class Clock:
    """Says on stdout now and then how far work is, with the time left.

    Work of less than two seconds says nothing, and so does one whose stdout is gone.

    Args:
      what: in words, as in ``train examples``.
      total: how many there are.
    """

    def __init__(self, what: str, total: int):
        self._what, self._total, self._done = what, total, 0
        self._pause, self._due = _FIRST, time.monotonic() + _FIRST
        self._first = math.nan
        stdout = sys.__stdout__
        shown = stdout is not None and not stdout.closed and stdout.isatty()
        self._most = _MOST_SHOWN if shown else _MOST_KEPT

    def tick(self) -> None:
        """One more is done."""
        self._done += 1
        now = time.monotonic()
        if self._done == 1:  # It has the start in it: processes, compilation.
            self._first = now
        if now >= self._due and self._done < self._total:
            left = ""
            if self._done > 1:
                each = (now - self._first) / (self._done - 1)
                left = f", about {each * (self._total - self._done):.0f} s left"
            say(f"{self._done:,} of {self._total:,} {self._what}{left}")
            self._pause = min(2 * self._pause, self._most)
            self._due = now + self._pause


def told(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """The same items, counted on the way by a `Clock` of the other arguments."""
    clock = Clock(what, total)
    for item in items:
        yield item
        clock.tick()


def note(line: str) -> None:
    """Prints a line on a terminal's stderr, for commands whose stdout is a text."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Prints a line on the process's own stdout, if it has one that is read."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.__stdout__, flush=True)
