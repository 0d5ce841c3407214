"""Settings of a run, and the presets: one file a task."""

import fnmatch
from typing import Any

from lra_jax.attention.registry import MECHANISMS
from lra_jax.configs.base import Config, DataConfig, ModelConfig, TrainConfig
from lra_jax.configs.registry import TASKS, find_task
from lra_jax.errors import known

__all__ = [
    "TASKS",
    "Config",
    "DataConfig",
    "ModelConfig",
    "TrainConfig",
    "get_preset",
]


def get_preset(
    task: str = "listops", preset: str = "compact", attention: str = "cosformer"
) -> Config:
    """The config of a named preset, with what the mechanism's entry adds to it.

    Raises:
      ValueError: for an unknown task or preset, with the nearest name.
    """
    presets = find_task(task).presets
    config = presets[known("--preset", preset, presets)](attention)
    return config.replace(**_own_settings(task, preset, attention))


def _own_settings(task: str, preset: str, attention: str) -> dict[str, Any]:
    """The settings of `Mechanism.presets`, as `Config.replace` takes them."""
    if attention not in MECHANISMS:
        return {}
    parts: dict[str, Any] = {}
    for names, tasks in MECHANISMS[attention].presets.items():
        fitting = tasks.items() if fnmatch.fnmatchcase(preset, names) else ()
        for pattern, flags in fitting:
            if fnmatch.fnmatchcase(task, pattern):
                for flag, value in flags.items():
                    part, _, name = flag.partition(".")
                    parts.setdefault(part, {})[name] = value
    return parts
