"""Shared by the command lines: parsing, one-line errors, exit codes.

Exit codes: 0 success; 1 the run failed; 2 the command was invalid; 128 + n stopped by
signal n. With ``--debug`` the traceback of an error is shown before its line.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import io
import logging
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from lra_jax import runtime
from lra_jax.attention import registry
from lra_jax.configs import TASKS, Config, get_preset
from lra_jax.configs.registry import find_task
from lra_jax.errors import (
    SWITCHES,
    InputError,
    check_text,
    expected,
    nearest,
    on_one_line,
)

Parsed = TypeVar("Parsed")


def fail(message: str, code: int = 2) -> NoReturn:
    """Prints ``error: message`` as one line on stderr and exits."""
    if _debugs and sys.exc_info()[0] is not None:
        traceback.print_exc()
    # The code has to get out, even if nobody reads the message any more.
    with contextlib.suppress(BrokenPipeError):
        print(f"error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    raise SystemExit(code)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns any error into one line and an exit code.

    That is 2 for an `InputError` or a disk error, which another command line mends, and
    1 for any other.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (InputError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)
    except Exception as error:
        fail_unexpectedly(error)


def fail_unexpectedly(error: Exception) -> NoReturn:
    """Exits with code 1 and the error's type and text on one line."""
    hint = "" if _debugs else " (--debug shows where)"
    fail(f"{type(error).__name__}: {on_one_line(error)}{hint}", 1)


_debugs = False


def arguments(args: Sequence[str] | None) -> list[str]:
    """The arguments of a command without ``--debug``; None = those of this process."""
    global _debugs
    words = list(sys.argv[1:] if args is None else args)
    _debugs = "--debug" in words
    return [word for word in words if word != "--debug"]


def interpreter() -> str:
    """The command of this Python: ``python`` if that is the same, else its path."""
    here = Path(sys.executable)
    known = shutil.which("python")
    if known is not None and Path(known).absolute().parent == here.parent:
        return "python"
    try:
        return str(here.relative_to(Path.cwd()))
    except ValueError:
        return str(here)


def started(args: Sequence[str] | None) -> list[str]:
    """The arguments of a command; None = those of this process.

    In the latter case the process belongs to the command: it restarts with the
    allocator's settings, collects garbage less often, and shows warnings on one line,
    those of its log as well.
    """
    if args is not None:
        return arguments(args)
    with user_errors():
        runtime.tune_allocator()
    # Python 3.13's own setting. Tracing makes many objects and few cycles, and after
    # every 700 of them, as in 3.11, collections took a tenth of a short run's time.
    gc.set_threshold(2_000)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    log = logging.getLogger("lra_jax")
    log.addHandler(handler)
    log.propagate = False
    return arguments(None)


def parse_preset(args: Sequence[str]) -> Config:
    """The preset given by ``--task``, ``--attention`` and ``--preset``.

    It holds the defaults that ``--help`` shows and that the other flags change.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("task", "attention"):
        first.add_argument(f"--{name}", default=getattr(Config(), name))
    first.add_argument("--preset")
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            chosen, _ = first.parse_known_args(args)
        except SystemExit:  # A flag without a value: the second stage reports it.
            chosen = first.parse_args([])
    with user_errors():
        return get_preset(chosen.task, chosen.preset, chosen.attention)


def parse_config(prog: str, description: str, args: Sequence[str]) -> Config:
    """Reads the name of a preset, then all flags on top of its settings.

    A preset's warm-up that is too long for ``--train.steps`` becomes a tenth of them.
    """
    preset = parse_preset(args)
    presets = "; ".join(f"{t}: {', '.join(find_task(t).presets)}" for t in TASKS)
    config = parse(
        Config,
        prog,
        f"{description}\n\nTasks and presets: {presets}.\nMechanisms: "
        f"{', '.join(registry.names())}, or package.module:function.\n"
        "Unambiguous short forms of flags work: --steps, --batch-size, --lr.",
        args,
        default=preset,
    )
    train, given = config.train, _last(_read_flags(preset, args))
    of_preset = "--train.warmup" not in given and train.steps != preset.train.steps
    if of_preset and train.too_warm:
        return config.replace(train={"warmup": max(train.steps, 0) // 10})
    return config


def parse(
    kind: Callable[..., Parsed],
    prog: str,
    description: str,
    args: Sequence[str],
    default: Any = None,
) -> Parsed:
    """Parses flags into a dataclass with tyro; errors are one line and exit code 2."""
    if os.environ.get("NO_COLOR"):  # tyro uses a different variable.
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")
    import tyro

    with user_errors():
        flags = _read_flags(default or kind, args)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=flags,
                default=default,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as error:
        if not error.code:
            raise
    fail(errors.getvalue())


def _read_flags(settings: Any, args: Sequence[str], check: bool = True) -> list[str]:
    """A command line as ``--name=value``; a switch without a value becomes True.

    Args:
      settings: a dataclass, or an instance.
      args: the command line.
      check: whether values must have their flags' types.

    Raises:
      ValueError: an unknown flag, one without a value, or with an invalid one; or a
        short form beside the whole flag, with another value.
    """
    types = _types(settings)
    given = []
    forms: dict[str, dict[str, str]] = {}
    pending = collections.deque(args)
    while pending:
        argument = pending.popleft()
        if argument in ("--help", "-h"):
            given.append(argument)
            continue
        name = argument.partition("=")[0]
        flag = "--" + name[2:].replace("-", "_")
        if not name.startswith("--"):
            raise expected("flags", "--name=value or --name value", f"{argument!r}")
        form, flag = flag, full_name(flag, types)
        if flag not in types:
            raise _unknown(flag, settings, types)
        text = flag_value(flag, types[flag], argument, pending)
        if check:
            check_text(flag, types[flag], text)
        # A flag that is repeated in the same form replaces the one before it.
        values = forms.setdefault(flag, {})
        values[form] = text
        if len(set(values.values())) > 1:
            got = " and ".join(f"{form}={text}" for form, text in values.items())
            raise expected(flag, "one value", got)
        if types[flag] is bool:
            text = str(SWITCHES.get(text, text))
        given.append(f"{flag}={text}")
    if isinstance(settings, type) and not {"--help", "-h"} & {*given}:
        _check_required(settings, given)
    return given


def flag_value(
    flag: str, kind: Any, argument: str, pending: collections.deque[str]
) -> str:
    """The value of a flag; a switch without one is True.

    Args:
      flag: its full name.
      kind: its type.
      argument: as it was given, perhaps with the value.
      pending: the arguments after it; the first is removed if it is the value.

    Raises:
      ValueError: there is no value.
    """
    _, equals, text = argument.partition("=")
    if equals:
        return text
    if pending and not pending[0].startswith("--"):
        return pending.popleft()
    if kind is not bool:
        raise expected(flag, "a value", "none")
    return "True"


def split_values(args: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Flags with one value, and those with several, as ``--name=value``.

    Values stand between commas; texts, of which commas may be part, between ``|``. A
    text that changes no result, such as ``--workdir``, counts as one value.

    Returns:
      The former, and for each of the latter a list with one flag per value.
    """
    preset = parse_preset(args)
    types, counting = _types(preset), preset.identity()
    fixed, several = [], []
    given = _last(_read_flags(preset, args, check=False))
    for name, argument in given.items():
        text = argument.partition("=")[2]
        is_text = str in (get_args(types.get(name)) or (types.get(name),))
        mark = "|" if is_text else ","
        counts = not is_text or name.removeprefix("--") in counting
        if mark in text and counts:
            several.append([f"{name}={value.strip()}" for value in text.split(mark)])
        else:
            fixed.append(argument)
    return fixed, several


def _last(given: Iterable[str]) -> dict[str, str]:
    """Arguments ``--name=value`` by name: of those given twice the last counts."""
    return {argument.partition("=")[0]: argument for argument in given}


def full_name(flag: str, types: Iterable[str]) -> str:
    """The flag that a short form means: ``--steps`` is ``--train.steps``, ``--lr`` its
    learning rate. An ambiguous one without a match in ``--train`` is left unchanged."""
    types = list(types)
    if flag in types:
        return flag
    short = _SHORT.get(flag.replace("--train.", "--"), flag)
    ends = [name for name in types if name.endswith(f".{short.removeprefix('--')}")]
    of_train = f"--train.{short.removeprefix('--')}"
    for found in (short, of_train, ends[0] if len(ends) == 1 else ""):
        if found in types:
            return found
    return flag


_SHORT = {
    "--lr": "--train.learning_rate",
    "--batch": "--train.batch_size",
    "--dim": "--model.embed_dim",
    "--layers": "--model.num_layers",
    "--heads": "--model.num_heads",
}


_FEW = 16


def _check_required(kind: type, given: Iterable[str]) -> None:
    names = {flag.partition("=")[0].removeprefix("--") for flag in given}
    for field in dataclasses.fields(kind):
        default = (field.default, field.default_factory)
        if default == (dataclasses.MISSING,) * 2 and field.name not in names:
            raise expected(f"--{field.name}", "a value", "none")


def _unknown(flag: str, settings: Any, types: Iterable[str]) -> ValueError:
    """With the nearest name, since there are too many to list."""
    types = list(types)
    meant = " or ".join(map(repr, _meant(flag, types)))
    part = flag.rpartition(".")[0]
    own = sorted(x for x in types if part and x.startswith(f"{part}."))
    there = (
        f"there are {', '.join(own)}" if 0 < len(own) <= _FEW else "--help lists them"
    )
    near = f"; did you mean {meant}?" if meant else f"; {there}"
    if flag in ("--epochs", "--train.epochs", "--num_epochs"):
        near = "; training is counted in steps, --train.steps, of --train.batch_size"
    task = getattr(settings, "task", "")
    of = f" of --task={task}" if flag.startswith("--data.") else ""
    return expected(flag, f"a flag{of}", f"an unknown one{near}")


def _meant(flag: str, types: list[str]) -> list[str]:
    """The flags that an unknown one may mean: those of the same name in other parts of
    the settings, or else the nearest one, preferably in its own part."""
    part, _, name = flag.removeprefix("--").rpartition(".")
    same = [x for x in types if x.removeprefix("--").rpartition(".")[2] == name]
    if same:
        return same
    own = [x for x in types if part and x.startswith(f"--{part}.")]
    if own:
        near = nearest(name, [x.rpartition(".")[2] for x in own])
        return [] if near is None else [f"--{part}.{near}"]
    whole = [x.removeprefix("--") for x in types]
    ends = {x.rpartition(".")[2] for x in whole}
    short = [x.removeprefix("--") for x in _SHORT if full_name(x, types) in types]
    near = nearest(flag.removeprefix("--"), ["help", *whole, *sorted(ends), *short])
    if near is None:
        return []
    several = [x for x in types if x.endswith(f".{near}")]
    return several if len(several) > 1 else [f"--{near}"]


def _types(settings: Any, prefix: str = "--") -> dict[str, Any]:
    """The type of each flag of a dataclass, or of an instance, which includes the
    task's own settings."""
    found = {}
    kind = settings if isinstance(settings, type) else type(settings)
    hints = get_type_hints(kind)
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name, None)
        part = value if dataclasses.is_dataclass(value) else hints[field.name]
        if dataclasses.is_dataclass(part):
            found |= _types(part, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = hints[field.name]
    return found
