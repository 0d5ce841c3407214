"""What the presets of several tasks share.

official: google-research/long-range-arena, the config files and the constants that
  stand in its models' code. Adam (0.9, 0.98, 1e-9) with decoupled weight decay, no
  clipping, no biases in the attention's projections, token embeddings of standard
  deviation 1, every batch padded to the full length, token 0 as padding. Its mechanisms
  differ from ours of the same name in places that `lra_jax/attention/` names; it also
  leaves padding unmasked in Linformer, Performer and the Linear Transformer, and has
  dropout of the attention's weights, which we have not.
compact: the small model that the PyTorch code bases share, mlpen/Nystromformer and
  pkuzengqi/Skyformer, folder LRA: 2 layers, 64 wide, 2 heads, MLP 128, mean pooling,
  learned positions, dropout 0.1. Adam (0.9, 0.999, 1e-6) at 1e-4 without weight decay,
  one linear cycle, best checkpoint on validation. Ours in float32, with gradients
  clipped to a global norm of 1 (Skyformer clips values at 1).
modern: our best guess; not a published recipe. Rotary positions where scores are inner
  products of queries and keys, else learned ones; AdamW with weight decay on matrices
  alone, a cosine, clipping, mean pooling, true lengths.
"""

from typing import Any

from lra_jax.configs.base import ModelConfig, TrainConfig

# One matrix for keys, values and heads, 16 features whatever the config file says; the
# features max(x, 0) + 1e-3 for Performer; block sizes of the models' code.
_OFFICIAL = {
    "linformer": "features=16,sharing=key_value",
    "performer": "kernel=relu,dialect=google,feature_eps=0.001",
    "local": "block=50",
    "longformer": "window=256",
    "bigbird": "block=64,num_random=3",
    "sinkhorn": "block=50",
    "reformer": "chunk=10,num_hashes=1,num_buckets=10",
    "sparse": "pattern=fixed,stride=50,summary=10",
}
_OFFICIAL_IMAGES = _OFFICIAL | {"local": "block=64"}
_COMPACT = {"linformer": "features=128"}
_INNER_PRODUCTS = ("softmax", "local", "longformer", "bigbird", "sparse")


def official_options(attention: str, images: bool = False) -> str:
    """The constants of a mechanism in LRA's code, as ``--model.attention_options``.

    Longformer's window of 512 is both sides together.
    """
    return (_OFFICIAL_IMAGES if images else _OFFICIAL).get(attention, "")


def compact_options(attention: str) -> str:
    """Linformer has 128 features, as in Skyformer."""
    return _COMPACT.get(attention, "")


def modern_positions(attention: str) -> Any:
    """Rotary where the score of two positions is an inner product, else learned."""
    return "rotary" if attention in _INNER_PRODUCTS else "learned"


def official_train(**settings: Any) -> TrainConfig:
    """LRA's optimiser, with settings of a task."""
    family: dict[str, Any] = {
        "schedule": "lra",
        "adam_b2": 0.98,
        "adam_eps": 1e-9,
        "clip_norm": 0.0,
    }
    return TrainConfig(**{**family, **settings})


def official_model(
    attention: str, images: bool = False, **settings: Any
) -> ModelConfig:
    """LRA's encoder, with sizes and settings of a task."""
    family: dict[str, Any] = {
        "embed_std": 1.0,
        "qkv_bias": False,
        "padding": "zeros",
        "pooling": "cls",
        "positions": "sinusoidal",
        "attention_options": official_options(attention, images),
    }
    return ModelConfig(**{**family, **settings})


def compact_train(**settings: Any) -> TrainConfig:
    """The PyTorch code bases' optimiser, with settings of a task."""
    family: dict[str, Any] = {
        "learning_rate": 1e-4,
        "schedule": "linear",
        "adam_eps": 1e-6,
    }
    return TrainConfig(**{**family, **settings})


def compact_model(attention: str, **settings: Any) -> ModelConfig:
    """Their model; ``ModelConfig``'s defaults are its sizes."""
    return ModelConfig(attention_options=compact_options(attention), **settings)


def modern_train(**settings: Any) -> TrainConfig:
    """Our optimiser, with settings of a task."""
    family: dict[str, Any] = {
        "learning_rate": 5e-4,
        "schedule": "cosine",
        "warmup": 1_000,
        "adam_b2": 0.98,
        "weight_decay": 0.05,
        "decay_vectors": False,
    }
    return TrainConfig(**{**family, **settings})


def modern_model(attention: str, **settings: Any) -> ModelConfig:
    """Our encoder, with sizes of a task."""
    family: dict[str, Any] = {"positions": modern_positions(attention)}
    return ModelConfig(**{**family, **settings})
