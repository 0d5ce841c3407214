"""The page's tables: our runs next to baselines and published rows."""

from pathlib import Path
from typing import Any

import pytest

from lra_jax import report
from lra_jax.configs import get_preset
from lra_jax.reports import exports, results
from reports.made_runs import compact, groups_in, make_run


def test_the_table_of_a_task(runs: Path) -> None:
    table = results.task_table("listops", groups_in(runs))
    assert all(len(row) == len(table.head) for row in table.rows)
    assert table.ours == 2
    first, second = table.rows[:2]
    assert first[:4] == (
        "cosformer, compact",
        "38.00 ± 2.00",
        "37.00 ± 2.00",
        "3",
    )
    # The standard error of 30 % in 2000 examples.
    assert second[1] == "30.00 (se 1.02)"
    assert first[4:7] == ("4.00", "300 MiB (process peak RSS)", "123,456")
    assert (
        "generated, seed 0, at most 2,000 long, own validation split, best by loss, "
        "2,000 test examples" in first[7]
    )
    assert [row[0] for row in table.rows[2:]] == [
        "baseline: majority class",
        "baseline: root operator alone, best possible",
    ]


def test_a_published_row_is_shown_beside_a_run_of_its_own_protocol(runs: Path) -> None:
    config = get_preset("listops", "official", "linformer")
    make_run(runs / "d", 35.0, config)
    other = config.replace(attention="softmax", train={"steps": 6000})
    make_run(runs / "e", 36.0, other)
    rows = results.task_table("listops", groups_in(runs)).rows
    (row,) = (row for row in rows if row[0].startswith("published: "))
    assert row[:2] == ("published: Linformer", "35.70")
    assert "arXiv:2011.04006" in row[7]


def test_other_data_are_not_put_beside_published_rows(tmp_path: Path) -> None:
    make_run(tmp_path / "a", 90.0, official_data=False)
    groups = groups_in(tmp_path)
    table = results.task_table("listops", groups)
    assert (
        len(table.rows) == 1 and "NOT the published data settings" in table.rows[0][7]
    )
    assert not results.averages_table(groups).ours


def test_a_best_checkpoint_that_saw_the_test_does_not_count(tmp_path: Path) -> None:
    config = get_preset("text").replace(data={"validation": "test"})
    make_run(tmp_path / "a", 90.0, config, last=60.0)
    (group,) = groups_in(tmp_path)
    row = results.task_table("text", [group]).rows[0]
    assert row[1].startswith("90.00") and "chosen on the test split" in row[1]
    assert row[2].startswith("60.00")
    assert "validation = test" in row[7]
    assert group.mean(group.accuracy) == 60


def test_averages_say_which_they_are(runs: Path) -> None:
    groups = groups_in(runs)
    table = results.averages_table(groups)
    assert table.head[7:9] == ("avg5", "avg6")
    # A single task has no average, and the preset compact is not LRA's protocol.
    other = results.averages_table(groups, is_official=False)
    assert other.head == table.head and other.ours == len(other.rows) == 2
    assert other.rows[0][1] == "38.00" and other.rows[0][7:9] == ("-", "-")
    assert not table.ours
    published = {row[0]: row for row in table.rows}
    assert published["published: Transformer"][6:9] == ("failed", "54.39", "53.66")
    assert published["published: S5"][7:9] == ("85.24", "87.46")


def test_differing_versions_are_said(tmp_path: Path) -> None:
    for seed, jax in enumerate(["0.10.2", "0.10.2", "0.12.0"]):
        versions = {"jax": jax, "numpy": "2.0"}
        make_run(tmp_path / str(seed), config=compact(seed=seed), versions=versions)
    line = "jax 0.10.2 (2), 0.12.0 (1)"
    assert results.differing_versions(groups_in(tmp_path)) == [line]
    report.write_report(tmp_path, tmp_path / "out", ["md"])
    text = (tmp_path / "out" / "report.md").read_text()
    assert f"The runs differ in versions: {line}." in text


def test_names_are_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a", config=compact().replace(attention="<b>:f|g"))
    page = results.make_page(groups_in(tmp_path / "runs"), ["<script>"], tmp_path)
    for text in (page.html(), page.markdown()):
        assert "<b>" not in text and "<script>" not in text
        assert "&lt;b&gt;:f" in text
    assert "f\\|g" in page.markdown()


def test_other_data_have_a_table_of_their_own(runs: Path) -> None:
    other = compact(train={"batch_size": 16})
    make_run(runs / "d", 90.0, other, official_data=False)
    page = results.make_page(groups_in(runs), [], runs / "out")
    others = "Runs whose data, model or training differ from LRA's"
    first, second = page.markdown().split(others)
    assert "90.00" not in first and "90.00" in second.split("## ")[0]


@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("modern-quick", {}),
        ("official", {"pretrain": {"steps": 1000}}),
        ("official", {"train": {"steps": 6000}}),
        ("official", {"data": {"permute": True}}),
    ],
)
def test_another_protocol_is_not_among_published_rows(
    tmp_path: Path, preset: str, changes: dict[str, Any]
) -> None:
    make_run(
        tmp_path / "runs" / "a", 36.5, get_preset("listops", "official", "softmax")
    )
    # Its row was not published, but its run is by the protocol.
    unpublished = get_preset("listops", "official", "cosformer")
    make_run(tmp_path / "runs" / "b", 37.5, unpublished)
    other = get_preset("listops", preset, "softmax").replace(**changes)
    make_run(tmp_path / "runs" / "c", 95.25, other)
    groups = groups_in(tmp_path / "runs")
    assert sorted(group.by_protocol for group in groups) == [False, True, True]

    page = results.make_page(groups, [], tmp_path / "out")
    for text in (page.markdown(), page.html()):
        task, averages = text.split("All tasks")
        first, second = task.split("Runs whose data, model or training differ from LRA")
        assert "published: Transformer" in first and "36.50" in first
        assert "37.50" in first and "95.25" not in first
        assert "95.25" in second and "published: " not in second
        assert "protocol, do not compare with published rows" in second
        first, second = averages.split("The same averages of runs on LRA")
        assert "36.50" in first and "95.25" not in first
        assert "95.25" in second and "published: " not in second

    rows = exports.rows(groups)
    assert sorted(row["official_protocol"] for row in rows) == [False, True, True]
    first, second = exports.to_latex(groups).split(
        r"\caption{listops, not the LRA's protocol}"
    )
    assert r"\caption{listops}" in first and "36.50" in first and "95.25" in second
    assert "95.25" not in first and "36.50" not in second
