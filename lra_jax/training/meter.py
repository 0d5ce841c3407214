"""Training time, with and without pauses."""

import contextlib
import time
from collections.abc import Iterator


class Meter:
    """Wall time of a run over all its sessions, and training speed without pauses."""

    def __init__(self, step: int, seconds: float):
        self._start = time.perf_counter() - seconds
        self._mark, self._marked_step = time.perf_counter(), step
        self.warm, self.data_wait, self.seconds_then = True, 0.0, seconds
        self._cold_steps, self._cold_seconds, self._waited = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far, evaluations and saves included."""
        return time.perf_counter() - self._start

    def speed(self, step: int) -> float:
        """Steps per second since the last call, excluding pauses.

        Steps that compiled are excluded too, unless there are no others; then ``warm``
        is False. Sets ``data_wait`` to the share of that time, 0..1, spent waiting for
        the next batch, and ``seconds_then`` to ``seconds`` at this moment.
        """
        now, steps = time.perf_counter(), step - self._marked_step
        spent = now - self._mark
        self.warm = self._cold_steps < steps
        if self.warm:
            steps, spent = steps - self._cold_steps, spent - self._cold_seconds
        self._mark, self._marked_step = now, step
        self.seconds_then = now - self._start
        spent = max(spent, 1e-9)
        self.data_wait = self._waited / spent
        self._cold_steps, self._cold_seconds, self._waited = 0, 0.0, 0.0
        return steps / spent

    @contextlib.contextmanager
    def wait(self) -> Iterator[None]:
        """Context in which the loop waits for a batch."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    @contextlib.contextmanager
    def leave_out(self) -> Iterator[None]:
        """Context of a step that compiles."""
        start = time.perf_counter()
        yield
        self._cold_steps += 1
        self._cold_seconds += time.perf_counter() - start

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context whose time does not count towards ``speed``."""
        start = time.perf_counter()
        yield
        self._mark += time.perf_counter() - start
