"""Shared by the command lines: parsing, errors of one line, exit codes.

Exit codes: 0 done; 1 the run failed; 2 the command was wrong; 128 + n stopped by
signal n.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from lra_jax.configs import TASKS, Config, get_preset
from lra_jax.configs.registry import find_task
from lra_jax.errors import did_you_mean

Parsed = TypeVar("Parsed")

# The frame of tyro's messages, in Unicode or ASCII, and the advice after them.
_FRAME = re.compile(r"[─-╿]+|-{4,}")
_ADVICE = re.compile(r"(Argument helptext:|For full helptext).*")


def fail(message: str, code: int = 2) -> NoReturn:
    """Prints ``error: message`` as one line on stderr and exits."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns a ValueError, or a failing disk, into one line and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)


def parse_preset(args: Sequence[str]) -> Config:
    """The preset that ``--task``, ``--attention`` and ``--preset`` name.

    It holds the defaults that ``--help`` shows and that all flags then change.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("task", "attention", "preset"):
        first.add_argument(f"--{name}", default=getattr(Config(), name))
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            chosen, _ = first.parse_known_args(args)
        except SystemExit:  # A flag without its value: the second stage reports it.
            chosen = first.parse_args([])
    with user_errors():
        return get_preset(chosen.task, chosen.preset, chosen.attention)


def parse_config(prog: str, description: str, args: Sequence[str]) -> Config:
    """Reads a preset's name, then all flags on top of its settings."""
    preset = parse_preset(args)
    args = _with_value("--distributed", args)
    presets = "; ".join(f"{t}: {', '.join(find_task(t).presets)}" for t in TASKS)
    return parse(
        Config,
        prog,
        f"{description}\n\nTasks and presets: {presets}.\nMechanisms: "
        f"{', '.join(_mechanisms())}, or package.module:function.",
        args,
        default=preset,
    )


def _with_value(flag: str, args: Sequence[str]) -> list[str]:
    """A flag that is common without a value gets True."""
    given = list(args)
    for index, (arg, after) in enumerate(itertools.pairwise([*given, "--"])):
        if arg == flag and after.startswith("--"):
            given[index] = f"{flag}=True"
    return given


def parse(
    kind: Callable[..., Parsed],
    prog: str,
    description: str,
    args: Sequence[str],
    default: Any = None,
) -> Parsed:
    """Parses flags into a dataclass with tyro; errors are one line and exit code 2."""
    import tyro

    _check_flags(default or kind, args)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=list(args),
                default=default,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as error:
        if not error.code:
            raise
    fail(_flattened(errors.getvalue()))


def _check_flags(settings: Any, args: Sequence[str]) -> None:
    """Refuses unknown flags with the nearest name; there are too many to list."""
    flags = ["--help", *(f"--{name}" for name in _flag_names(settings))]
    for argument in args:
        if not argument.startswith("--"):
            continue
        flag = "--" + argument[2:].partition("=")[0].replace("-", "_")
        if flag not in flags:
            near = did_you_mean(flag, flags) or "; --help lists them"
            task = getattr(settings, "task", "")
            of = f" of --task={task}" if flag.startswith("--data.") else ""
            fail(f"{flag}: expected a flag{of}, got an unknown one{near}")


def _flag_names(settings: Any, prefix: str = "") -> Iterator[str]:
    """The flags of a dataclass, or of an instance: a task's own settings are there."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name, None)
        part = value if dataclasses.is_dataclass(value) else field.type
        if dataclasses.is_dataclass(part):
            yield from _flag_names(part, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _flattened(boxed: str) -> str:
    """The text of tyro's framed message, on one line, without title and advice."""
    lines = (_FRAME.sub(" ", line).strip() for line in boxed.splitlines())
    _, *kept = [line for line in lines if line] or [""]
    text = _ADVICE.sub("", " ".join(kept)).strip()
    return text or "the command line could not be read"


def _mechanisms() -> tuple[str, ...]:
    from lra_jax.attention import registry

    return registry.names()
