"""Makes a page of finished runs: ``python -m lra_jax.report runs/ --out=report/``.

``report.html`` holds everything it needs; ``report.md`` has the same, with the learning
curves in files beside it.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import sys
from collections.abc import Sequence
from pathlib import Path

from lra_jax import cli, runs, signals
from lra_jax.errors import did_you_mean, expected

_HELP = """usage: python -m lra_jax.report RUNS [--out=FOLDER]

Makes a page of finished runs, beside the published ones.

  RUNS          folder with run directories, at any depth
  --out=FOLDER  where report.html, report.md and their pictures go (report)"""


def main(args: Sequence[str] | None = None) -> None:
    """The command line; exit code 2 where there is nothing to report."""
    args = list(sys.argv[1:] if args is None else args)
    if "--help" in args or "-h" in args:
        print(_HELP)
        return
    with cli.user_errors():
        out, rest = runs.take_flag(args, "out")
        for argument in rest:
            if argument.startswith("-"):
                flag = argument.partition("=")[0]
                hint = did_you_mean(flag, ["--out"])
                raise expected(flag, "a flag", f"an unknown one{hint}")
        if len(rest) != 1:
            raise expected("RUNS", "one folder of runs", f"{len(rest)}: {rest}")
        problems = write_report(Path(rest[0]).expanduser(), Path(out or "report"))
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)


def write_report(folder: Path, out: Path) -> list[str]:
    """Writes ``report.html``, ``report.md`` and the pictures of the latter.

    Args:
      folder: holds run directories.
      out: the folder to write to, made where missing.

    Returns:
      A line for each run directory that could not be read; the report names them too.

    Raises:
      ValueError: no run in the folder is finished, or `out` cannot be written.
    """
    from lra_jax.reports import charts, results
    from lra_jax.reports.runs import group_runs, read_runs, unfinished

    found, problems = read_runs(folder)
    groups = group_runs(found)
    if not groups:
        raise expected("RUNS", "finished runs (with a result.json)", folder)
    notes = [f"not finished: {line}" for line in unfinished(found)]
    notes += [f"cannot be read: {line}" for line in problems]
    with charts.style():
        file = results.make_page(groups, notes, out).write("report")
    total = sum(len(group.runs) for group in groups)
    print(f"{total} runs in {file} and {file.with_suffix('.md')}")
    return problems


if __name__ == "__main__":
    signals.run(main)
