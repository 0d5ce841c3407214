"""The work of one part of the accelerator's view, in its process.

It leaves a JSON file with its results, or with ``skipped``, the reason why there are
none. Rows are on disk as soon as they are measured, in case the process ends.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from lra_jax.benchmarking import correctness
from lra_jax.benchmarking.cases import Case
from lra_jax.benchmarking.report import Report
from lra_jax.benchmarking.runner import side_by_side
from lra_jax.benchmarking.settings import BenchmarkConfig, timing
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
    file.parent.mkdir(parents=True, exist_ok=True)
    match config.part:
        case "device":
            machine = {"commit": commit(), "device": describe_devices()}
            write_json(file, machine | {"versions": versions()})
        case "reference":
            cases = correctness.reference_cases(config)
            correctness.write_references(cases, file.parent / REFERENCES, say)
            write_json(file, {"cases": len(cases)})
        case "correctness":
            _compare(correctness.make_cases(config), file, say)
        case "times" | "times-causal":
            _time(timing(config, config.part.endswith("-causal")), file, say)
        case "kernels":
            _compare_kernels(config, file, say)
        case "kernel-times" | "kernel-times-causal":
            _time_kernels(config, file, say)


def _compare(cases: Sequence[Case], file: Path, say: Say) -> None:
    folder, rows = file.parent / REFERENCES, []
    jobs = [(case, folder, dtype) for case in cases for dtype in correctness.TOLERANCES]
    compared = side_by_side(lambda job: correctness.compare(*job), jobs)
    with contextlib.closing(compared):
        for row in compared:
            rows.append(row)
            say(correctness.in_words(row))
            write_json(file, {"tolerances": correctness.TOLERANCES, "rows": rows})


def _compare_kernels(config: BenchmarkConfig, file: Path, say: Say) -> None:
    cases = correctness.kernel_cases(config)
    if not _skip_kernels(cases, list(correctness.TOLERANCES), file):
        _compare(cases, file, say)


def _time_kernels(config: BenchmarkConfig, file: Path, say: Say) -> None:
    cases = correctness.kernel_cases(config)
    subjects = [
        f"{name}[implementation={x}]"
        for name in dict.fromkeys(case.name for case in cases)
        for x in ("xla", "pallas")
    ]
    causal = config.part == "kernel-times-causal"
    times = timing(config, causal, ",".join(subjects))
    if not _skip_kernels(cases, (times.dtypes or "").split(","), file):
        _time(times, file, say)


def _skip_kernels(cases: Sequence[Case], dtypes: Sequence[str], file: Path) -> bool:
    """Whether none of the kernels runs here; the file then says why."""
    reason: str | None = "none of --attention has kernels"
    for case in cases:
        for dtype in dtypes:
            reason = correctness.refusal(case, dtype)
            if reason is None:
                return False
    write_json(file, {"skipped": reason})
    return True


def _time(config: BenchmarkConfig, file: Path, say: Say) -> None:
    report = Report(config, "")

    def keep() -> None:
        names = ("settings", "softmax_fused", "roofline", "rows", "exponents")
        values = report.values()
        write_json(file, {name: values[name] for name in names})

    report.measure(say, keep)
    keep()
    if report.interrupted:
        raise KeyboardInterrupt
