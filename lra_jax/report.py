"""Makes a page of finished runs: ``python -m lra_jax.report runs/ --out=report/``.

``report.html`` holds everything it needs; ``report.md`` has the same tables.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from lra_jax import cli, runs

_HELP = """usage: python -m lra_jax.report RUNS [--out=FOLDER]

Makes a page of finished runs, beside the published ones.

  RUNS          folder with run directories, at any depth
  --out=FOLDER  where report.html and report.md go (report)"""


def main(args: Sequence[str] | None = None) -> None:
    """The command line; exit code 2 where there is nothing to report."""
    args = list(sys.argv[1:] if args is None else args)
    if "--help" in args or "-h" in args:
        print(_HELP)
        return
    with cli.user_errors():
        out, rest = runs.take_flag(args, "out")
        unknown = [argument for argument in rest if argument.startswith("-")]
        if unknown:
            raise ValueError(f"unknown flag {unknown[0]!r}; did you mean '--out'?")
        if len(rest) != 1:
            raise ValueError(f"expected one folder of runs, got {len(rest)}: {rest}")
        problems = write_report(Path(rest[0]).expanduser(), Path(out or "report"))
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)


def write_report(folder: Path, out: Path) -> list[str]:
    """Writes ``report.html`` and ``report.md``.

    Args:
      folder: holds run directories.
      out: the folder to write to, made where missing.

    Returns:
      A line for each run directory that could not be read; the report names them too.

    Raises:
      ValueError: no run in the folder is finished.
      OSError: `out` cannot be written.
    """
    from lra_jax.files import write_text
    from lra_jax.reporting import collect, page

    found, problems = collect.read_runs(folder)
    groups = collect.group_runs(found)
    if not groups:
        raise ValueError(f"no run in {folder} is finished (none has a result.json)")
    notes = [f"not finished: {line}" for line in collect.unfinished(found)]
    notes += [f"cannot be read: {line}" for line in problems]
    out = out.expanduser()
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "report.html", page.to_html(groups, notes))
    write_text(out / "report.md", page.to_markdown(groups, notes))
    total = sum(len(group.runs) for group in groups)
    print(f"{total} runs in {out / 'report.html'} and {out / 'report.md'}")
    return problems


if __name__ == "__main__":
    main()
