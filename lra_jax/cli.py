"""Shared by the command lines: parsing, one-line errors, exit codes.

Exit codes: 0 success; 1 the run failed; 2 the command was invalid; 128 + n stopped by
signal n. With ``--debug`` the traceback of an error is shown before its line.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import itertools
import logging
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from lra_jax import progress, runtime, signals
from lra_jax.attention import registry
from lra_jax.configs import TASKS, Config, get_preset
from lra_jax.configs.registry import find_task
from lra_jax.errors import InputError, expected, nearest, on_one_line
from lra_jax.models.config import ModelConfig, Text
from lra_jax.signals import Exit

Parsed = TypeVar("Parsed")
Run = TypeVar("Run", bound=Config)


def fail(message: str, code: int = 2) -> NoReturn:
    """Prints ``error: message`` as one line on stderr and exits."""
    if _debugs and sys.exc_info()[0] is not None:
        traceback.print_exc()
    progress.aside(f"error: {' '.join(message.split())}")
    raise Exit(code)


def run(main: Callable[[], object]) -> None:
    """Runs a command's function to its end, in a process of its own.

    Any error is one line, even if nobody reads the output. Characters that the output
    cannot show, as in an ASCII locale, are escaped.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with user_errors():
            main()
            sys.stdout.flush()
    finally:
        signals.ignore()
        try:
            sys.stdout.flush()
        except OSError:  # Python would try again, and say so.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turns any error into one line and an exit code.

    The code is 2 for an `InputError` or a disk error, which another command line can
    avoid, and 1 for any other.
    """
    try:
        yield
    except Exit:
        raise
    except BrokenPipeError:
        fail("the output was closed", 128 + signal.SIGPIPE)
    except (InputError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        fail(signals.advice, 128 + signal.SIGINT)
    except BaseException as error:  # Including what the user's code raises.
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


def begin(args: Sequence[str] | None) -> list[str]:
    """The arguments of a command; None = those of this process.

    In the latter case the process belongs to the command: it restarts with the
    allocator's settings, collects garbage less often, and shows warnings, logged ones
    included, on one line.
    """
    if args is not None:
        return arguments(args)
    if not {"-h", "--help"} & {*sys.argv}:
        with user_errors():
            runtime.tune_allocator()
    # Python 3.13's own setting. Tracing makes many objects and few cycles, and after
    # every 700 of them, as in 3.11, collections took a tenth of a short run's time.
    gc.set_threshold(2_000)
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    # Orbax may leave one behind when a save fails, which raises an error of its own.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    log = logging.getLogger("lra_jax")
    log.addHandler(handler)
    log.propagate = False
    return arguments(None)


def parse_preset(args: Sequence[str]) -> Config:
    """The preset that ``--task``, ``--attention`` and ``--preset`` name.

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


def parse_config(
    prog: str,
    description: str,
    args: Sequence[str],
    kind: Callable[..., Run] = Config,
) -> Run:
    """Reads the name of a preset, then all flags on top of its settings.

    A preset's warm-up that is too long for ``--train.steps`` becomes a tenth of them.
    ``kind`` may be a subclass with further flags.
    """
    preset = parse_preset(args)
    default = kind(**{x.name: getattr(preset, x.name) for x in fields(Config)})
    presets = "; ".join(f"{t}: {', '.join(find_task(t).presets)}" for t in TASKS)
    config = parse(
        kind,
        prog,
        f"{description}\n\nTasks and presets: {presets}.\nMechanisms: "
        f"{', '.join(registry.names())}, or package.module:function.\n"
        "Unambiguous short forms of flags work: --steps, --batch-size, --lr.",
        args,
        default=default,
    )
    train = config.train
    names = [word.partition("=")[0].removeprefix("--") for word in args]
    own_warmup = "warmup" in names or "train.warmup" in names
    if not own_warmup and train.steps != preset.train.steps and train.too_warm:
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
        flags = flag_types(default or kind)
        words = full_names(args, flags, getattr(default, "task", ""))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), _switches():
            return tyro.cli(
                kind,
                prog=prog,
                description=description,
                args=words,
                default=default,
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as error:
        if not error.code:
            raise Exit(0) from None
    fail(_message(errors.getvalue()))


def _switches() -> Any:
    """A tyro registry: a boolean flag may stand alone, or have a value."""
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

    values = {"True": True, "False": False, "true": True, "false": False}
    switch = PrimitiveConstructorSpec(
        nargs=(0, 1),
        metavar="{True,False}",
        instance_from_str=lambda words: not words or values[words[0]],
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
        choices=tuple(values),
    )
    text = PrimitiveConstructorSpec(
        nargs=1,
        metavar="STR",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )
    kinds = {bool: switch, Text: text}
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: kinds.get(info.type))

    @registry.struct_rule
    def model(info: Any) -> Any:
        """The fields of a model's config that are flags."""
        if info.type is not ModelConfig:
            return None
        # A subclass, so that tyro's own rule for dataclasses applies.
        info = dataclasses.replace(info, type=type("Flags", (ModelConfig,), {}))
        spec: Any = ConstructorRegistry.get_struct_spec(info)
        flags = {field.name for field in fields(ModelConfig) if not field.metadata}
        chosen = tuple(field for field in spec.fields if field.name in flags)
        return dataclasses.replace(spec, instantiate=ModelConfig, fields=chosen)

    return registry


def _message(text: str) -> str:
    """The message in tyro's box, without its frame, its title and its advice."""
    rows = [row.strip("╭╮╰╯│─ ") for row in text.splitlines()]
    rows = ["" if set(row) == {"-"} else row for row in rows]
    title, *rest = itertools.dropwhile(lambda row: not row, rows)
    rest = itertools.dropwhile(lambda row: not row, rest)
    message = " ".join(itertools.takewhile(bool, rest))
    return message.removeprefix("Error parsing ") or title


def full_names(args: Sequence[str], flags: Iterable[str], task: str = "") -> list[str]:
    """The arguments, with every flag by its full name, which is one of ``flags``.

    Refuses unknown flags, and a flag in two forms, since a user may expect either to
    count. The data settings among the flags are those of ``task``, for errors. Words
    that are not the value of a flag come first: tyro would take one that follows a
    switch for its value.
    """
    flags = list(flags)
    loose, words, forms = [], [], {}
    for before, word in itertools.pairwise(["", *args]):
        form, equals, value = word.partition("=")
        if not form.startswith("--") or form == "--help":
            is_value = before.startswith("--") and "=" not in before
            (words if is_value else loose).append(word)
            continue
        form = f"--{form[2:].replace('-', '_')}"
        flag = _full_name(form, flags) or form
        if flag not in flags:
            of = f" of --task={task}" if task and form.startswith("--data.") else ""
            raise expected(form, f"a flag{of}", f"an unknown one{_hint(form, flags)}")
        if forms.setdefault(flag, form) != form:
            raise expected(flag, "one form of the flag", f"{forms[flag]} and {form}")
        words.append(f"{flag}{equals}{value}")
    return [*loose, *words]


_SHORT = {
    "lr": "learning_rate",
    "batch": "batch_size",
    "dim": "embed_dim",
    "layers": "num_layers",
    "heads": "num_heads",
}


def _full_name(form: str, flags: Sequence[str]) -> str | None:
    """The flag that a form means: ``--steps`` is ``--train.steps``, ``--lr`` its
    learning rate. None if there is none, or if there are several outside ``--train``.
    """
    part, dot, name = form.removeprefix("--").rpartition(".")
    name = _SHORT.get(name, name)
    for flag in (form, f"--{part}{dot}{name}", f"--train.{name}" if not part else ""):
        if flag in flags:
            return flag
    same = [flag for flag in flags if flag.endswith(f".{name}")]
    return same[0] if len(same) == 1 and not part else None


def _hint(form: str, flags: Sequence[str]) -> str:
    """The flags that an unknown one may mean: those of the same name in other parts of
    the settings, or else those of the nearest name."""
    names = [flag.removeprefix("--") for flag in flags]
    ends = [name.rpartition(".")[2] for name in names]
    short = [form for form, name in _SHORT.items() if name in ends]
    near = nearest(form.removeprefix("--"), [*names, *ends, *short])
    for name in (form.removeprefix("--").rpartition(".")[2], near):
        meant = [flag for flag in flags if flag.endswith(f".{name}")]
        if meant:
            return f"; did you mean {' or '.join(map(repr, meant))}?"
    return "; --help lists them" if near is None else f"; did you mean '--{near}'?"


def split_names(flag: str, text: str) -> list[str]:
    """The names in a flag's value, separated by commas: at least one, all distinct."""
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise expected(flag, "different names separated by commas", repr(text))
    return names


def flag_types(settings: Any, prefix: str = "--") -> dict[str, Any]:
    """The type of each flag of a dataclass, or of an instance, which includes the
    task's own settings."""
    types = {}
    for field in (field for field in fields(settings) if not field.metadata):
        value = getattr(settings, field.name, None)
        if dataclasses.is_dataclass(value):
            types |= flag_types(value, f"{prefix}{field.name}.")
        else:
            types[prefix + field.name] = field.type
    return types
