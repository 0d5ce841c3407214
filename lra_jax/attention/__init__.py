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

import importlib
from typing import TYPE_CHECKING, Any

from lra_jax.attention.mechanism import Gate, Mechanism
from lra_jax.attention.registry import accepted_keywords, as_causal, names, resolve
from lra_jax.attention.table import MECHANISMS

if TYPE_CHECKING:
    from lra_jax.attention.flow.flow import *
    from lra_jax.attention.gated_units.flash import *
    from lra_jax.attention.gated_units.gau import *
    from lra_jax.attention.linear.cosformer import *
    from lra_jax.attention.linear.lightning import *
    from lra_jax.attention.linear.linear import *
    from lra_jax.attention.linear.norm import *
    from lra_jax.attention.linear.performer import *
    from lra_jax.attention.linear.retention import *
    from lra_jax.attention.low_rank.fnet import *
    from lra_jax.attention.low_rank.linformer import *
    from lra_jax.attention.low_rank.luna import *
    from lra_jax.attention.low_rank.nystrom import *
    from lra_jax.attention.recurrent.delta import *
    from lra_jax.attention.recurrent.gated_delta import *
    from lra_jax.attention.recurrent.gla import *
    from lra_jax.attention.recurrent.hgrn import *
    from lra_jax.attention.softmax.bigbird import *
    from lra_jax.attention.softmax.local import *
    from lra_jax.attention.softmax.longformer import *
    from lra_jax.attention.softmax.reformer import *
    from lra_jax.attention.softmax.sinkhorn import *
    from lra_jax.attention.softmax.softmax import *
    from lra_jax.attention.softmax.sparse import *
    from lra_jax.attention.softmax.synthesizer import *

__all__ = [
    "MECHANISMS",
    "Gate",
    "Mechanism",
    "accepted_keywords",
    "as_causal",
    "names",
    "resolve",
]


def __getattr__(name: str) -> Any:
    """A function or type of a mechanism, whose name begins with the mechanism's."""
    plain = name.replace("_", "").lower()
    for mechanism in MECHANISMS.values():
        if plain.startswith(mechanism.name.replace("_", "")):
            module = importlib.import_module(mechanism.module)
            if name in module.__all__:
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    public = [*__all__]
    for name, mechanism in MECHANISMS.items():
        stream = ("init", "prefill", "step") if mechanism.stream else ()
        public += [f"{name}_{part}" for part in ("attention", "weights", *stream)]
        others = mechanism.parameters, mechanism.layout, mechanism.memory
        public += [str(other) for other in others if other is not None]
    return sorted(public)
