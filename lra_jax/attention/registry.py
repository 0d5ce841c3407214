"""The mechanisms by name: those of the table, and functions from outside.

Importing this module does not import jax: command lines list and check mechanisms
before they pay for it. The functions are imported when they are first asked for.
"""

import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from lra_jax.attention.mechanism import Gate, Mechanism
from lra_jax.attention.table import MECHANISMS

__all__ = ["MECHANISMS", "Gate", "Mechanism", "accepted_keywords", "names", "resolve"]


def names() -> tuple[str, ...]:
    """The registered names, in the order of the table."""
    return tuple(MECHANISMS)


def resolve(spec: "str | Callable[..., Any] | Mechanism") -> Mechanism:
    """Finds a mechanism.

    Args:
      spec: a registered name, a function ``(query, key, value, ...)``, the string
        "package.module:function", or a `Mechanism`, which is returned as it is.

    Returns:
      The mechanism. A function of this package, however it was given, is its registered
      mechanism; for any other the capabilities are None.

    Raises:
      ValueError: no such name, module or attribute, or it cannot be called.
    """
    if isinstance(spec, Mechanism):
        return spec
    if callable(spec):
        return _foreign(spec)
    if not isinstance(spec, str):
        raise ValueError(
            "attention: expected a registered name, 'package.module:function' or a "
            f"function, got {spec!r}"
        )
    if ":" in spec:
        return _foreign(_load(spec), spec)
    if spec not in MECHANISMS:
        near = difflib.get_close_matches(spec.lower(), MECHANISMS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"attention: expected one of {', '.join(MECHANISMS)}, or "
            f"'package.module:function', got {spec!r}{hint}"
        )
    return MECHANISMS[spec]


def _foreign(function: Callable[..., Any], name: str | None = None) -> Mechanism:
    module = getattr(function, "__module__", None) or ""
    own_name = getattr(function, "__qualname__", type(function).__name__)
    for mechanism in MECHANISMS.values():
        if (module, own_name) == (mechanism.module, f"{mechanism.name}_attention"):
            return mechanism
    return Mechanism(
        name=name or own_name,
        module=module,
        summary="a function from outside lra_jax",
        function=function,
    )


def _load(spec: str) -> Callable[..., Any]:
    path, _, attribute = spec.partition(":")
    if not path or not attribute:
        raise ValueError(f"attention: expected 'package.module:function', got {spec!r}")
    try:
        found = importlib.import_module(path)
    except Exception as error:
        raise ValueError(
            f"attention: expected a module that imports before ':' in {spec!r}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"attention: expected {attribute!r} in the module {path!r}, "
                f"got no attribute {part!r}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"attention: expected {spec!r} to be a function, got a "
            f"{type(found).__name__}"
        )
    return found


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords that may be passed to an attention function.

    Its first three positional parameters, query, key and value, are left out. None
    means that any keyword may be passed (it has a ``**keywords``).
    """
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ][:3]
    return frozenset(
        p.name
        for p in parameters
        if p.name not in positional
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    )
