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
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)


def parse_preset(args: Sequence[str]) -> Config:
    """The preset that ``--task``, ``--attention`` and ``--preset`` name.

    It holds the defaults that ``--help`` shows and that all flags then change.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("task", "attention"):
        first.add_argument(f"--{name}", default=getattr(Config(), name))
    first.add_argument("--preset")
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
    presets = "; ".join(f"{t}: {', '.join(find_task(t).presets)}" for t in TASKS)
    return parse(
        Config,
        prog,
        f"{description}\n\nTasks and presets: {presets}.\nMechanisms: "
        f"{', '.join(_mechanisms())}, or package.module:function.",
        args,
        default=preset,
    )


def parse(
    kind: Callable[..., Parsed],
    prog: str,
    description: str,
    args: Sequence[str],
    default: Any = None,
) -> Parsed:
    """Parses flags into a dataclass with tyro; errors are one line and exit code 2."""
    import tyro

    settings = default or kind
    _check_flags(settings, args)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=_with_values(settings, args),
                default=default,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as error:
        if not error.code:
            raise
    fail(_flattened(errors.getvalue()))


def _check_flags(settings: Any, args: Sequence[str]) -> None:
    """Refuses unknown flags with the nearest name; there are too many to list."""
    flags = ["--help", *_flags(settings)]
    for argument in args:
        if not argument.startswith("--"):
            continue
        flag = _flag(argument)
        if flag not in flags:
            near = did_you_mean(flag, flags) or "; --help lists them"
            task = getattr(settings, "task", "")
            of = f" of --task={task}" if flag.startswith("--data.") else ""
            fail(f"{flag}: expected a flag{of}, got an unknown one{near}")


def _with_values(settings: Any, args: Sequence[str]) -> list[str]:
    """A switch without a value, as in ``--allow-code``, gets True."""
    flags = _flags(settings)
    return [
        f"{argument}=True"
        if after.startswith("--")
        and "=" not in argument
        and flags.get(_flag(argument)) is bool
        else argument
        for argument, after in itertools.pairwise([*args, "--"])
    ]


def _flag(argument: str) -> str:
    """The flag as its field is written: ``--train.best-by=loss`` is --train.best_by."""
    return "--" + argument[2:].partition("=")[0].replace("-", "_")


def _flags(settings: Any, prefix: str = "--") -> dict[str, Any]:
    """The flags of a dataclass, or of an instance, whose task's own settings are there;
    each with its type."""
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name, None)
        part = value if dataclasses.is_dataclass(value) else field.type
        if dataclasses.is_dataclass(part):
            found |= _flags(part, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = field.type
    return found


def _flattened(boxed: str) -> str:
    """The text of tyro's framed message, on one line, without title and advice."""
    lines = (_FRAME.sub(" ", line).strip() for line in boxed.splitlines())
    _, *kept = [line for line in lines if line] or [""]
    text = _ADVICE.sub("", " ".join(kept)).strip()
    return text or "the command line could not be read"


def _mechanisms() -> tuple[str, ...]:
    from lra_jax.attention import registry

    return registry.names()
