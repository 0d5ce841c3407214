"""Settings that the presets of several tasks share.

A mechanism's own constants and sizes for a preset, with their sources, are in
`lra_jax.configs.mechanisms`; `lra_jax.configs.get_preset` adds them.

official: google-research/long-range-arena, the config files and the constants in its
  models' code. Adam (0.9, 0.98, 1e-9) with decoupled weight decay, clipping only on
  Path-X, no biases in the attention's projections, token embeddings of standard
  deviation 1, every batch padded to the full length, token 0 as padding. Its mechanisms
  differ from ours of the same name in ways that `lra_jax/attention/` describes; it also
  leaves padding unmasked in Linformer, Performer and the Linear Transformer, and
  applies dropout to attention weights, and we do not.
compact: the small model that the PyTorch code bases share, mlpen/Nystromformer and
  pkuzengqi/Skyformer, folder LRA: 2 layers, 64 wide, 2 heads, MLP 128, mean pooling,
  learned positions, dropout 0.1. Adam (0.9, 0.999, 1e-6) at 1e-4 without weight decay,
  one linear cycle, best checkpoint on validation. Here in float32, with gradients
  clipped to a global norm of 1 (Skyformer clips values at 1).
modern: one block for every mechanism, made of parts common in later models: a short
  convolution on queries, keys and values (Poli et al. 2023), the values added to the
  attention's output (Han et al. 2023), a norm and a gate on the sum (retention, gated
  linear attention), a gated MLP (Shazeer 2020), attention pooling with the first and
  the last row. Rotary positions where scores are inner products of queries and keys,
  else none: the convolution encodes order. AdamW with weight decay on matrices only, a
  cosine, clipping, true lengths. ListOps' settings are measured (results/); those of
  the other tasks are a guess.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from lra_jax.attention.registry import MECHANISMS
from lra_jax.configs.base import Config, DataConfig, TrainConfig
from lra_jax.configs.registry import find_task
from lra_jax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Preset:
    """The settings of a preset of a task.

    Attributes:
      train, model: their settings.
      data: the task's own settings; None = its defaults.
      rotary: use rotary positions instead of the model's if they suit the mechanism.

    A mechanism whose units replace the MLP gets no settings of it.
    """

    train: TrainConfig
    model: ModelConfig
    data: DataConfig | None = None
    rotary: bool = False

    def config(self, task: str, name: str, attention: str) -> Config:
        """The config of a run, before the mechanism's own settings are added."""
        config = Config(
            task=task,
            attention=attention,
            preset=name,
            train=self.train,
            model=self.model,
            data=find_task(task).data() if self.data is None else self.data,
        )
        if self.rotary and attention in MECHANISMS and MECHANISMS[attention].rotary:
            config = config.replace(model={"positions": "rotary"})
        if attention in MECHANISMS and not MECHANISMS[attention].mlp:
            config = config.replace(model={"activation": "gelu", "mlp_dropout": None})
        return config


def presets(task: str, **presets: Preset) -> dict[str, Callable[[str], Config]]:
    """The presets of a task by name, as its entry holds them; ``a_b`` becomes a-b."""
    presets = {name.replace("_", "-"): preset for name, preset in presets.items()}
    return {
        name: functools.partial(preset.config, task, name)
        for name, preset in presets.items()
    }


def encoder(**settings: Any) -> ModelConfig:
    """An encoder whose heads share its whole width, unless ``qkv_dim`` is given."""
    config = ModelConfig(**settings)
    return dataclasses.replace(config, qkv_dim=config.qkv_dim or config.embed_dim)


official_train = functools.partial(
    TrainConfig, schedule="lra", adam_b2=0.98, adam_eps=1e-9, clip_norm=0.0
)
"""LRA's optimizer, with settings of a task."""

official_model = functools.partial(
    encoder,
    embed_std=1.0,
    qkv_bias=False,
    padding="zeros",
    pooling="cls",
    positions="sinusoidal",
)
"""LRA's encoder, with sizes and settings of a task."""

compact_train = functools.partial(
    TrainConfig, learning_rate=1e-4, schedule="linear", adam_eps=1e-6
)
"""The PyTorch code bases' optimizer, with settings of a task."""

modern_train = functools.partial(
    TrainConfig,
    learning_rate=5e-4,
    schedule="cosine",
    warmup=1_000,
    adam_b2=0.98,
    weight_decay=0.05,
    decay_vectors=False,
)
"""Our optimizer, with settings of a task."""

modern_model = functools.partial(
    encoder,
    num_layers=4,
    num_heads=4,
    short_conv=5,
    local_values=True,
    gate=True,
    mlp="glu",
    pooling="attention+ends",
    positions="none",
)
"""Our block, with sizes and settings of a task."""
