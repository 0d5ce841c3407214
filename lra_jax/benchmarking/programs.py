"""A compiled case: its memory, whether that is available, and how long it takes."""

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
        begun = time.perf_counter()
        self._call = function.lower(*jax.eval_shape(work.make)).compile()
        self.compile_seconds = time.perf_counter() - begun
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
    def loaded(self) -> bool:
        """Whether its arguments are in memory."""
        return self._arguments is not None

    def load(self, min_seconds: float) -> float:
        """Makes the arguments and calls twice; returns the second call's seconds.

        Args:
          min_seconds: a sample will consist of as many calls as take this long.
        """
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
        begun = time.perf_counter()
        for _ in range(calls):
            results = self._call(*self._arguments)
            self._arguments = self._work.feed(self._arguments, results)
            if wait_for_each:
                jax.block_until_ready(results)
        jax.block_until_ready(results)
        return time.perf_counter() - begun


def available_bytes() -> int | None:
    """Free memory on the first device; None if the system does not report it."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        statistics = device.memory_stats() or {}
        if "bytes_limit" not in statistics:
            return None
        return statistics["bytes_limit"] - statistics.get("bytes_in_use", 0)
    free = [size for size in (_free_on_linux(), _free_in_group()) if size is not None]
    if free:
        return min(free)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (ValueError, OSError):
        return None


def _free_on_linux() -> int | None:
    file = Path("/proc/meminfo")
    for line in file.read_text().splitlines() if file.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _free_in_group() -> int | None:
    """The same for a container with its own limit."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return int(limit) - used + _file_cache(group) if limit.isdecimal() else None


def _file_cache(group: Path) -> int:
    """The file cache, which counts as used but can be reclaimed."""
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(maxsplit=1) for line in lines)
    return int(sizes.get("inactive_file", 0))
