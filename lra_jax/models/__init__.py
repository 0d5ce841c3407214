"""Flax NNX modules around the mechanisms of ``lra_jax.attention``.

Dropout keys come with the call, ``model(tokens, lengths, rngs=nnx.Rngs(dropout=key))``,
so no module holds random state, and ``nnx.split(model, (nnx.Param, Buffer))`` captures
everything: the trained arrays, the fixed ones, and the running means of batch norms.

Importing this package does not import jax; modules are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lra_jax.models.arrays import load_arrays, save_arrays
    from lra_jax.models.attention import Buffer, MultiHeadAttention
    from lra_jax.models.classifier import SequenceClassifier
    from lra_jax.models.config import ModelConfig
    from lra_jax.models.encoder import Block, EncoderBlock, TransformerEncoder
    from lra_jax.models.generation import generate
    from lra_jax.models.language import CausalLM, MaskedLM
    from lra_jax.models.matching import MatchingClassifier
    from lra_jax.models.pretrained import PretrainedEncoder, from_softmax
    from lra_jax.models.saved import Prediction, Saved, load, save
    from lra_jax.models.tokens import AutoEncoder, TokenClassifier

__all__ = [
    "AutoEncoder",
    "Block",
    "Buffer",
    "CausalLM",
    "EncoderBlock",
    "MaskedLM",
    "MatchingClassifier",
    "ModelConfig",
    "MultiHeadAttention",
    "Prediction",
    "PretrainedEncoder",
    "Saved",
    "SequenceClassifier",
    "TokenClassifier",
    "TransformerEncoder",
    "from_softmax",
    "generate",
    "load",
    "load_arrays",
    "save",
    "save_arrays",
]

_MODULES = {
    "arrays": "load_arrays, save_arrays",
    "attention": "Buffer, MultiHeadAttention",
    "classifier": "SequenceClassifier",
    "config": "ModelConfig",
    "encoder": "Block, EncoderBlock, TransformerEncoder",
    "generation": "generate",
    "language": "CausalLM, MaskedLM",
    "matching": "MatchingClassifier",
    "pretrained": "PretrainedEncoder, from_softmax",
    "saved": "Prediction, Saved, load, save",
    "tokens": "AutoEncoder, TokenClassifier",
}
_PLACES = {
    name: module for module, names in _MODULES.items() for name in names.split(", ")
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PLACES])
