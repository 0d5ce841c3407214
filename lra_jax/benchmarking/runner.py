"""Runs cases: those that do not fit or take too long are reported, not tried.

Cases with the same work, dtype and length are timed in turns, so that a slow spell of
the machine affects all of them. The exceptions are cases whose arguments together would
fill the memory, and those with long calls: these outlast a spell, and between other
programs they would find memory fragmented, and pay for fetching it from the system.
"""

import contextlib
import itertools
import math
import os
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from lra_jax.benchmarking.cases import Case
from lra_jax.benchmarking.programs import Program, available_bytes
from lra_jax.benchmarking.roofline import Roofline
from lra_jax.benchmarking.settings import BenchmarkConfig
from lra_jax.benchmarking.works import Unsupported
from lra_jax.errors import first_line

Row = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")

# A larger share of the roofline says that the roofline was measured on a busy machine.
# Arrays that stay in the caches explain a little more than the whole.
_LARGEST_SHARE = 1.5
# From this time on, a program's calls are timed in a row.
_LONG_SECONDS = 0.2


class Runner:
    """Measures cases, shortest first, and keeps a row for each.

    Args:
      config: how often, and which cases are too long or too large.
      roofline: the roofline of this machine.
      on_row: called with each new row.

    Attributes:
      rows: a row for each case so far. ``status`` is "measured", or "does not fit",
        "left out", "not supported" or "failed", each with a ``reason``.
      interrupted: whether Ctrl-C ended the run.
    """

    def __init__(
        self,
        config: BenchmarkConfig,
        roofline: Roofline,
        on_row: Callable[[Row], None] = lambda row: None,
    ):
        self.rows: list[Row] = []
        self.interrupted = False
        self._config, self._roofline, self._on_row = config, roofline, on_row
        self._repeats = min(config.repeats, 2) if config.quick else config.repeats
        # A sample of a fast case is the mean of calls that take this long.
        self._min_seconds = 0.0 if config.quick else 0.02
        # For each line: the lengths and times so far, and where it stopped.
        self._known: dict[tuple, dict[int, float]] = {}
        self._stopped: dict[tuple, str] = {}

    def run(self, cases: Iterable[Case]) -> list[Row]:
        """Measures all cases; Ctrl-C ends it early, with the rows so far."""

        def together(case: Case) -> tuple:
            return case.work, case.dtype, case.length

        ordered = sorted(cases, key=together)
        try:
            for _, group in itertools.groupby(ordered, together):
                self._run_group(list(group))
        except KeyboardInterrupt:
            self.interrupted = True
        return self.rows

    def _run_group(self, cases: list[Case]) -> None:
        programs = []
        with contextlib.closing(side_by_side(_compile, cases)) as compiled:
            for case, program in zip(cases, compiled, strict=True):
                problem = self._why_not(case, program)
                if problem is not None:
                    status, reason = problem
                    self._add(case, program, status, reason=reason)
                elif not isinstance(program, Exception):
                    programs.append(program)
        limit = self._limit()
        needed = sum(program.memory.peak for program in programs)
        if limit is None or needed < limit / 2:
            self._time(programs)
        else:
            for program in programs:
                self._time([program])

    def _why_not(
        self, case: Case, program: Program | Exception
    ) -> tuple[str, str] | None:
        """Why a case is not run: the status and the reason; None = it is."""
        if isinstance(program, Unsupported):
            return "not supported", str(program)
        if isinstance(program, Exception):
            return _failure(program)
        limit, needed = self._limit(), program.memory.peak
        if limit is not None and needed > limit:
            where = "free" if self._config.max_gb is None else "allowed by --max-gb"
            reason = f"{needed / 1e9:,.3g} GB needed, {limit / 1e9:,.3g} GB {where}"
            return "does not fit", reason
        if case.line in self._stopped:
            return "left out", self._stopped[case.line]
        known = sorted(self._known.get(case.line, {}).items())
        shorter = [(length, x) for length, x in known if length < case.length]
        seconds = expected_seconds(shorter, case.length)
        if seconds <= self._config.max_seconds:
            return None
        reason = f"a call would take about {seconds:,.1f} s"
        self._stopped[case.line] = f"{reason} at {case.length:,} tokens"
        return "left out", reason

    def _time(self, programs: Sequence[Program]) -> None:
        """Times programs in turns."""
        samples: dict[Program, list[float]] = {}
        try:
            for program in programs:
                try:
                    first = program.load(self._min_seconds)
                except jax.errors.JaxRuntimeError as error:
                    program.unload()
                    status, reason = _failure(error)
                    self._add(program.case, None, status, reason=reason)
                    continue
                # One sample is enough for a case that took long.
                is_slow = first > self._config.max_seconds
                samples[program] = [first] if is_slow else []
                if first > _LONG_SECONDS:
                    self._sample({program: samples[program]})
                    program.unload()
            self._sample({p: samples[p] for p in samples if p.is_loaded})
        finally:  # Also after Ctrl-C: measurements so far are kept.
            for program in programs:
                program.unload()
                if samples.get(program):
                    self._add_measured(program, samples[program])

    def _sample(self, samples: Mapping[Program, list[float]]) -> None:
        """Adds samples to each program, in turns."""
        for _ in range(self._repeats):
            for program, seconds in samples.items():
                if sum(seconds) <= self._config.max_seconds:
                    seconds.append(program.sample())

    def _add_measured(self, program: Program, samples: list[float]) -> None:
        case, median = program.case, statistics.median(samples)
        floor, bound = self._roofline.floor(case, program.least_bytes)
        share = floor / median
        known = {"roofline_share": share, "roofline_bound": bound}
        tokens = case.batch_size * (1 if case.work == "decode" else case.length)
        self._known.setdefault(case.line, {})[case.length] = median
        self._add(
            case,
            program,
            "measured",
            median_ms=1e3 * median,
            fastest_ms=1e3 * min(samples),
            slowest_ms=1e3 * max(samples),
            samples=len(samples),
            tokens_per_second=tokens / median,
            **(known if share <= _LARGEST_SHARE else {}),
        )

    def _add(
        self, case: Case, program: Program | Exception | None, status: str, **more: Any
    ) -> None:
        row = {**case.to_dict(), "status": status, **more}
        if program is not None and not isinstance(program, Exception):
            row["peak_bytes"] = program.memory.peak
            row["temporary_bytes"] = program.memory.temporary
            row["compile_seconds"] = program.compile_seconds
        self.rows.append(row)
        self._on_row(row)

    def _limit(self) -> int | None:
        most = self._config.max_gb
        return available_bytes() if most is None else round(most * 1e9)


def _failure(error: Exception) -> tuple[str, str]:
    """The status and the reason of a case that failed."""
    text = first_line(error)
    # XLA reports this itself if the analysis of the program did not foresee it.
    return "does not fit" if "RESOURCE_EXHAUSTED" in text else "failed", text


def side_by_side(
    function: Callable[[T], R], items: Iterable[T]
) -> Generator[R, None, None]:
    """The results of functions that mainly compile, in order; several at once.

    An accelerator's host has little else to do. On a CPU each takes several threads
    anyway, and one at a time needs the least memory. Closing it, as after Ctrl-C,
    leaves out those that have not begun.
    """
    on_cpu = jax.default_backend() == "cpu"
    pool = ThreadPoolExecutor(1 if on_cpu else min(8, os.cpu_count() or 1))
    try:
        yield from pool.map(function, items)
    finally:
        pool.shutdown(cancel_futures=True)


def _compile(case: Case) -> Program | Exception:
    """The program of a case, or why it has none."""
    try:
        return Program(case)
    except (
        Unsupported,
        jax.errors.JaxRuntimeError,
        ValueError,
        NotImplementedError,
    ) as error:
        return error


def expected_seconds(known: Sequence[tuple[int, float]], length: int) -> float:
    """The expected seconds of a call, from the times at shorter lengths; 0 = unknown.

    Two or more times give the exponent, from the last two, at least 1; with only one,
    the time is assumed to be quadratic, as in softmax attention.
    """
    if not known:
        return 0.0
    last, seconds = known[-1]
    power = 2.0
    if len(known) > 1:
        before, earlier = known[-2]
        measured = math.log(seconds / earlier) / math.log(last / before)
        power = min(max(measured, 1.0), 2.2)
    return seconds * (length / last) ** power


def exponent(lengths: Sequence[int], costs: Sequence[float]) -> float | None:
    """Slope of log cost over log length, by least squares; None below two lengths.

    Uses lengths from 4,096 on if there are two of them, because shorter calls are
    dominated by fixed costs. 1 is linear, 2 quadratic.
    """
    points = list(zip(lengths, costs, strict=True))
    long = [point for point in points if point[0] >= 4096]
    points = long if len(long) > 1 else points
    if len({length for length, _ in points}) < 2:
        return None
    xs, ys = np.log(np.maximum(points, 1e-12)).T
    return float(np.polyfit(xs, ys, 1)[0])
