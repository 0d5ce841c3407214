"""ListOps: the value of a nested expression, ten classes."""

from typing import Any

from lra_jax.configs import listops
from lra_jax.tasks.published import published
from lra_jax.tasks.task import Task, has_sizes


def _is_official(data: listops.ListOpsData, dataset: Any) -> bool:
    grammar = ("min_length", "max_length", "max_depth", "max_args")
    default = listops.ListOpsData()
    ours = data.path is None and any(
        getattr(data, name) != getattr(default, name) for name in grammar
    )
    return not ours and has_sizes(dataset, train=96_000, valid=2_000, test=2_000)


TASK = Task(
    name="listops",
    data=listops.ListOpsData,
    presets=listops.PRESETS,
    reader="lra_jax.data.listops:prepare",
    can_pack=True,
    is_official=_is_official,
    floors=(
        ("majority class", 17.05),
        ("root operator alone, best possible", 36.6),
    ),
    published=published("listops"),
    decoder="lra_jax.data.listops:decode",
    words="lra_jax.data.listops_language:WORDS",
    augmentation="lra_jax.data.listops_permutation:permute",
    tree_drawer="lra_jax.data.listops_language:tree",
)
