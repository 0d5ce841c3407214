"""A user's options of a mechanism, sorted by where they belong."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from lra_jax.attention import registry
from lra_jax.attention.inputs import SIZES
from lra_jax.errors import known

# Passed to a mechanism by a module itself, this one or Flax's; never set by the user.
_OF_LAYER = {"mask", "query_mask", "segment_ids", "max_length", "is_causal"}
_OF_LAYER |= {"deterministic"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options as pairs, which a module keeps: in a tuple, Flax would refuse arrays."""

    pairs: tuple[tuple[str, Any], ...]


def split_options(
    mechanism: registry.Mechanism, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sorts a user's options into those of the parameters and those of the function.

    An option that both take (Linformer's ``projection``) goes to both; one that only
    sets the widths of the heads goes to neither.

    For a user's module, the parameters' options are those of its class or factory.

    Raises:
      ValueError: an option that nothing takes; names the nearest one.
    """
    make = mechanism.make or mechanism.make_parameters
    layout = mechanism.make_layout
    parameters = set() if make is None else keyword_names(make) - SIZES
    parameters -= {"dtype", "rng_key", "rngs"}
    widths = set() if layout is None else keyword_names(layout) - {"in_features"}
    accepted = set()
    if mechanism.make is None:
        accepted = keyword_names(mechanism.attention) - _OF_LAYER
        accepted -= {gate.name for gate in mechanism.gates}
    for name in options:
        offered = sorted(accepted | parameters | widths)
        known(f"option of attention {mechanism.name!r}", name, offered)
    of_parameters = {name: x for name, x in options.items() if name in parameters}
    of_function = {name: x for name, x in options.items() if name in accepted}
    return of_parameters, of_function


def keyword_names(function: Callable[..., Any]) -> set[str]:
    """Keywords named by a function, or by a class's ``__init__``, other than query, key
    and value."""
    inner = getattr(function, "func", function)  # For a functools.partial.
    if inspect.isclass(inner):  # A Flax class has the signature (*args, **kwargs).
        function = functools.partial(inner.__init__, None)
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {p.name for p in parameters if p.kind in kinds}
    return names - {"query", "key", "value"}
