"""A task's facts: presets, chance, scores, and how a raw example becomes tokens."""

import pytest

from lra_jax.configs import TASKS, get_preset
from lra_jax.tasks import get_task


def test_every_task_has_presets_and_facts():
    for name in TASKS:
        task = get_task(name)
        assert task.name == name
        ours = {"small" if name == "images" else "quick", "official"}
        if task.suite is None:
            ours = {"compact", "modern", "official"}
        elif task.suite == "language":
            ours = {"tiny"}
        assert ours <= set(task.presets)
        assert all(0 < row.accuracy <= 100 and row.source for row in task.published)
        assert task.suite is None or set(task.sweeps) <= set(task.presets)
        assert all(0 < floor < 100 for _, floor in task.floors)


# By hand, of the default settings: what a guess is worth, in percent.
CHANCES = {
    **{"mqar": 100 / 128, "needle": 100 / 14, "mad-compress": 100 * (1 + 31 / 15) / 32},
    **{"mad-fuzzy-recall": 100 / 8, "mad-recall": 100 / 8, "mad-memorise": 100 / 127},
    **{"mad-noisy-recall": 100 / 8, "mad-selective-copy": 100 / 14, "parity": 50},
    **{"modular": 20, "modular-brackets": 20, "s5": 100 / 120, "a5": 100 / 60},
}


def test_chance_and_what_lies_above_it():
    for name in TASKS:
        task, data = get_task(name), get_preset(name).data
        chance = CHANCES.get(name)
        if chance is None:
            assert task.chance is None and task.rescale(data, 50) is None
            continue
        assert task.chance is not None
        assert task.chance(data) == pytest.approx(chance)
        scaled = [task.rescale(data, x) for x in (chance, 50 + chance / 2, 100)]
        assert scaled == pytest.approx([0, 0.5, 1], abs=1e-9)
        assert task.is_scaled == (task.suite == "state")


def test_the_accuracy_of_a_test_by_parts_is_their_mean():
    result = {"test_accuracy_best": 90.0}
    parts = result | {"test_accuracy_by_length": {"32": 80.0, "64": 40.0}}
    assert [get_task("needle").accuracy_of(x) for x in (result, parts)] == [90, 60]
    assert get_task("parity").accuracy_of(parts) == 90


def test_how_a_raw_example_becomes_tokens():
    kinds = {name: get_task(name).raw(99) for name in TASKS}
    assert kinds["text"] == {"kind": "bytes", "max_length": 99}
    assert kinds["pathx"] == {"kind": "pixels", "shape": [128, 128]}
    assert kinds["listops"]["kind"] == "words" and kinds["listops"]["ids"]["[SM"] == 14
    assert kinds["lm"] == kinds["mqar"] == {"kind": "ids"}


def test_only_some_tasks_have_trees_and_augmentations():
    listops = get_task("listops")
    assert listops.tree is not None and get_task("text").tree is None
    for permute in (False, True):
        data = get_preset("listops").replace(data={"permute": permute}).data
        assert (listops.augment(data) is not None) == permute
    assert get_task("text").augment(get_preset("text").data) is None
