"""ListOps: the value of a nested expression, ten classes."""

from typing import Any

from lra_jax.configs import listops
from lra_jax.tasks.published import published
from lra_jax.tasks.task import Task


def _is_official(data: listops.ListOpsData, _: Any) -> bool:
    grammar = ("min_length", "max_length", "max_depth", "max_args")
    default = listops.ListOpsData()
    return data.path is not None or all(
        getattr(data, name) == getattr(default, name) for name in grammar
    )


TASK = Task(
    name="listops",
    data=listops.ListOpsData,
    presets=listops.PRESETS,
    reader="lra_jax.data.listops:prepare",
    is_official=_is_official,
    floors=(
        ("majority class", 17.05),
        ("root operator alone, best possible", 36.6),
    ),
    published=published("listops"),
    decoder="lra_jax.data.listops:decode",
    tree_drawer="lra_jax.data.listops_language:tree",
)
