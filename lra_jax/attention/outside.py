"""Attention from outside this package: a user's own functions, modules and entries.

Flax is never imported here: anyone with a Flax module has already imported it.
"""

import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lra_jax.attention.mechanism import Mechanism, beside
from lra_jax.errors import a_thing, did_you_mean, expected

_KINDS = "a function, a module of functions, an nnx.Module class or a Mechanism"


def mechanism(thing: Any, name: str | None = None) -> Mechanism:
    """Wraps an object as a mechanism; see `lra_jax.attention.resolve`.

    Raises:
      ValueError: it is not a mechanism.
    """
    if isinstance(thing, types.ModuleType):
        return _of_module(thing, name)
    if isinstance(thing, Mechanism):
        place = thing.module or (name or "").partition(":")[0]
        return thing if place == thing.module else replace(thing, module=place)
    shown = name or getattr(thing, "__qualname__", type(thing).__name__)
    nnx, linen = _flax("nnx"), _flax("linen")
    maker = getattr(thing, "func", thing)  # What a functools.partial calls.
    is_class = inspect.isclass(maker)
    # True for a module, and for a method of one.
    if isinstance(getattr(thing, "__self__", thing), nnx):
        needed = "a class or factory of modules, of which each layer trains one"
        raise expected("attention", needed, f"{shown!r}, an instance of a module")
    if isinstance(thing, linen) or (is_class and issubclass(maker, linen)):
        needed = f"{_KINDS} (nnx.bridge.ToNNX makes one of a Linen module)"
        raise expected("attention", needed, f"{shown!r}, a Linen module")
    if not callable(thing):
        needed = (
            f"{name!r} to be a function" if name else f"a registered name, {_KINDS}"
        )
        got = a_thing(thing) if name else f"{thing!r}"
        raise expected("attention", needed, got)
    module = getattr(thing, "__module__", None) or ""
    if (is_class and issubclass(maker, nnx)) or _takes_rngs(thing):
        summary = "a module from outside lra_jax"
        return Mechanism(name=shown, module=module, summary=summary, make=thing)
    check_call(thing, shown)
    return Mechanism(
        name=shown,
        module=module,
        summary="a function from outside lra_jax",
        parameters=beside(thing, "parameters"),
        function=thing,
    )


def _flax(api: str) -> Any:
    """Flax's module class, or an empty tuple, which no object is an instance of."""
    return getattr(sys.modules.get(f"flax.{api}"), "Module", ())


def check_call(function: Callable[..., Any], name: str) -> None:
    """Raises ``ValueError`` unless a function takes query, key and value."""
    try:
        inspect.signature(function).bind_partial("query", "key", "value")
    except (TypeError, ValueError) as error:
        needed = f"{name!r} to take (query, key, value, ...)"
        raise expected("attention", needed, error) from error


def _takes_rngs(function: Callable[..., Any]) -> bool:
    try:
        return "rngs" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _of_module(module: types.ModuleType, name: str | None) -> Mechanism:
    """The mechanism of a module: its ``MECHANISM``, or its ``NAME_attention``."""
    entry = getattr(module, "MECHANISM", None)
    if isinstance(entry, Mechanism):
        return replace(entry, module=entry.module or module.__name__)
    needed = f"{stem(module)}_attention"
    if not hasattr(module, needed):
        got = f"the module {module.__name__!r} without"
        raise expected("attention", f"{needed} in a module of functions", got)
    return mechanism(getattr(module, needed), name)


def stem(module: types.ModuleType) -> str:
    """The last part of a module's name."""
    return module.__name__.rpartition(".")[2]


def is_module(name: str) -> bool:
    """Whether a name is that of an importable module."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def load(spec: str, argument: str = "attention") -> Any:
    """The object that ``package.module:thing`` names.

    Args:
      spec: for an attention, ``thing`` may leave out ``_attention`` at its end.
      argument: or flag, for errors.

    Raises:
      ValueError: there is none, or its module cannot be imported.
    """
    path, _, attribute = spec.partition(":")
    if not path or not attribute:
        raise expected(argument, "'package.module:function'", f"{spec!r}")
    if "/" in path or path.endswith(".py"):
        module = path.removesuffix(".py").strip("./").replace("/", ".")
        needed = f"the name of a module, as in {f'{module}:{attribute}'!r}"
        raise expected(argument, needed, f"a file's, {path!r}")
    thing: Any = _import(path, spec, argument)
    for part in attribute.split("."):
        longer = f"{part}_attention"
        if hasattr(thing, longer) and not hasattr(thing, part):
            part = longer
        if not hasattr(thing, part) and isinstance(thing, types.ModuleType):
            submodule = f"{thing.__name__}.{part}"
            if is_module(submodule):
                _import(submodule, spec, argument)
        if not hasattr(thing, part):
            names = (name.removesuffix("_attention") for name in dir(thing))
            hint = did_you_mean(part, names)
            needed = f"{attribute!r} in the module {path!r}"
            raise expected(argument, needed, f"no attribute {part!r}{hint}")
        thing = getattr(thing, part)
    return thing


def locate(thing: Any, argument: str) -> str:
    """The path that `load` maps to this object: its inverse.

    Raises:
      ValueError: there is none, as for a function defined inside another.
    """
    home, name = (getattr(thing, part, "") for part in ("__module__", "__qualname__"))
    object_there: Any = sys.modules.get(home)
    for part in name.split("."):
        object_there = getattr(object_there, part, None)
    if object_there is not thing:
        needed = "an object that its module can find, or 'package.module:function'"
        raise expected(argument, needed, f"{name or thing!r}")
    return f"{home}:{name}"


def _import(name: str, spec: str, argument: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        needed = f"an importable module before ':' in {spec!r}"
        if name != spec.partition(":")[0]:
            needed = f"{name!r}, which {spec!r} names, to import"
        got = f"{type(error).__name__}: {error}"
        raise expected(argument, needed, got) from error
