"""SIGTERM and Ctrl-C as a request to stop between two steps.

Orbax's own preemption check needs jax.distributed and stays silent in one process.
"""

import signal
from types import FrameType
from typing import Self


class StopRequest:
    """Context in which the first signal is noted, and a second one acts as usual.

    Attributes:
      signum: the signal received, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGINT, signal.SIGTERM):
            try:
                self._previous[signum] = signal.signal(signum, self._note)
            except ValueError:  # Not the main thread, as in some notebooks.
                break
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())
