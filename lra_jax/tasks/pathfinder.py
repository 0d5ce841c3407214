"""Pathfinder at 32, 64, 128 (Path-X) and 256 pixels a side, two classes."""

from typing import Any

from lra_jax.configs import pathfinder
from lra_jax.tasks.published import Published, published
from lra_jax.tasks.task import Task, has_sizes


def _is_official(data: pathfinder.PathfinderData, dataset: Any) -> bool:
    ours = data.path is None and data.num_distractors is not None
    sizes = has_sizes(dataset, train=160_000, valid=20_000, test=20_000)
    return data.level == "hard" and not data.levels and not ours and sizes


def _task(name: str, rows: tuple[Published, ...]) -> Task:
    size = pathfinder.SIZES[name]
    return Task(
        name=name,
        data=pathfinder.PathfinderData,
        presets=pathfinder.presets(name),
        reader="lra_jax.data.pathfinder:prepare",
        reader_settings={"size": size},
        image_shape=(size, size),
        is_official=_is_official,
        floors=(("chance", 50.0),),
        published=rows,
    )


PATHFINDER = _task("pathfinder", published("pathfinder"))
PATHFINDER64 = _task("pathfinder64", ())
PATHX = _task("pathx", published("pathx"))
PATH256 = _task("path256", (Published("S4D-DFouT", 87.89, "S4D-DFouT paper, 2025"),))
