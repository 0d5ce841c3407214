"""Settings of a run, and the presets: one file per task."""

from lra_jax.configs.base import (
    Config,
    DataConfig,
    PretrainConfig,
    StoredData,
    TrainConfig,
    get_preset,
)
from lra_jax.configs.registry import TASKS
from lra_jax.models.config import ModelConfig

__all__ = [
    "TASKS",
    "Config",
    "DataConfig",
    "ModelConfig",
    "PretrainConfig",
    "StoredData",
    "TrainConfig",
    "get_preset",
]
