"""The one form of error for what a user gave: ``name: expected ..., got ...``."""

import difflib
import math
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints


def expected(name: str, wanted: object, got: object) -> ValueError:
    """Returns, to be raised, a ``ValueError``: ``name: expected wanted, got got``.

    Args:
      name: the argument or flag.
      wanted: in words, or a value.
      got: in words, or a value as text, such as ``f"{value!r}"``.
    """
    return ValueError(f"{name}: expected {wanted}, got {got}")


def known(name: str, value: str, choices: Iterable[str]) -> str:
    """Returns ``value`` when it is one of ``choices``; it may be of any type.

    Args:
      name: the argument or flag.
      value: as the user gave it.
      choices: all that are known.

    Raises:
      ValueError: ``--task: expected one of listops, text, got 'listop'; did you mean
        'listops'?``
    """
    choices = list(choices)
    if value in choices:
        return value
    one = f"one of {', '.join(choices)}" if choices else "none"
    raise expected(name, one, f"{value!r}{did_you_mean(value, choices)}")


def check_choices(settings: Any, prefix: str = "") -> None:
    """Raises ``ValueError`` unless each ``Literal`` field of a dataclass has a value
    of its type; the error's name is the field's, after the prefix."""
    for name, kind in get_type_hints(type(settings)).items():
        if get_origin(kind) is Literal:
            known(f"{prefix}{name}", getattr(settings, name), get_args(kind))


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """``; did you mean 'listops'?``, or nothing where no choice is near."""
    near = difflib.get_close_matches(str(value), list(choices), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def positive(name: str, value: float) -> None:
    """Raises ``ValueError`` unless a number is above 0 and finite."""
    if not 0 < value < math.inf:
        raise expected(name, f"a positive {_kind(value)}", value)


def not_negative(name: str, value: float) -> None:
    """Raises ``ValueError`` unless a number is 0, or above and finite."""
    if not 0 <= value < math.inf:
        raise expected(name, f"0 or a positive {_kind(value)}", value)


def _kind(value: float) -> str:
    return "int" if isinstance(value, int) else "finite number"
