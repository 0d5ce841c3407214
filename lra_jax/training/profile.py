"""A trace of a few steps, for TensorBoard's profiler or Perfetto."""

import warnings
from pathlib import Path

import jax

_AFTER, _STEPS = 5, 10


class Profile:
    """Traces ten compiled steps, into ``profile/`` of a run; None = no trace."""

    def __init__(self, workdir: Path | None):
        self._folder = None if workdir is None else workdir / "profile"
        self._warm = 0
        self._active = False

    def step(self, last: jax.Array) -> None:
        """Call this before each step that is already compiled.

        ``last`` is a result of the step before, which may still be running.
        """
        if self._folder is None:
            return
        if self._warm in (_AFTER, _AFTER + _STEPS):
            jax.block_until_ready(last)
        if self._warm == _AFTER:
            jax.profiler.start_trace(str(self._folder))
            self._active = True
        self._warm += 1
        if self._warm > _AFTER + _STEPS:
            self.close()

    def close(self) -> None:
        """Ends the trace; warns if none was begun."""
        if self._active:
            jax.profiler.stop_trace()
        elif self._folder is not None:
            steps = "a step" if self._warm == 1 else f"{self._warm} steps"
            needed = f"after {_AFTER} compiled steps, and this run had {steps}"
            warnings.warn(f"--profile: no trace: it begins {needed}", stacklevel=2)
        self._active, self._folder = False, None
