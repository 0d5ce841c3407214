"""Trains several mechanisms: ``python -m lra_jax.sweep --attention=softmax,flow``.

``--task=listops,text`` trains them on several tasks, and flags accept several values:
``--train.learning_rate=1e-3,3e-3``, ``--preset=compact,modern``, and for a text
``--model.attention_options='clip=1|clip=30'``. All runs are shown, with the best one by
validation.

``--suite=recall`` trains them on all tests of a suite, with the learning rates that the
protocol of each test prescribes.

All flags of ``python -m lra_jax.train`` apply to every run; ``--workdir`` is the folder
for their directories (by default ``runs``). Finished runs are not repeated and stopped
ones resume, so repeating the command does the remaining work.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import itertools
from collections.abc import Iterator, Sequence
from typing import get_args

from lra_jax import cli, runs, signals
from lra_jax.attention.registry import MECHANISMS
from lra_jax.errors import expected, known
from lra_jax.tasks import Task, suites

PROG = "python -m lra_jax.sweep"
_HELP = f"""usage: {PROG} --attention=NAME,NAME,...
       [--task=NAME,NAME,...] [--suite=NAME] [--seeds=N] [flags of training]

Trains several mechanisms one after another, and reports those that fail.

  --attention=NAME,NAME,...  mechanisms, or package.module:function; all = those with a
                             causal form, on every task. Encoder tasks, such as LRA's,
                             also take the others: list them by name
  --task=NAME,NAME,...       tasks (listops)
  --preset=NAME,NAME,...     presets, of every task
  --FLAG=VALUE,VALUE,...     several values of a training flag that takes a number or a
                             choice, as in --train.learning_rate=1e-3,3e-3; the best by
                             validation is named at the end
  --FLAG='TEXT|TEXT|...'     the same for a flag that takes a text, as in
                             --model.attention_options='clip=1|clip=30' or, with none
                             and with one, --train.curriculum='|700:0.6'
  --suite=NAME               {", ".join(suites())}:
                             every test of the suite (or those of --task), with the
                             learning rates of its protocol
  --seeds=N                  N runs of each, with seeds --seed, --seed + 1, ... (1)
  --workdir=FOLDER           folder for the run directories (runs)

and all flags of python -m lra_jax.train except --dry-run, which describes one run.
python -m lra_jax.report makes a page of the results."""


def main(args: Sequence[str] | None = None) -> None:
    """The command line; exit code 1 if a run failed."""
    args = cli.arguments(args)
    if "--help" in args or "-h" in args:
        print(_HELP)
        return
    with cli.user_errors():
        chosen, rest = _take_flag(args, "attention")
        names = _names(chosen)
        suite, rest = _take_flag(rest, "suite")
        plan = _plan(suite, rest, names)
        if not names:  # After the other flags, of which one may be a misspelt form.
            raise expected("--attention", "mechanisms, as in softmax,cosformer", "none")
    try:
        runs.run_all(plan)
    except runs.Stopped as stop:
        raise SystemExit(stop.code) from None


def _take_flag(args: Sequence[str], name: str) -> tuple[str | None, list[str]]:
    """Removes ``--name=value`` or ``--name value`` from a command line.

    Returns:
      The value given, or None, and the other arguments.

    Raises:
      ValueError: the flag is last, without a value, or has two different values, of
        which a user may expect both.
    """
    value, rest = None, []
    pending = iter(args)
    for argument in pending:
        flag, equals, text = argument.partition("=")
        if flag != f"--{name}":
            rest.append(argument)
            continue
        after = text if equals else next(pending, None)
        if not after:
            raise expected(f"--{name}", "a value", "none")
        if value not in (None, after):
            raise expected(f"--{name}", "one value", f"{value!r} and {after!r}")
        value = after
    return value, rest


def _names(chosen: str | None) -> list[str]:
    """The mechanisms of ``--attention``; none if it is not given."""
    if chosen is None:
        return []
    names = [name.strip() for name in chosen.split(",")]
    if names == ["all"]:
        return [name for name in MECHANISMS if MECHANISMS[name].causal]
    if "" in names or len(set(names)) < len(names):
        raise expected("--attention", "distinct names and commas", f"{chosen!r}")
    return names


def _plan(
    suite: str | None, args: Sequence[str], names: Sequence[str]
) -> list[runs.Planned]:
    """The runs of all mechanisms, on all tasks, with all values of the flags.

    With a suite, the tasks are its tests, or those of them that ``--task`` names, and
    the protocol of each varies flags of its own.

    Raises:
      ValueError: there is no such suite or test, or a config is invalid.
    """
    chosen, rest = _take_flag(args, "task")
    tasks = [] if chosen is None else [task.strip() for task in chosen.split(",")]
    tests: dict[str, Task] = {}
    if suite is not None:
        members = suites()[known("--suite", suite, suites())]
        tests = {test.name: test for test in members}
        tasks = [known("--task", task, tests) for task in tasks] or list(tests)
    plan = []
    for task in tasks or [""]:
        choices = list(_choices([*([f"--task={task}"] if task else ()), *rest]))
        for name in names:
            for shared, varied in choices:
                variants = _variants(tests[task], name, shared) if tests else [[]]
                for flags in variants:
                    words = [task, name, *varied, *flags]
                    args = [*flags, *shared, f"--attention={name}"]
                    series = " ".join(filter(None, words))
                    about = "Trains several mechanisms."
                    one = cli.parse_config(PROG, about, args, runs.Seeds)
                    plan += runs.make_plan(one, series)
    _check_distinct(plan)
    return plan


def _choices(args: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Every combination of values of the flags that have several: all flags of a run
    except its mechanism and seed, and those of them that vary.

    Raises:
      ValueError: a flag is unknown.
    """
    chosen, rest = _take_flag(args, "preset")
    presets = [] if chosen is None else [name.strip() for name in chosen.split(",")]
    for preset in presets or [None]:
        named = [] if preset is None else [f"--preset={preset}"]
        fixed, several = _split_values([*named, *rest])
        for flags in several:
            if flags[0].startswith("--seed="):
                values = ",".join(flag.removeprefix("--seed=") for flag in flags)
                needed = "one seed, the first (--seeds=N trains with N seeds)"
                raise expected("--seed", needed, repr(values))
        shown = named if len(presets) > 1 else []
        for flags in itertools.product(*several):
            yield [*fixed, *flags], [*shown, *flags]


def _split_values(args: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Flags with one value, and those with several, as ``--name=value``.

    Values stand between commas; texts, of which commas may be part, between ``|``. A
    text that changes no result, such as ``--workdir``, counts as one value.

    Returns:
      The former, and for each of the latter a list with one flag per value.
    """
    preset = cli.parse_preset(args)
    types = cli.flag_types(preset) | {"--seeds": int}
    fixed, several = [], []
    for flag, text in _pairs(cli.full_names(args, types)).items():
        is_text = str in (get_args(types[flag]) or (types[flag],))
        mark = "|" if is_text else ","
        counts = not is_text or flag.removeprefix("--") in preset.identity()
        if text is not None and mark in text and counts:
            several.append([f"{flag}={value.strip()}" for value in text.split(mark)])
        else:
            fixed.append(flag if text is None else f"{flag}={text}")
    return fixed, several


def _pairs(words: Sequence[str]) -> dict[str, str | None]:
    """The value of each flag, None for one that stands alone."""
    pairs: dict[str, str | None] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, text = word.partition("=")
            pairs[flag] = text if equals else None
        elif flag and pairs[flag] is None:
            pairs[flag] = word
        else:
            raise expected("flags", "--name=value or --name value", repr(word))
    return pairs


def _check_distinct(plan: Sequence[runs.Planned]) -> None:
    """Refuses two runs with the same settings, which would share a directory."""
    firsts: dict[object, runs.Planned] = {}
    for run in plan:
        first = firsts.setdefault(run.workdir, run)
        if first is not run:
            needed = "values that differ, each once"
            raise expected("sweep", needed, f"{first.series} and {run.series}")


def _variants(task: Task, attention: str, flags: Sequence[str]) -> Iterator[list[str]]:
    """The flags of each run of a mechanism, besides those that the user gave, which the
    protocol of the test then does not vary."""
    values = dict(task.sweeps[cli.parse_preset(flags).preset])
    values["model.attention_options"] = ("", *task.variants.get(attention, ()))
    fixed = {flag.partition("=")[0] for flag in flags}
    choices = [
        [f"--{name}={value}" if value != "" else "" for value in several]
        for name, several in values.items()
        if f"--{name}" not in fixed
    ]
    for combined in itertools.product(*choices):
        yield list(filter(None, combined))


if __name__ == "__main__":
    signals.run(main)
