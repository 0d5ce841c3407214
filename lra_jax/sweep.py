"""Trains several mechanisms: ``python -m lra_jax.sweep --attention=softmax,flow``.

All flags of ``python -m lra_jax.train`` hold for every run; ``--workdir`` names the
folder that their directories go to (by default ``runs``). Runs that are finished are
not repeated, and stopped ones go on, so the same command again does what is left.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import sys
from collections.abc import Sequence

from lra_jax import cli, runs, signals
from lra_jax.errors import expected

PROG = "python -m lra_jax.sweep"
_HELP = f"""usage: {PROG} --attention=NAME,NAME,... [--seeds=N] [flags of training]

Trains several mechanisms one after another, and reports those that fail.

  --attention=NAME,NAME,...  mechanisms, or package.module:function
  --seeds=N                  runs of each, with seeds --seed, --seed + 1, ... (1)
  --workdir=FOLDER           where the run directories go (runs)

and every flag of python -m lra_jax.train. python -m lra_jax.report makes a page of the
results."""


def main(args: Sequence[str] | None = None) -> None:
    """The command line; exit code 1 when a run failed."""
    args = list(sys.argv[1:] if args is None else args)
    if "--help" in args or "-h" in args:
        print(_HELP)
        return
    with cli.user_errors():
        chosen, rest = runs.take_flag(args, "attention")
        if chosen is None:
            raise expected("--attention", "mechanisms, as in softmax,cosformer", "none")
        names = [name.strip() for name in chosen.split(",")]
        if "" in names or len(set(names)) < len(names):
            raise expected("--attention", "distinct names and commas", f"{chosen!r}")
        count, rest = runs.take_flag(rest, "seeds")
        seeds = runs.parse_count("seeds", count)
        plan = runs.make_plan(_parse, rest, names, seeds)
    try:
        runs.run_all(plan)
    except runs.Stopped as stop:
        raise SystemExit(stop.code) from None


def _parse(args: Sequence[str]):
    return cli.parse_config(PROG, "Trains several mechanisms.", args)


if __name__ == "__main__":
    signals.run(main)
