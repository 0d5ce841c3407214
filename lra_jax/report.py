"""Makes a page of finished runs: ``python -m lra_jax.report runs/ --out=report/``.

``report.html`` is self-contained; ``report.md`` has the same content, with the learning
curves in separate files.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from lra_jax import cli, progress, signals
from lra_jax.errors import expected, known, writable
from lra_jax.files import expand_home

_PAGES = ("html", "md")


@dataclasses.dataclass(frozen=True)
class ReportConfig:
    """The runs of a report, and its files."""

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="RUNS ...")
    ] = ()
    """Folders with run directories, at any depth."""
    out: str = "report"
    """Folder for report.html, report.md and their pictures."""
    allow_code: bool = False
    """Import your own tasks, package.module:TASK, that the runs' config.json files
    name. Use this only for directories that you trust."""
    format: str = ",".join(_PAGES)
    """Any of html, md, latex, csv and json, separated by commas. All have one row per
    mechanism, at the setting that validation prefers, and every setting below it; csv
    and json in a second file."""


def main(args: Sequence[str] | None = None) -> None:
    """The command line; exit code 2 if there is nothing to report."""
    description = "Makes a page of finished runs, together with published results."
    prog = "python -m lra_jax.report"
    config = cli.parse(ReportConfig, prog, description, cli.arguments(args))
    with cli.user_errors():
        if not config.runs:
            raise expected("RUNS", "at least one folder of runs", "none")
        progress.say(f"reading the runs in {', '.join(config.runs)} ...")
        formats = [name.strip() for name in config.format.split(",")]
        problems = write_report(config.runs, config.out, formats, config.allow_code)
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)


def write_report(
    folders: str | Path | Sequence[str | Path],
    out: str | Path,
    formats: Sequence[str] = _PAGES,
    allow_code: bool = False,
) -> list[str]:
    """Writes ``report.html``, ``report.md`` with its pictures, and other formats.

    Args:
      folders: contain run directories, at any depth.
      out: the folder to write to, created if missing.
      formats: any of html, md, latex, csv and json.
      allow_code: import the user's own tasks that the runs name.

    Returns:
      A line for each run directory that could not be read, or has lost some of its
      metrics; the report lists them too.

    Raises:
      ValueError: a folder has no runs, none is finished, `out` cannot be written, or a
        format is unknown.
    """
    from lra_jax.reports import exports
    from lra_jax.reports.runs import (
        group_runs,
        lost_metrics,
        read_runs,
        repeated_runs,
        unfinished_runs,
    )

    for name in formats:
        known("--format", name, (*_PAGES, *exports.FORMATS))
    paths = [folders] if isinstance(folders, str | Path) else folders
    paths, out = [expand_home(x, "RUNS") for x in paths], expand_home(out, "--out")
    runs, problems = read_runs(*paths, allow_code=allow_code)
    groups = group_runs(runs)
    if not groups:
        got = ", ".join(map(str, paths))
        raise expected("RUNS", "finished runs (with a result.json)", got)
    notes = {
        "not finished": unfinished_runs(runs),
        "left out": repeated_runs(runs),
        "cannot be read": problems,
        "without some of its metrics": lost_metrics(runs),
    }
    with writable("--out", "a folder", out):
        out.mkdir(parents=True, exist_ok=True)
    lines = [f"{why}: {line}" for why, lines in notes.items() for line in lines]
    files = _write(groups, lines, out, formats)
    total = sum(len(group.runs) for group in groups)
    others = {"not finished": "not finished", "left out": "repeated"}
    missing = [
        f"{len(notes[why])} {word}" for why, word in others.items() if notes[why]
    ]
    without = f"; not shown: {', '.join(missing)}" if missing else ""
    count = "1 run" if total == 1 else f"{total} runs"
    print(f"{count} in {', '.join(map(str, files))}{without}")
    return [*problems, *notes["without some of its metrics"]]


def _write(
    groups: Sequence[Any], notes: Sequence[str], out: Path, formats: Sequence[str]
) -> list[Path]:
    """Writes each format; returns the files."""
    from lra_jax.files import write_text
    from lra_jax.reports import exports, results

    pages = [name for name in _PAGES if name in formats]
    files = [out / f"report.{name}" for name in pages]
    if pages:
        results.make_page(groups, notes, out).write("report", pages)
    for name in exports.FORMATS:
        for file, text in exports.FORMATS[name].items() if name in formats else ():
            write_text(out / file, text(groups))
            files.append(out / file)
    return files


if __name__ == "__main__":
    cli.run(main)
