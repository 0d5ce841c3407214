"""The work of one part of the accelerator's view, in its process.

It leaves a JSON file with its results. Rows are on disk as soon as they are measured,
in case the process ends.
"""

import contextlib
import dataclasses
from collections.abc import Callable
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
            _compare(config, file, say)
        case "times" | "times-causal":
            _time(config, file, say)


def _compare(config: BenchmarkConfig, file: Path, say: Say) -> None:
    folder, rows = file.parent / REFERENCES, []
    cases = [*correctness.make_cases(config), *_kernels(config)]
    jobs = [(case, folder, dtype) for case in cases for dtype in correctness.TOLERANCES]
    compared = side_by_side(lambda job: correctness.compare(*job), jobs)
    with contextlib.closing(compared):
        for row in compared:
            rows.append(row)
            say(correctness.in_words(row))
            write_json(file, {"tolerances": correctness.TOLERANCES, "rows": rows})


def _kernels(config: BenchmarkConfig) -> list[Case]:
    """The kernels to compare with the forms that XLA compiles, if they run here."""
    cases = correctness.kernel_cases(config)
    return [case for case in cases if correctness.refusal(case, case.dtype) is None]


def _time(config: BenchmarkConfig, file: Path, say: Say) -> None:
    times = timing(config, causal=config.part == "times-causal")
    names = [str(times.attention), *(case.attention for case in _kernels(config))]
    attention = ",".join(dict.fromkeys(names))
    report = Report(dataclasses.replace(times, attention=attention), "")

    def keep() -> None:
        names = ("settings", "softmax_fused", "roofline", "rows", "exponents")
        values = report.values()
        write_json(file, {name: values[name] for name in names})

    report.measure(say, keep)
    keep()
    if report.interrupted:
        raise KeyboardInterrupt
