"""Trains several mechanisms: ``python -m lra_jax.sweep --attention=softmax,flow``.

``--task=listops,text`` trains them on several tasks, and a flag of a number or a choice
takes several values: ``--train.learning_rate=1e-3,3e-3``. All runs are shown, with the
one that is best by validation.

``--suite=recall`` trains them on all tests of a suite, with the learning rates that the
protocol of each test names.

All flags of ``python -m lra_jax.train`` hold for every run; ``--workdir`` names the
folder that their directories go to (by default ``runs``). Runs that are finished are
not repeated, and stopped ones go on, so the same command again does what is left.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import itertools
import sys
from collections.abc import Iterator, Sequence

from lra_jax import cli, runs, signals
from lra_jax.attention.registry import MECHANISMS
from lra_jax.errors import expected, known
from lra_jax.tasks import Task, suites

PROG = "python -m lra_jax.sweep"
_HELP = f"""usage: {PROG} --attention=NAME,NAME,...
       [--task=NAME,NAME,...] [--suite=NAME] [--seeds=N] [flags of training]

Trains several mechanisms one after another, and reports those that fail.

  --attention=NAME,NAME,...  mechanisms, or package.module:function; all: those that
                             have a causal form
  --task=NAME,NAME,...       tasks (listops)
  --FLAG=VALUE,VALUE,...     every value of a flag of training that is a number or a
                             choice, as in --train.learning_rate=1e-3,3e-3; the best by
                             validation is named at the end
  --suite=NAME               {", ".join(suites())}: every test of the suite (or the one
                             of --task), with the learning rates of its protocol
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
        if names == ["all"]:
            names = [name for name in MECHANISMS if MECHANISMS[name].causal]
        if "" in names or len(set(names)) < len(names):
            raise expected("--attention", "distinct names and commas", f"{chosen!r}")
        count, rest = runs.take_flag(rest, "seeds")
        seeds = runs.parse_count("seeds", count)
        suite, rest = runs.take_flag(rest, "suite")
        if suite is None:
            plan = _plan(rest, names, seeds)
        else:
            plan = _suite_plan(suite, rest, names, seeds)
    try:
        runs.run_all(plan)
    except runs.Stopped as stop:
        raise SystemExit(stop.code) from None


def _plan(args: Sequence[str], names: Sequence[str], seeds: int) -> list[runs.Run]:
    """The runs of all mechanisms, on all tasks, with all values of the flags.

    Raises:
      ValueError: a config cannot work.
    """
    chosen, rest = runs.take_flag(args, "task")
    tasks = [] if chosen is None else chosen.split(",")
    plan = []
    for task in tasks or [None]:
        own = [] if task is None else [f"--task={task.strip()}"]
        fixed, several = cli.split_values([*own, *rest])
        for name in names:
            for flags in itertools.product(*several):
                series = " ".join((*(tasks and [task or ""]), name, *flags))
                given = [*fixed, *flags]
                plan += runs.make_plan(_parse, given, [name], seeds, series)
    _check_distinct(plan)
    return plan


def _check_distinct(plan: Sequence[runs.Run]) -> None:
    """Refuses two runs of the same settings, which would share a directory."""
    found: dict[object, runs.Run] = {}
    for run in plan:
        first = found.setdefault(run.workdir, run)
        if first is not run:
            wanted = "values that differ, each once"
            raise expected("sweep", wanted, f"{first.series} and {run.series}")


def _suite_plan(
    suite: str, args: Sequence[str], names: Sequence[str], seeds: int
) -> list[runs.Run]:
    """The runs of all mechanisms on all tests of a suite, or on that of ``--task``.

    Raises:
      ValueError: there is no such suite or test, or a config cannot work.
    """
    tests = {task.name: task for task in suites()[known("--suite", suite, suites())]}
    chosen, rest = runs.take_flag(args, "task")
    if chosen is not None:
        tests = {chosen: tests[known("--task", chosen, tests)]}
    plan = []
    for test in tests.values():
        preset = cli.parse_preset([f"--task={test.name}", *rest]).preset
        for name in names:
            for flags in _variants(test, preset, name, rest):
                series = " ".join((test.name, name, *flags))
                given = [f"--task={test.name}", *flags, *rest]
                plan += runs.make_plan(_parse, given, [name], seeds, series)
    return plan


def _variants(
    task: Task, preset: str, attention: str, args: Sequence[str]
) -> Iterator[list[str]]:
    """The flags of each run of a mechanism; what the user gave is not varied."""
    values = dict(task.sweeps[preset])
    values["model.attention_options"] = ("", *task.variants.get(attention, ()))
    own = f"--task={task.name}"
    given = {cli.full_name(a.partition("=")[0], cli.flags([own, *args])) for a in args}
    flags = [
        [f"--{name}={value}" if value != "" else "" for value in several]
        for name, several in values.items()
        if f"--{name}" not in given
    ]
    for combined in itertools.product(*flags):
        yield list(filter(None, combined))


def _parse(args: Sequence[str]):
    return cli.parse_config(PROG, "Trains several mechanisms.", args)


if __name__ == "__main__":
    signals.run(main)
