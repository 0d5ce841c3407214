"""Validation chooses and sorts the rows, in every format; budgets are compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from lra_jax import report, runs
from lra_jax.configs import get_preset
from lra_jax.reports import choice, exports
from lra_jax.reports.runs import Group
from reports.made_runs import compact, groups_in, make_run, make_suite_run


def try_rates(folder: Path, attention: str, *scores: tuple[float, float]) -> None:
    """Runs of learning rates 0.001, 0.002, ... with a validation and a test score, of
    two seeds a point apart."""
    for number, (valid, test) in enumerate(scores, start=1):
        train = {"learning_rate": number / 1000, "best_by": "accuracy"}
        for seed in (0, 1):
            config = compact(attention, train=train, seed=seed)
            name = f"{attention}-{number}-{seed}"
            score = valid + seed
            make_run(folder / name, test + seed, config, valid_accuracy_best=score)


@pytest.fixture
def disagreeing(tmp_path: Path) -> Path:
    """Where the test split prefers another rate, and another mechanism."""
    folder = tmp_path / "disagreeing"
    try_rates(folder, "flow", (30.25, 40.25), (31.5, 38.5))
    try_rates(folder, "softmax", (35.5, 33.25), (20.0, 44.75))
    return folder


def test_validation_chooses_one_row_for_each_mechanism(disagreeing: Path) -> None:
    groups = groups_in(disagreeing)
    assert len(groups) == 4
    rates = [
        (group.config.attention, group.config.train.learning_rate)
        for group in choice.chosen_groups(groups)
    ]
    assert rates == [("softmax", 0.001), ("flow", 0.002)]
    rows = choice.settings_table(groups).rows
    shown = [(row[0].split(",")[0], row[1], row[2], row[3], row[4]) for row in rows]
    assert shown == [
        ("softmax", "yes", "accuracy 36.00", "33.75", 2),
        ("softmax", "", "accuracy 20.50", "45.25", 2),
        ("flow", "yes", "accuracy 32.00", "39.00", 2),
        ("flow", "", "accuracy 30.75", "40.75", 2),
    ]


def test_every_format_has_the_choice_of_validation(
    disagreeing: Path, tmp_path: Path
) -> None:
    """The test accuracies of other settings are in a second table, unmarked."""
    out = tmp_path / "out"
    report.write_report(disagreeing, out, ["md", "html", "latex", "csv", "json"])
    for name in ("report.md", "report.html", "report.tex"):
        first, second = (out / name).read_text().split("45.25", 1)
        if name == "report.tex":
            first, second = first.split(r"\label{tab:listops-all-settings}")
            assert r"\mathbf{39.00} \pm 0.71$ & 2 &" in first and "mathbf" not in second
            assert r"$33.75 \pm 0.71$ & 2 &" in first
            assert first.index("softmax, compact") < first.index("flow, compact")
        elif name == "report.md":
            first, second = first.split(choice.SETTINGS)
        assert "33.75" in first and "39.00" in first and "40.75" not in first
        assert "All tasks" not in first
    rows = json.loads((out / "report.json").read_text())
    accuracies = [(row["attention"], row["test_accuracy"]) for row in rows]
    assert accuracies == [("softmax", 33.75), ("flow", 39.0)]
    assert [row["settings_tried"] for row in rows] == [2, 2]
    every = json.loads((out / "report-settings.json").read_text())
    assert [row["chosen"] for row in every] == [True, False, True, False]
    lines = {x: (out / f"report{x}.csv").read_text() for x in ("", "-settings")}
    assert [text.count("\n") for text in lines.values()] == [3, 5]
    assert "45.25" not in lines[""] and "45.25" in lines["-settings"]


def test_the_chosen_setting_is_named(disagreeing: Path) -> None:
    rows = [row for row in exports.rows(groups_in(disagreeing)) if row["chosen"]]
    names = ["learning_rate=0.001", "learning_rate=0.002"]
    assert [row["settings"] for row in rows] == names


def test_nothing_is_chosen_or_bold_on_the_test_split(tmp_path: Path) -> None:
    config = get_preset("text", "official", "softmax")
    for number, rate, test in ((1, 0.01, 60.0), (2, 0.02, 66.0)):
        changed = config.replace(train={"learning_rate": rate})
        scores = {"valid_accuracy_best": test, "official_data": False}
        make_run(tmp_path / f"{number}", 99.0, changed, last=test, **scores)
    groups = groups_in(tmp_path)
    assert [group.mean(group.accuracy) for group in choice.chosen_groups(groups)] == [
        *(60.0, 66.0)
    ]
    rows = exports.rows(groups)
    assert [row["chosen"] for row in rows] == [True, True]
    assert [row[1] for row in choice.settings_table(groups).rows] == ["", ""]
    assert "mathbf" not in exports.to_latex(groups)


@pytest.mark.parametrize(
    ("changes", "data", "part"),
    [
        ({"steps": 40}, "ab", "960 examples for softmax, compact; 1,280 examples for"),
        ({"batch_size": 16}, "ab", "480 examples for flow, compact; 960 examples for"),
        (
            {},
            "cd",
            "the data differ, 960 examples of data ab for softmax, compact; 960",
        ),
        ({"steps": 60, "batch_size": 16}, "ab", ""),
    ],
)
def test_unequal_budgets_are_said(
    tmp_path: Path, changes: dict[str, Any], data: str, part: str
) -> None:
    train = {"steps": 30, "batch_size": 32, "warmup": 1}
    make_run(tmp_path / "a", 30.0, compact("softmax", train=train))
    other = compact("flow", train={**train, **changes})
    make_run(tmp_path / "b", 20.0, other, data_fingerprint=data)
    report.write_report(tmp_path, tmp_path / "out", ["md", "latex"])
    page = (tmp_path / "out" / "report.md").read_text()
    latex = (tmp_path / "out" / "report.tex").read_text()
    for text in (page, latex):
        assert ("NOT comparable with each other" in text) == bool(part)
        assert part in text
    assert ("Comparable with each other" in page) == (not part)
    assert (r"\mathbf{30.00}" in latex) == (not part)


def test_examples_before_fine_tuning_count(tmp_path: Path) -> None:
    train = {"steps": 30, "batch_size": 32, "warmup": 1}
    make_run(tmp_path / "a", 30.0, compact("softmax", train=train))
    tuned = compact("flow", train=train)
    make_run(tmp_path / "b", 20.0, tuned, shown_before=1000)
    budgets = {x.config.attention: x.budget[0] for x in groups_in(tmp_path)}
    assert budgets == {"softmax": 960, "flow": 1960}


def test_a_suite_says_which_budgets_differ(tmp_path: Path) -> None:
    make_suite_run(tmp_path / "a", "parity", "delta", 60.0, 50.0)
    long = {"train": {"steps": 10_000}}
    make_suite_run(tmp_path / "b", "parity", "linear", 60.0, 70.0, **long)
    report.write_report(tmp_path, tmp_path / "out", ["md"])
    page = (tmp_path / "out" / "report.md").read_text()
    assert "- parity: NOT comparable with each other" in page


def test_a_sweep_says_so_too(tmp_path: Path) -> None:
    for steps in (30, 40):
        train = {"steps": steps, "warmup": 1}
        make_run(tmp_path / f"{steps}", steps, compact("softmax", train=train))
    groups: dict[str, Group] = {x.runs[0].folder.name: x for x in groups_in(tmp_path)}
    report.write_report(tmp_path, tmp_path / "out", ["md", "latex"])
    for name in ("report.md", "report.tex"):
        text = (tmp_path / "out" / name).read_text()
        assert "(steps x batch size) are NOT comparable with each other" in text
    (line,) = runs.best_by_validation(groups)
    assert "; NOT comparable with each other: training budgets" in line


def test_bold_is_within_one_standard_error(tmp_path: Path) -> None:
    """Of the best: two seeds a point apart have a standard error of half a point."""
    try_rates(tmp_path, "flow", (30.0, 40.0))
    try_rates(tmp_path, "softmax", (30.0, 39.6))
    try_rates(tmp_path, "linear", (30.0, 39.4))
    latex = exports.to_latex(groups_in(tmp_path))
    bold = [name for name in ("40.50", "40.10", "39.90") if f"f{{{name}}}" in latex]
    assert bold == ["40.50", "40.10"]


def test_latex_has_what_a_paper_needs(disagreeing: Path) -> None:
    latex = exports.to_latex(groups_in(disagreeing))
    assert latex.startswith("% \\usepackage{booktabs, tabularx}\n")
    for mark in ("begin", "end"):
        assert latex.count(rf"\{mark}{{table}}") == latex.count(r"\toprule") == 2
    assert r"\label{tab:listops-not-the-lra-s-protocol}" in latex
    protocol = "Protocol: compact: 5,000 steps of 32, "
    assert protocol in latex.replace(r"\_", "_")
    assert latex.count("{") == latex.count("}") and latex.count("$") % 2 == 0
