"""Presets: one file a task, each a function of the mechanism's name."""

from collections.abc import Callable

from lra_jax.configs import image, listops, pathfinder, retrieval, text
from lra_jax.configs.base import Config, DataConfig, ModelConfig, TrainConfig
from lra_jax.errors import known

__all__ = [
    "PRESETS",
    "Config",
    "DataConfig",
    "ModelConfig",
    "TrainConfig",
    "get_preset",
]

PRESETS: dict[str, dict[str, Callable[[str], Config]]] = {
    "listops": listops.PRESETS,
    "text": text.PRESETS,
    "retrieval": retrieval.PRESETS,
    "image": image.PRESETS,
    **{task: pathfinder.presets(task) for task in pathfinder.SIZES},
}


def get_preset(
    task: str = "listops", preset: str = "compact", attention: str = "cosformer"
) -> Config:
    """The config of a named preset.

    Raises:
      ValueError: for an unknown task or preset, with the nearest name.
    """
    presets = PRESETS[known("--task", task, PRESETS)]
    return presets[known("--preset", preset, presets)](attention)
