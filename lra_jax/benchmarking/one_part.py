"""The work of one part of the accelerator's view, in its process.

It leaves a JSON file with its results, or with ``skipped``, the reason why there are
none. Rows are on disk as soon as they are measured, in case the process ends, and the
next process of the part goes on from there.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lra_jax.benchmarking import correctness, rivals, runner
from lra_jax.benchmarking.report import Report
from lra_jax.benchmarking.settings import BenchmarkConfig, make_cases, timing
from lra_jax.files import write_json
from lra_jax.training.machine import commit, describe_devices, versions

REFERENCES = "reference"
"""The folder of the references, next to the files of the parts."""

Say = Callable[[str], None]


def run(config: BenchmarkConfig, file: Path, say: Say) -> None:
    """Runs the part that a config names, and writes the file.

    Raises:
      KeyboardInterrupt: Ctrl-C; the rows so far are in the file.
    """
    jobs: dict[str | None, Callable[[], None]] = {
        "device": lambda: _device(file),
        "reference": lambda: _references(config, file, say),
        "correctness": lambda: _compare(config, file, correctness.make_cases, say),
        "times": lambda: _times(timing(config, causal=False), file, say),
        "times-causal": lambda: _times(timing(config, causal=True), file, say),
        "kernels": lambda: _kernels(config, file, say),
        "kernel-times": lambda: _kernel_times(config, False, file, say),
        "kernel-times-causal": lambda: _kernel_times(config, True, file, say),
        rivals.NAME: lambda: _rivals(config, file, say),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    jobs[config.part]()


def _device(file: Path) -> None:
    found = {"commit": commit(), "device": describe_devices(), "versions": versions()}
    write_json(file, found)


def _references(config: BenchmarkConfig, file: Path, say: Say) -> None:
    cases = correctness.reference_cases(config)
    correctness.write_references(cases, file.parent / REFERENCES, say)
    write_json(file, {"cases": len(cases)})


def _compare(
    config: BenchmarkConfig,
    file: Path,
    make: Callable[[BenchmarkConfig], Sequence[Any]],
    say: Say,
) -> None:
    rows = [row for row in _before(file)["rows"] if row["status"] != "failed"]
    names = ("attention", "causal", "rows", "dtype")
    done = [tuple(row[name] for name in names) for row in rows]
    left = [
        (case, file.parent / REFERENCES, dtype)
        for case in make(config)
        for dtype in correctness.TOLERANCES
        if (case.attention, case.causal, case.rows, dtype) not in done
    ]
    made = runner.side_by_side(lambda job: correctness.compare(*job), left)
    with contextlib.closing(made):
        for row in made:
            rows.append(row)
            say(correctness.in_words(row))
            write_json(file, {"tolerances": correctness.TOLERANCES, "rows": rows})


def _before(file: Path) -> dict[str, Any]:
    """The results of earlier processes of the part."""
    return json.loads(file.read_text("utf-8")) if file.exists() else {"rows": []}


def _kernels(config: BenchmarkConfig, file: Path, say: Say) -> None:
    reason = _no_kernels(config, tuple(correctness.TOLERANCES))
    if reason is not None:
        write_json(file, {"skipped": reason})
        return
    _compare(config, file, correctness.kernel_cases, say)


def _no_kernels(config: BenchmarkConfig, dtypes: Sequence[str]) -> str | None:
    """Why none of the kernels runs here; None = at least one does."""
    reason: str | None = "none of --attention has kernels"
    for case in correctness.kernel_cases(config):
        for dtype in dtypes:
            reason = correctness.refused(case, dtype)
            if reason is None:
                return None
    return reason


def _kernel_times(config: BenchmarkConfig, causal: bool, file: Path, say: Say) -> None:
    cases = correctness.kernel_cases(config)
    names = list(dict.fromkeys(case.name for case in cases))
    subjects = [
        f"{name}[implementation={x}]" for name in names for x in ("xla", "pallas")
    ]
    chosen = timing(config, causal, ",".join(subjects))
    reason = _no_kernels(config, (chosen.dtypes or "").split(","))
    if reason is not None:
        write_json(file, {"skipped": reason})
        return
    _times(chosen, file, say)


def _times(config: BenchmarkConfig, file: Path, say: Say) -> None:
    report = Report(config, "")

    def keep() -> None:
        wanted = ("settings", "softmax_fused", "roofline", "rows", "exponents")
        values = report.values()
        write_json(file, {name: values[name] for name in wanted})

    report.measure(say, keep, _before(file) if file.exists() else None)
    keep()
    if report.interrupted:
        raise KeyboardInterrupt


def _rivals(config: BenchmarkConfig, file: Path, say: Say) -> None:
    reason = rivals.missing()
    if reason is not None:
        write_json(file, {"skipped": reason})
        return
    chosen = timing(config, causal=True)
    cases = make_cases(chosen, on_cpu=False)
    rows = [row for row in _before(file)["rows"] if row["status"] == "measured"]

    def keep(row: rivals.Row) -> None:
        rows.append(row)
        say(f"{row['attention']}  {row['work']}  {row['length']:,}  {row['status']}")
        write_json(file, {"versions": rivals.versions(), "rows": rows})

    rivals.measure(cases, chosen.repeats, chosen.max_seconds, keep, rows)
