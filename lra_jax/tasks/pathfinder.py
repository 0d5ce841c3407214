"""Pathfinder on 32, 64, 128 (Path-X) and 256 pixels a side, two classes."""

from lra_jax.configs import Config
from lra_jax.configs.pathfinder import SIZES
from lra_jax.data import pathfinder
from lra_jax.data.dataset import SequenceDataset
from lra_jax.tasks.base import Task, classification_loss, make_classifier
from lra_jax.tasks.checks import check_config, check_image_size
from lra_jax.tasks.published import Published, published


def _check(config: Config) -> None:
    check_config(config, images=True)
    size = SIZES[config.task]
    check_image_size(config, size, size)
    distractors = config.data.num_distractors
    if distractors is not None and distractors < 0:
        raise ValueError(f"--data.num_distractors must be 0 or more, got {distractors}")


def _prepare(config: Config) -> SequenceDataset:
    data = config.data
    return pathfinder.prepare(
        data.dir,
        size=SIZES[config.task],
        level=data.level,
        seed=data.seed,
        num_train=data.num_train,
        num_valid=data.num_valid,
        num_test=data.num_test,
        num_distractors=data.num_distractors,
        processes=data.processes,
        path=data.path,
    )


def _is_official(config: Config, _: SequenceDataset) -> bool:
    data = config.data
    generated = data.path is None and data.num_distractors is None
    return data.level == "hard" and (generated or data.path is not None)


_PUBLISHED = {
    "pathfinder": published("pathfinder"),
    "pathfinder64": (),
    "pathx": published("pathx"),
    "path256": (Published("S4D-DFouT", 87.89, "S4D-DFouT paper, 2025"),),
}

TASKS = tuple(
    Task(
        name=name,
        check=_check,
        prepare=_prepare,
        make_model=make_classifier,
        loss=classification_loss,
        is_official=_is_official,
        floors=(("chance", 50.0),),
        published=rows,
    )
    for name, rows in _PUBLISHED.items()
)
