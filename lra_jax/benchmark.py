"""Times mechanisms: ``python -m lra_jax.benchmark --view=lra --out=results/``.

Prints a table; with ``--out`` it also writes the figures as JSON, with the command, the
commit, the versions and the device, and a picture of time and memory against the
length. docs/performance.md explains how each figure is measured.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lra_jax import cli, progress, runtime, signals
from lra_jax.benchmarking.settings import BenchmarkConfig, make_cases
from lra_jax.errors import expected, writable
from lra_jax.files import expand_home, make_room

_PROG = "python -m lra_jax.benchmark"
_DESCRIPTION = (
    "Measures time and compiled memory of attention mechanisms against the length."
)
_ADVICE = "interrupted; the same command resumes"


def main(args: Sequence[str] | None = None) -> None:
    """The command line; see ``lra_jax.cli`` for the exit codes."""
    args = cli.begin(args)
    config = cli.parse(BenchmarkConfig, _PROG, _DESCRIPTION, args)
    with cli.user_errors():
        make_cases(config, on_cpu=True)  # Refuses invalid flags before jax loads.
        if config.view == "accelerator":
            _accelerator(config, args)
            return
        files = _files(config)
        progress.say("starting jax ...")
        # One device is measured, and on a CPU it has all cores.
        runtime.configure_jax(cpu_devices=1)
        from lra_jax.benchmarking.report import Report

        report = Report(config, _command_line(args))
        # Each figure is written once measured, in case the process is killed.
        kept = files[0].with_suffix(".incomplete.json") if files else None
        keep = (lambda: report.write(kept, None)) if kept else (lambda: None)
        # A job that is asked to end also keeps its figures.
        with signals.leave_to(signal.default_int_handler):
            report.measure(lambda text: print(text, flush=True), keep)
        print(f"\n{report.text()}")
        if files is not None and kept is not None:
            if not report.measured:
                files = files[0], None  # There is nothing to draw.
            if (report.interrupted or not report.measured) and files[0].exists():
                # The figures of an earlier run stay.
                files = kept, None
            report.write(*files)
            if kept not in files:
                kept.unlink(missing_ok=True)
            print(f"\nwrote {' and '.join(str(x) for x in files if x is not None)}")
    if report.interrupted:
        saved = "; the figures so far are kept" if kept else ""
        cli.fail(f"interrupted{saved}", 128 + signal.SIGINT)
    if not report.measured:
        first = report.rows[0]
        cli.fail(f"no case was measured; {first['status']}: {first['reason']}", 1)


def _command_line(args: Sequence[str]) -> str:
    return shlex.join([*_PROG.split(), *args])


def _accelerator(config: BenchmarkConfig, args: Sequence[str]) -> None:
    """Runs all parts, or the one that ``--part`` names."""
    from lra_jax.benchmarking import accelerator

    def say(text: str) -> None:
        print(text, flush=True)

    if config.part is not None:
        runtime.configure_jax(cpu_devices=1)
        from lra_jax.benchmarking import one_part

        with signals.leave_to(signal.default_int_handler):
            one_part.run(config, accelerator.file_of(config, config.part), say)
        return
    signals.advise(_ADVICE)
    try:
        failed = accelerator.run(config, _command_line(args), say)
    except KeyboardInterrupt:
        cli.fail(_ADVICE, 128 + signal.SIGINT)
    if failed:
        cli.fail(f"failed: {', '.join(failed)}; the same command tries again", 1)


def run(config: BenchmarkConfig) -> dict[str, Any]:
    """Measures the cases of a config; returns the JSON's contents. Writes nothing.

    Raises:
      ValueError: a flag out of range, or an unknown name.
    """
    from lra_jax.benchmarking.report import Report

    if config.view == "accelerator":
        others = "any other than accelerator, which starts processes and writes files"
        raise expected("view", others, "accelerator")
    report = Report(config, "")
    report.measure()
    return report.values()


def _files(config: BenchmarkConfig) -> tuple[Path, Path | None] | None:
    """The JSON and the picture; makes their folder now, so that errors come early."""
    if config.out is None:
        return None
    out = expand_home(config.out, "--out")
    name = "attention" if config.view == "none" else config.view
    figures = out if out.suffix == ".json" else out / f"{name}.json"
    if not out.suffix and out.is_file():
        raise expected("--out", "a folder or a .json file", f"{out}, a file")
    with writable("--out", "a file", figures):
        make_room(figures)
    return figures, figures.with_suffix(".png") if config.picture else None


if __name__ == "__main__":
    cli.run(main)
