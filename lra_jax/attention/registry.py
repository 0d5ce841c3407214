"""Finds a mechanism by its name, its function or its path."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from lra_jax.attention import outside
from lra_jax.attention.mechanism import Gate, Mechanism
from lra_jax.attention.table import MECHANISMS
from lra_jax.errors import did_you_mean, expected

__all__ = [
    "MECHANISMS",
    "Gate",
    "Mechanism",
    "accepted_keywords",
    "as_causal",
    "names",
    "resolve",
    "spell",
]


def names() -> tuple[str, ...]:
    """The registered names, in the order of the table."""
    return tuple(MECHANISMS)


def resolve(spec: Any, argument: str = "attention") -> Mechanism:
    """Finds a mechanism.

    Args:
      spec: a registered name; a function ``(query, key, value, ...)``; a class or
        factory of ``nnx.Module``; a Python module with ``NAME_attention``, where NAME
        is the last part of the module's name, or with ``MECHANISM``; a `Mechanism`; or
        a string "package.module:function" for any of these, where ``function`` may be
        just NAME.
      argument: names the spec in the error about an unknown name.

    Returns:
      The mechanism. A function of this package, however it is named, resolves to its
      registered mechanism; for any other the capabilities are None. The parameters of a
      function ``NAME_attention`` come from ``NAME_parameters`` in the same module, if
      there is one, and its dense form is ``NAME_weights``.

    Raises:
      ValueError: there is no such name, module or attribute, it cannot be called, or it
        is a module instance: all layers would share its arrays, and none would train
        them.

    Examples:
      >>> resolve("cosformer").cost
      '2 (T + S) H^2'
      >>> resolve("cosfromer")
      Traceback (most recent call last):
      lra_jax.errors.InputError: attention: expected ...
    """
    if isinstance(spec, Mechanism):
        return spec
    if isinstance(spec, str) and ":" in spec:
        return _known(outside.mechanism(outside.load(spec), spec))
    if not isinstance(spec, str):
        return _known(outside.mechanism(spec))
    if spec not in MECHANISMS:
        needed = f"one of {', '.join(MECHANISMS)}, or 'package.module:function'"
        hint = did_you_mean(spec.lower(), MECHANISMS)
        if outside.is_module(spec):
            hint = f", a module: add ':' and a name in it, as in '{spec}:f'"
        if "," in spec:
            hint = "; several that blocks take in turn are a `hybrid`"
        raise expected(argument, needed, f"{spec!r}{hint}")
    return MECHANISMS[spec]


def _known(mechanism: Mechanism) -> Mechanism:
    """The registered mechanism, if this is its function or entry."""
    function = getattr(mechanism.function, "__name__", None)
    name = function or f"{mechanism.name}_attention"
    for one in MECHANISMS.values():
        if (mechanism.module, name) == (one.module, f"{one.name}_attention"):
            return one
    return mechanism


def spell(thing: Any) -> str:
    """The string that `resolve` maps to this object: its inverse.

    Raises:
      ValueError: there is none, as for a function defined inside another.
    """
    kinds = types.ModuleType | Mechanism
    if not (callable(thing) or isinstance(thing, kinds)):
        return thing  # A string, or something that `resolve` does not accept.
    mechanism = resolve(thing)
    if MECHANISMS.get(mechanism.name) is mechanism:
        return mechanism.name
    if isinstance(thing, types.ModuleType):
        return f"{thing.__name__}:{outside.stem(thing)}"
    return outside.locate(thing, "attention")


def as_causal(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an attention function causal, whatever ``is_causal`` it is called with.

    For ``nnx.MultiHeadAttention(attention_fn=...)``, which always passes
    ``is_causal=False`` and so overrides the value in a ``functools.partial``. With
    ``decode=True`` that layer passes one query and all keys, but not the query's
    position, so the function raises; decode with ``X_prefill`` and ``X_step`` instead.

    Args:
      function: ``f(query, key, value, ..., is_causal=...)``, or a partial of one.

    Raises:
      ValueError: it has no causal form, or, when called, query and key differ in
        length.

    Examples:
      >>> from flax import nnx
      >>> from lra_jax.attention import cosformer_attention
      >>> attend = as_causal(functools.partial(cosformer_attention, max_length=128))
      >>> layer = nnx.MultiHeadAttention(
      ...     4, 64, attention_fn=attend, decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 128, 64))).shape
      (2, 128, 64)
    """
    mechanism = resolve(getattr(function, "func", function))
    accepted = accepted_keywords(function)
    takes = accepted is None or "is_causal" in accepted
    if mechanism.causal is False or not takes:
        able = (name for name, one in MECHANISMS.items() if one.causal)
        needed = f"one with a causal form, as {', '.join(able)} have"
        raise expected("attention", needed, f"{mechanism.name!r}")

    # Hides module and name, by which `resolve` would take it for the mechanism.
    @functools.wraps(function, assigned=functools.WRAPPER_ASSIGNMENTS[2:])
    def causal(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords | {"is_causal": True})

    return causal


def accepted_keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """The keywords that an attention function accepts.

    The first three positional parameters, query, key and value, are left out. None
    means that it accepts any keyword (it has ``**keywords``). The ``**flax`` of our own
    functions does not count: they ignore what Flax passes and reject the rest.

    Examples:
      >>> sorted(accepted_keywords(lambda query, key, value, mask=None, window=8: key))
      ['mask', 'window']
    """
    parameters = list(inspect.signature(function).parameters.values())
    if any(p.kind is p.VAR_KEYWORD and p.name != "flax" for p in parameters):
        return None
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first = [p for p in named if p.kind is not p.KEYWORD_ONLY][:3]
    return frozenset(
        p.name for p in named if p not in first and p.kind is not p.POSITIONAL_ONLY
    )
