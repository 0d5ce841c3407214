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
from collections.abc import Mapping, Sequence
from typing import get_args

from lra_jax import cli, runs, signals
from lra_jax.attention.registry import MECHANISMS
from lra_jax.configs import Config
from lra_jax.errors import Names, expected, known
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
        runs.run_all(make_plan(args))


def make_plan(args: Sequence[str]) -> list[runs.Planned]:
    """The runs of all mechanisms, on all tasks, with all values of the flags.

    With a suite, the tasks are its tests that have a protocol for the preset, or those
    that ``--task`` names, and the protocol of each varies flags of its own.
    """
    flags = _read_flags(args)
    suite = (flags.pop("--suite") or "") if "--suite" in flags else None
    names, tasks, presets = (
        cli.split_names(flag, flags.pop(flag) or "") if flag in flags else []
        for flag in ("--attention", "--task", "--preset")
    )
    if names == ["all"]:
        names = [name for name in MECHANISMS if MECHANISMS[name].causal]
    tests: dict[str, Task] = {}
    if suite is not None:
        members = suites()[known("--suite", suite, suites())]
        tests = {test.name: test for test in members}
        tasks = [known("--task", task, tests) for task in tasks] or [
            name
            for name, test in tests.items()
            if {*(presets or [next(iter(test.presets))])} & test.sweeps.keys()
        ]
    meanings: dict[str, tuple[str, type]] = {}
    plan = []
    for task, name, preset in itertools.product(
        tasks or [""], names or [""], presets or [""]
    ):
        chosen = {"--task": task, "--attention": name, "--preset": preset}
        shared = [f"{flag}={value}" for flag, value in chosen.items() if value]
        shown = [task, name, shared[-1] if len(presets) > 1 else ""]
        fixed, several = _choices(shared, flags, tests.get(task), meanings)
        for choice in itertools.product(*several):
            varied = [word for word in choice if word]
            words = [*shared, *fixed, *varied]
            one = cli.parse_config(PROG, "Trains a model.", words, runs.Seeds)
            series = " ".join(filter(None, [*shown, *varied]))
            plan += runs.make_plan(one, series)
    if not names:  # Checked last, in case a flag is a misspelt form of it.
        raise expected("--attention", "mechanisms, as in softmax,cosformer", "none")
    if len({run.workdir for run in plan}) < len(plan):
        raise expected("sweep", "values that differ", "two runs of the same settings")
    return plan


def _read_flags(args: Sequence[str]) -> dict[str, str | None]:
    """The value of each flag, None for one that stands alone; the last one counts,
    except where a user may mean all of them."""
    flags: dict[str, str | None] = {}
    flag = ""
    for word in args:
        if word.startswith("--"):
            flag, equals, text = word.partition("=")
            if flag in flags and flag in ("--attention", "--task", "--preset"):
                raise expected(flag, "all names in one flag", "several flags")
            flags[flag] = text if equals else None
        elif flag and flags[flag] is None:
            flags[flag] = word
        else:
            raise expected("flags", "--name=value or --name value", repr(word))
    return flags


def _choices(
    shared: Sequence[str],
    flags: Mapping[str, str | None],
    test: Task | None,
    meanings: dict[str, tuple[str, type]],
) -> tuple[list[str], list[list[str]]]:
    """The flags with one value, and for each of the others a word per value.

    ``shared`` name the task, the mechanism and the preset. The protocol of a ``test``
    varies further flags, apart from those of the user. ``meanings`` has the task in
    which each flag was seen first, and the class that declares it there.
    """
    preset = cli.parse_preset(shared)
    types = cli.flag_types(preset) | {"--seeds": int}
    words = [f if text is None else f"{f}={text}" for f, text in flags.items()]
    fixed, varied = [], {}
    for word in cli.full_names(words, types, preset.task):
        flag, _, text = word.partition("=")
        _check_meaning(flag, preset, meanings)
        kinds = get_args(types[flag]) or (types[flag],)
        is_text = str in kinds and not any(isinstance(x, Names) for x in kinds)
        mark = "|" if is_text else ","
        name = flag.removeprefix("--")
        if mark in text and name in preset.identity() and name != "seed":
            varied[flag] = [f"{flag}={value.strip()}" for value in text.split(mark)]
        else:
            fixed.append(word)
    if test is not None:
        options = ("", *test.variants.get(preset.attention, ()))
        protocol = {
            **test.sweeps.get(preset.preset, {}),
            "model.attention_options": options,
        }
        known_flags = {word.partition("=")[0] for word in fixed} | varied.keys()
        for name, values in protocol.items():
            if f"--{name}" not in known_flags:
                words = [f"--{name}={value}" if value else "" for value in values]
                varied[f"--{name}"] = words
    return fixed, [*varied.values()]


def _check_meaning(
    flag: str, preset: Config, meanings: dict[str, tuple[str, type]]
) -> None:
    """Refuses a data setting that several tasks have by name only: they declare it
    apart from each other, and not in a base class of their settings."""
    part, _, name = flag.removeprefix("--").partition(".")
    if part != "data":
        return
    kinds = type(preset.data).__mro__
    first = [x for x in kinds if name in getattr(x, "__dataclass_fields__", {})][-1]
    task, kind = meanings.setdefault(flag, (preset.task, first))
    if kind is not first:
        needed = f"a sweep of its own for --task={task} and --task={preset.task}"
        both = f"{kind.__name__}.{name} of the one and {first.__name__}.{name}"
        raise expected(flag, needed, f"{both} of the other")


if __name__ == "__main__":
    cli.run(main)
