"""Names that tell groups apart, and the best of several by validation."""

from pathlib import Path
from typing import Any

import pytest

from lra_jax import report
from lra_jax.configs import get_preset
from lra_jax.reports import exports, results
from lra_jax.reports.comparison import differing_settings
from lra_jax.reports.runs import read_runs, repeated_runs
from reports.made_runs import compact, groups_in, make_run


def test_a_changed_attention_is_another_setting(tmp_path: Path) -> None:
    """As after the advice to train changed code in another folder."""
    runs = tmp_path / "runs"
    texts = {"a": "x = 1", "b": "x = 2", "c": "x = 1  # the same", "d": "x = 2"}
    for name, text in texts.items():
        config = compact("own:attention", seed=1 if name == "c" else 0)
        folder = make_run(runs / name, 10.0 if "1" in text else 30.0, config)
        (folder / "code").mkdir()
        (folder / "code" / "own.py").write_text(text)
    groups = groups_in(runs)
    folders = [[run.folder.name for run in group.runs] for group in groups]
    assert folders == [["a", "c"], ["b"]]
    names = [f"code of {runs / name}" for name in "ab"]
    assert [differing_settings(group, groups) for group in groups] == names
    averages = [row[:2] for row in results.averages_table(groups, False).rows]
    assert averages == [
        (f"own:attention, compact, code of {runs / 'a'}", "10.00"),
        (f"own:attention, compact, code of {runs / 'b'}", "30.00"),
    ]
    # Nothing is left out without a word.
    line = f"{runs / 'd'}: the same settings and seed as {runs / 'b'}"
    assert repeated_runs(read_runs(runs)[0]) == [line]
    report.write_report(runs, tmp_path / "out", ["html"])
    assert f"left out: {line}" in (tmp_path / "out" / "report.html").read_text()


def test_settings_of_the_same_last_word_are_told_apart(tmp_path: Path) -> None:
    """Steps of pretraining are not steps of training, nor data's length the model's."""
    config = compact("softmax")
    changes: list[dict[str, Any]] = [
        {"pretrain": {"steps": 1000}, "train": {"learning_rate": 0.5}},
        {"model": {"max_length": 3000}},
    ]
    for number, some in enumerate(changes):
        make_run(tmp_path / f"{number}", 40.0, config.replace(**some))
    rate, length = config.train.learning_rate, config.model.max_length
    groups = groups_in(tmp_path)
    assert sorted(differing_settings(group, groups) for group in groups) == [
        f"learning_rate={rate}, pretrain.steps=0, model.max_length=3000",
        f"learning_rate=0.5, pretrain.steps=1000, model.max_length={length}",
    ]


def test_the_same_files_elsewhere_are_the_same_setting(tmp_path: Path) -> None:
    for seed, path in enumerate(("/a", "b", "./b")):
        try_rate(tmp_path / str(seed), 1e-3, 30.0, 35.0, seed=seed, data={"path": path})
    (group,) = groups_in(tmp_path)
    assert len(group.runs) == 3
    try_rate(tmp_path / "other", 2e-3, 30.0, 35.0, data={"path": "/c"})
    groups = groups_in(tmp_path)
    words = {differing_settings(group, groups) for group in groups}
    assert words == {"learning_rate=0.001", "learning_rate=0.002"}


def test_rows_of_a_sweep_are_told_apart(runs: Path) -> None:
    for name, rate in (("d", 0.01), ("e", 0.02)):
        make_run(runs / name, config=compact(train={"learning_rate": rate}))
    groups = groups_in(runs)
    names = {row[0] for row in results.task_table("listops", groups).rows}
    assert {"cosformer, compact (learning_rate=0.02)", "flow, compact"} < names
    shown = {row["settings"] for row in exports.rows(groups)}
    assert {"learning_rate=0.01", "learning_rate=0.02", ""} < shown


def try_rate(
    folder: Path, rate: float, test: float, valid: float, loss: float = 1.0, **more: Any
) -> None:
    """A run of Flow at a learning rate, chosen by accuracy."""
    train = {"learning_rate": rate, "best_by": "accuracy"}
    scores = {"valid_accuracy_best": valid, "valid_loss_best": loss}
    make_run(folder, test, compact("flow", train=train, **more), **scores)


def average(folder: Path) -> str:
    """The accuracy in the only row of averages."""
    (row,) = results.averages_table(groups_in(folder), False).rows
    return row[1]


def test_the_test_split_does_not_break_ties(tmp_path: Path) -> None:
    try_rate(tmp_path / "a", 1e-3, 39.0, 36.0, loss=0.9)
    try_rate(tmp_path / "b", 2e-3, 37.0, 36.0, loss=0.8)
    assert average(tmp_path) == "37.00"
    # Not the highest of the test here either, but the preset's own setting.
    preset = compact("flow").train.learning_rate
    for name, rate, test in (("c", 9e-3, 39.0), ("d", preset, 36.0), ("e", 8e-3, 38.0)):
        try_rate(tmp_path / "ties" / name, rate, test, 36.0)
    assert average(tmp_path / "ties") == "36.00"


def test_settings_without_some_of_the_seeds_are_not_compared(tmp_path: Path) -> None:
    for seed in range(3):
        try_rate(tmp_path / f"a{seed}", 1e-3, 30.0, 35.0, seed=seed)
    try_rate(tmp_path / "b", 2e-3, 90.0, 90.0)
    assert average(tmp_path) == "30.00"


def test_no_choice_is_made_on_the_test_split(tmp_path: Path) -> None:
    config = get_preset("text", "official", "softmax")
    for name, rate, test in (("a", 1e-3, 66.0), ("b", 2e-3, 60.0)):
        changed = config.replace(train={"learning_rate": rate})
        make_run(tmp_path / name, 99.0, changed, last=test)
    (row,) = results.averages_table(groups_in(tmp_path), False).rows
    assert row[2] == "-"


@pytest.mark.parametrize(
    ("task", "data"),
    [
        ("text", {"max_length": 100}),
        ("retrieval", {"max_length": 50}),
        ("listops", {"permute": True}),
        ("pathfinder", {"levels": "easy:0.5"}),
    ],
)
def test_published_rows_are_for_examples_shown_in_the_same_way(
    task: str, data: dict[str, Any], tmp_path: Path
) -> None:
    config = get_preset(task, "official", "softmax")
    for name, one in (("a", config), ("b", config.replace(data=data))):
        make_run(tmp_path / name, config=one, data_fingerprint=name)
    groups = {group.runs[0].folder.name: group for group in groups_in(tmp_path)}
    assert groups["a"].by_protocol and not groups["b"].by_protocol
