"""The single form of errors in user input: ``name: expected ..., got ...``."""

import collections.abc
import contextlib
import dataclasses
import difflib
import math
import numbers
import os
import types
from collections.abc import Iterable, Iterator
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)


class InputError(ValueError):
    """An argument or a flag does not fit: ``name: problem``.

    Attributes:
      name: the argument, flag or file.
      problem: what is wrong with it, in words.
    """

    def __init__(self, name: str, problem: str):
        super().__init__(name, problem)
        self.name = name
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.name}: {self.problem}"


def expected(name: str, needed: object, got: object) -> InputError:
    """Returns an error to raise: ``name: expected needed, got got``.

    ``name`` is the argument or flag; a value that it got is given as ``f"{value!r}"``.
    """
    return InputError(name, f"expected {needed}, got {got}")


def known(name: str, value: str, choices: Iterable[str]) -> str:
    """Returns a user's value, of any type, if it is one of the choices.

    Raises:
      ValueError: ``--task: expected one of listops, text, got 'listop'; did you mean
        'listops'?``
    """
    choices = list(choices)
    if value in choices:
        return value
    one = f"one of {', '.join(choices)}" if choices else "none"
    raise expected(name, one, f"{value!r}{did_you_mean(value, choices)}")


def check_path(name: str, path: os.PathLike) -> None:
    """Raises ``ValueError`` if Orbax or tfds would read a path as a pattern.

    They list files by patterns that begin with the whole path, and would find none.
    """
    signs = "*?[" if os.sep == "\\" else "*?[\\"
    if any(sign in os.path.abspath(path) for sign in signs):
        needed = f"a path without {' '.join(signs)}"
        raise expected(name, needed, os.path.abspath(path))


# By part of a run's config: settings of earlier versions, which a file may still have,
# with the values that had no effect.
_REMOVED: dict[str, dict[str, Any]] = {
    "model": {"ema": 0, "readings": 1},
    "pretrain": {"target": "tokens", "probe_steps": 0},
    "data": {"paths": False},
}


def drop_removed(part: str, settings: Any, name: str) -> dict[str, Any]:
    """The settings that a file holds for a part of a run's config, such as "model",
    without those that this version no longer has.

    Raises:
      ValueError: a removed setting had an effect; ``name`` is that of the file.
      TypeError: the settings are not a dict.
    """
    if not isinstance(settings, dict):
        raise TypeError(a_thing(settings))
    kept = dict(settings)
    for setting, default in _REMOVED.get(part, {}).items():
        value = kept.pop(setting, default)
        if value != default:
            setting = f"{part}.{setting}"
            needed = f"{setting}={default!r}, the only value in this version"
            raise expected(name, needed, f"{value!r}")
    return kept


def check_types(settings: Any, prefix: str = "") -> None:
    """Raises ``ValueError`` unless a dataclass has values of its fields' types.

    Checks fields that are text, booleans, numbers, or `Literal`s, and the `Range` in a
    number's annotation; the error's name is the field's, after the prefix. Integers
    must fit into 32 bits, like those of arrays and seeds.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for name, hint in hints.items():
        check_type(f"{prefix}{name}", hint, getattr(settings, name))


def check_type(name: str, hint: Any, value: Any) -> None:
    """The same for one value, or for those of a ``Mapping``."""
    marks, kinds = [], []
    pending = [hint]
    while pending:  # Both ``Rate | None`` and its parts.
        kind = pending.pop(0)
        if get_origin(kind) is Annotated:
            marks += [x for x in kind.__metadata__ if isinstance(x, Range | Names)]
            pending.insert(0, kind.__origin__)
        elif get_origin(kind) in (Union, types.UnionType):
            pending += get_args(kind)
        else:
            kinds.append(kind)
    alone = get_origin(kinds[0]) if len(kinds) == 1 else None
    if alone is Literal:
        known(name, value, get_args(kinds[0]))
    elif alone is collections.abc.Mapping:
        if not isinstance(value, dict):
            raise expected(name, "a dict", f"{value!r}"[:60])
        for key, part in value.items():
            check_type(f"{name}: {key}", get_args(kinds[0])[1], part)
    if not set(kinds) <= _WORDS.keys():
        return
    if not any(_is_of(kind, value) for kind in kinds):
        raise expected(name, " or ".join(_WORDS[x] for x in kinds), f"{value!r}"[:60])
    if isinstance(value, int) and float not in kinds and abs(value) > _LARGEST:
        raise expected(name, f"a number of at most {_LARGEST}", f"{value}"[:60])
    for one in marks:
        if value is not None and value not in one:
            hint = did_you_mean(f"{value}", getattr(one, "names", ()))
            raise expected(name, one.words, f"{value!r}"[:60] + hint)


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers that a setting may have, as part of its type: `Size`, `Rate`; for a
    text, its lengths.

    Attributes:
      words: what the error says is expected.
      least, most: the smallest and the largest number.
      above, below: numbers that are just outside.
    """

    words: str
    least: float = 0
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf

    def __contains__(self, value: float | str) -> bool:
        size = len(value) if isinstance(value, str) else value
        return self.least <= size <= self.most and self.above < size < self.below


@dataclasses.dataclass(frozen=True)
class Names:
    """The names that a text may be, as part of its type, besides the path of a user's
    own object, ``package.module:thing``.
    """

    names: tuple[str, ...]

    def __contains__(self, value: str) -> bool:
        return value in self.names or ":" in value

    @property
    def words(self) -> str:
        """The names, as an error lists them."""
        return f"one of {', '.join(self.names)}, or 'package.module:thing'"


Size = Annotated[int, Range("a positive int", 1)]
Count = Annotated[int, Range("0 or a positive int")]
Positive = Annotated[float, Range("a positive finite number", above=0)]
NotNegative = Annotated[float, Range("0 or a positive finite number")]
Rate = Annotated[float, Range("a number in [0, 1)", below=1)]
Name = Annotated[str, Range("a name", 1)]
Percent = Annotated[float, Range("a number from 0 to 100", 0, 100)]
Amount = Annotated[float, Range("0 or a positive number", 0, 1e18)]
Finite = Annotated[float, Range("a finite number", -1e18, 1e18)]


_WORDS = {
    bool: "True or False",
    int: "an int",
    float: "a number",
    str: "text",
    type(None): "None",
}
_NUMBERS = {int: numbers.Integral, float: numbers.Real}
_LARGEST = 2**31 - 1
_MOST = 300  # characters of another error's text


def _is_of(kind: type, value: object) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, _NUMBERS.get(kind, kind))


def within(place: str, error: ValueError) -> InputError:
    """Returns an error to raise that also gives the place, a flag, or a file and its
    line: ``place: name: ...``."""
    return InputError(place, str(error))


def rename(error: ValueError, name: str) -> InputError:
    """Returns the same error, to raise, for another name, such as the flag."""
    problem = error.problem if isinstance(error, InputError) else str(error)
    return InputError(name, problem)


@contextlib.contextmanager
def writable(name: str, kind: str, path: object) -> Iterator[None]:
    """Context whose ``OSError`` becomes a ``ValueError``: the path, "a file" or "a
    folder" that a flag or an argument names, cannot be written."""
    try:
        yield
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise expected(name, f"{kind} that can be written", got) from error


def reason(error: Exception) -> str:
    """In words, why a file or a value could not be read."""
    if isinstance(error, OSError):
        return (error.strerror or first_line(error)).lower()
    if isinstance(error, KeyError):
        return f"none named {error}"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none."""
    text = str(error).strip().partition("\n")[0]
    return _shorten(text) or type(error).__name__


def on_one_line(error: BaseException) -> str:
    """An error's text on one line, or its type if it has none.

    It includes the note with the shapes with which a user's attention was called.
    """
    notes = getattr(error, "__notes__", ())
    shapes = [note for note in notes if note.startswith("called with ")]
    text = _shorten(" ".join(str(error).split())) or type(error).__name__
    return "; ".join([text, *shapes])


def _shorten(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - 4]} ..."


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """``; did you mean 'listops'?``, or nothing if no choice is close."""
    near = nearest(value, choices)
    return "" if near is None else f"; did you mean {near!r}?"


def nearest(value: str, choices: Iterable[str]) -> str | None:
    """The choice closest to a mistyped one; None if none is close."""
    near = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=_NEAR)
    return near[0] if near else None


# For difflib's ratios: 'modem' is close to 'modern', but 'batch' is not to 'path'.
_NEAR = 0.7


def a_thing(value: object) -> str:
    """The type of a value in words: ``an int``, ``a dict``."""
    name = type(value).__name__
    an = name[0] in "aeioAEIO" or name.startswith("nd")  # An ndarray.
    return f"{'an' if an else 'a'} {name}"
