"""Which data published rows are about: settings and the number of examples."""

import dataclasses

import helpers
import pytest

from lra_jax.configs import TASKS
from lra_jax.tasks import get_task

# Data set table of the Long-Range Arena paper, arXiv:2011.04006, and its code.
SIZES = {
    "listops": [(96_000, 2_000, 2_000)],
    "text": [(25_000, 25_000, 25_000), (22_500, 2_500, 25_000)],
    "retrieval": [(147_086, 18_090, 17_437)],
    "image": [(45_000, 5_000, 10_000)],
    "pathfinder": [(160_000, 20_000, 20_000)],
    "pathx": [(160_000, 20_000, 20_000)],
}


@pytest.mark.parametrize("path", [None, "given"])
@pytest.mark.parametrize("name", SIZES)
def test_every_split_has_its_size(name, path):
    task = get_task(name)
    data = dataclasses.replace(task.data(), path=path)
    for sizes in SIZES[name]:
        assert task.is_official(data, helpers.Sizes(*sizes))
        for place in range(3):
            for other in (40, sizes[place] - 1, sizes[place] + 1):
                fewer = (*sizes[:place], other, *sizes[place + 1 :])
                assert not task.is_official(data, helpers.Sizes(*fewer)), fewer


def test_other_trees_are_not_official():
    task, sizes = get_task("listops"), helpers.Sizes(*SIZES["listops"][0])
    assert not task.is_official(dataclasses.replace(task.data(), max_args=5), sizes)


def test_all_tasks_of_the_arena_are_here():
    assert set(SIZES) <= set(TASKS)
