"""Says how far long work is, where nothing else does: a line now and then."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")

# The first line comes after so many seconds, the next after twice as many, and so on.
_FIRST, _MOST = 2.0, 60.0


def told(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    """The same items; on the way a line on stdout now and then, with the time left.

    Work of less than two seconds says nothing, and so does one whose stdout is gone.

    Args:
      items: to go through.
      what: in words, as in ``train examples``.
      total: how many there are.
    """
    begun = time.monotonic()
    due, pause = begun + _FIRST, _FIRST
    for done, item in enumerate(items):
        yield item
        now = time.monotonic()
        if now >= due and done + 1 < total:
            left = (now - begun) / (done + 1) * (total - done - 1)
            say(f"{done + 1:,} of {total:,} {what}, about {left:.0f} s left")
            pause = min(2 * pause, _MOST)
            due = now + pause


def say(line: str) -> None:
    """Prints a line on the process's own stdout, if it has one that is read."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.__stdout__, flush=True)
