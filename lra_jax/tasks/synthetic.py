"""Tests of recall, copying and state tracking, generated and scored by position."""

from typing import Any

from lra_jax.tasks.task import Task


def synthetic(name: str, **entry: Any) -> Task:
    """A task whose labels belong to single positions of sequences drawn in memory.

    Args:
      name: as in ``--task``.
      **entry: further attributes of `Task`.
    """
    family: dict[str, Any] = {
        "model": "lra_jax.tasks.base:make_token_classifier",
        "decoder": "lra_jax.data.memory:decode",
        "per_position": True,
    }
    return Task(name=name, **{**family, **entry})
