"""Attention mechanisms as pure functions of arrays.

For each registered mechanism X there are ``X_attention(query, key, value, mask=None,
is_causal=False, ...)`` and ``X_weights(query, key, ...)``, the dense `[B, N, T, S]`
matrix that the fast form never builds. Mechanisms with a stream also have ``X_init``,
``X_prefill`` and ``X_step``, for decoding with a state of constant size.
`lra_jax.attention.inputs` describes the layout, and `lra_jax.attention.masking` the
masks. Pass the mask by name, because some mechanisms take arrays of their own before
it. ``python -m lra_jax.attention`` lists the mechanisms.

Importing this package does not import jax; functions are loaded on first use.
"""

import functools
import importlib
from typing import Any

from lra_jax.attention.registry import (
    MECHANISMS,
    MODULES,
    Gate,
    Mechanism,
    accepted_keywords,
    as_causal,
    names,
    public_names,
    resolve,
)

# `__init__.pyi` lists the same names for type checkers and editors, one line per
# module; a test compares the two.
__all__ = [
    "MECHANISMS",
    "Gate",
    "Mechanism",
    "accepted_keywords",
    "as_causal",
    "names",
    "resolve",
]


@functools.cache
def _modules() -> dict[str, str]:
    """The module of each public name."""
    return {name: module for module in MODULES for name in public_names(module)}


def __getattr__(name: str) -> Any:
    if name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_modules()[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_modules()])
