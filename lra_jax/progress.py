"""Reports the progress of long work without a bar: a line now and then."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

# Seconds before the first line; the interval then doubles up to a maximum, on a
# terminal or in a file.
_FIRST, _MOST_SHOWN, _MOST_KEPT = 2.0, 5.0, 10.0


class Clock:
    """Prints the progress of work on ``total`` items now and then, with the time left.

    ``what`` names them, as in ``train examples``; ``tell`` prints a line, by default on
    stdout. Work of less than two seconds prints nothing.
    """

    def __init__(
        self, what: str, total: int, tell: Callable[[str], None] | None = None
    ):
        self._what, self._total, self._done = what, total, 0
        self._tell = tell or say
        self._pause, self._due = _FIRST, time.monotonic() + _FIRST
        self._first = math.nan
        stdout = sys.__stdout__
        shown = stdout is not None and not stdout.closed and stdout.isatty()
        self._most = _MOST_SHOWN if shown else _MOST_KEPT

    def tick(self) -> None:
        """Counts one more item as done."""
        self._done += 1
        now = time.monotonic()
        if self._done == 1:  # It includes the start: processes, compilation.
            self._first = now
        if now >= self._due and self._done < self._total:
            left = ""
            if self._done > 1:
                each = (now - self._first) / (self._done - 1)
                left = f", about {each * (self._total - self._done):.0f} s left"
            self._tell(f"{self._done:,} of {self._total:,} {self._what}{left}")
            self._pause = min(2 * self._pause, self._most)
            self._due = now + self._pause


def track(
    items: Iterable[Item],
    what: str,
    total: int,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Item]:
    """Yields the same items, with a `Clock` of the other arguments counting them."""
    clock = Clock(what, total, tell)
    for item in items:
        yield item
        clock.tick()


def announce(names: Sequence[str], kind: str) -> Iterator[str]:
    """Yields the names, each after a line on stdout that says which it is."""
    for count, name in enumerate(names, 1):
        say(f"{name} ({count} of {len(names)} {kind}) ...")
        yield name


def note(line: str) -> None:
    """Prints a line on stderr if it is a terminal, for commands that output text."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def aside(line: str) -> None:
    """Prints a line on stderr, so that it does not get into a command's output."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Prints a line on the process's own stdout, if there is one that is read."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.__stdout__, flush=True)
