"""A compiled case: its memory, whether that is available, and how long it takes."""

import contextlib
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lra_jax import runtime
from lra_jax.benchmarking.cases import Case
from lra_jax.benchmarking.works import make_work


class Memory(NamedTuple):
    """Bytes of a compiled program, as the compiler reports them."""

    arguments: int
    results: int
    temporary: int
    aliased: int  # results that overwrite arguments

    @property
    def peak(self) -> int:
        """Peak of the whole call: arguments, results and temporary memory."""
        return self.arguments + self.results - self.aliased + self.temporary


class Program:
    """One compiled case; holds no arrays before `load`.

    Attributes:
      case: what it does.
      memory: the memory that it needs.
      compile_seconds: time to compile it.
    """

    def __init__(self, case: Case):
        self.case = case
        self._work = work = make_work(case)
        function: Any = work.function
        if not hasattr(function, "lower"):
            function = jax.jit(function, donate_argnums=work.donated)
        start = time.perf_counter()
        self._call = function.lower(*jax.eval_shape(work.make)).compile()
        self.compile_seconds = time.perf_counter() - start
        # Compiled, because a model consists of many arrays.
        self._make = jax.jit(work.make).lower().compile()
        sizes: Any = self._call.memory_analysis()
        self.memory = Memory(
            sizes.argument_size_in_bytes,
            sizes.output_size_in_bytes,
            sizes.temp_size_in_bytes,
            sizes.alias_size_in_bytes,
        )
        self._arguments: Any = None
        self._calls = 1

    @property
    def least_bytes(self) -> int:
        """The least that is read and written: arguments and results, each once."""
        kept = self.memory.aliased if self._work.appends else 0
        return self.memory.arguments + self.memory.results - kept

    @property
    def is_loaded(self) -> bool:
        """Whether its arguments are in memory."""
        return self._arguments is not None

    def load(self, min_seconds: float) -> float:
        """Makes the arguments and calls twice; returns the second call's seconds. A
        sample will consist of as many calls as take `min_seconds`."""
        self._arguments = jax.block_until_ready(self._make())
        self._run(1)  # Touches its memory for the first time.
        seconds = self._run(1)
        self._calls = max(1, min(1000, round(min_seconds / max(seconds, 1e-6))))
        return seconds

    def sample(self) -> float:
        """Seconds of one call, the mean of a few in a row."""
        return self._run(self._calls) / self._calls

    def unload(self) -> None:
        """Frees the arguments, and returns all freed memory to the system."""
        self._arguments = None
        runtime.release_memory()

    def _run(self, calls: int) -> float:
        # An accelerator executes calls in order, so waiting only for the last one
        # excludes the gaps of dispatch. A CPU might run them in parallel.
        wait_for_each = jax.default_backend() == "cpu"
        results = None
        start = time.perf_counter()
        for _ in range(calls):
            results = self._call(*self._arguments)
            self._arguments = self._work.feed(self._arguments, results)
            if wait_for_each:
                jax.block_until_ready(results)
        jax.block_until_ready(results)
        return time.perf_counter() - start


def available_bytes() -> int | None:
    """Free memory on the first device; None if the system does not report it."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        if "bytes_limit" not in statistics:
            return None
        return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
    free = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        numbers = _numbers(Path("/proc/meminfo"))
        free.append(1024 * numbers["MemAvailable:"])
    group = Path("/sys/fs/cgroup")  # A container may have its own limit.
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit, used = (
            int((group / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        # The file cache counts as used but can be reclaimed.
        free.append(limit - used + _numbers(group / "memory.stat")["inactive_file"])
    half = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return min(free, default=half)


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines}
