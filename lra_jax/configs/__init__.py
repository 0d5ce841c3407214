"""Settings of a run, and the presets: one file a task."""

import fnmatch
from typing import Any

from lra_jax.attention.registry import MECHANISMS, spell
from lra_jax.configs.base import (
    Config,
    DataConfig,
    ModelConfig,
    PretrainConfig,
    StoredData,
    TrainConfig,
)
from lra_jax.configs.registry import TASKS, find_task
from lra_jax.errors import known

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


def get_preset(
    task: str = "listops", preset: str | None = None, attention: Any = "cosformer"
) -> Config:
    """The config of a named preset, with what the mechanism's entry adds to it.

    Args:
      task: its name.
      preset: None = the task's first.
      attention: the mechanism: a name, or one's own function, ``nnx.Module`` class, or
        what else `lra_jax.attention.resolve` takes.

    Raises:
      ValueError: for an unknown task or preset, with the nearest name.
    """
    attention = spell(attention)
    presets = find_task(task).presets
    preset = next(iter(presets)) if preset is None else preset
    config = presets[known("--preset", preset, presets)](attention)
    return config.replace(**_own_settings(task, preset, attention))


def _own_settings(task: str, preset: str, attention: str) -> dict[str, Any]:
    """The settings of `Mechanism.presets`, as `Config.replace` takes them."""
    if attention not in MECHANISMS:
        return {}
    parts: dict[str, Any] = {}
    of_lra = find_task(task).suite is None  # A lone * is all of LRA's tasks.
    for names, tasks in MECHANISMS[attention].presets.items():
        fitting = tasks.items() if fnmatch.fnmatchcase(preset, names) else ()
        for pattern, flags in fitting:
            if (of_lra or pattern != "*") and fnmatch.fnmatchcase(task, pattern):
                for flag, value in flags.items():
                    part, _, name = flag.partition(".")
                    parts.setdefault(part, {})[name] = value
    return parts
