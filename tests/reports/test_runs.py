"""Reading run directories, and grouping those that differ only in their seed."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from lra_jax import report
from lra_jax.reports.runs import group_runs, read_runs, repeated_runs, unfinished_runs
from reports.made_runs import change, compact, groups_in, make_run

LENGTHS = "test_accuracy_by_length"


def test_groups_have_mean_and_deviation_over_seeds(runs: Path) -> None:
    runs_read, problems = read_runs(runs)
    best, other = group_runs(runs_read)
    assert not problems and len(runs_read) == 5
    assert [len(group.runs) for group in (best, other)] == [3, 1]
    assert best.mean("test_accuracy_best") == 38
    assert best.deviation("test_accuracy_best") == pytest.approx(2.0)  # Sample sd.
    assert other.deviation("test_accuracy_best") is None
    assert unfinished_runs(runs_read) == [f"{runs / 'c'}: 2,000 of 5,000 steps"]


def test_other_settings_or_data_are_other_groups(runs: Path) -> None:
    make_run(runs / "d", 50.0, compact(train={"batch_size": 16}))
    make_run(runs / "e", 51.0, data_fingerprint="cd")
    assert sorted(len(group.runs) for group in groups_in(runs)) == [1, 1, 1, 3]


def test_several_folders_count_each_run_once(tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        make_run(tmp_path / name / "run", 10.0 * seed, compact(seed=seed))
    two = [tmp_path / "b", tmp_path / "a"]
    assert [run.folder.parent for run in read_runs(*two)[0]] == two
    everything = [*two, tmp_path, tmp_path / "b" / ".." / "c"]
    assert len(read_runs(*everything)[0]) == 3
    report.write_report(list(map(str, two)), str(tmp_path / "out"), ["json"])
    (row,) = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (row["seeds"], row["test_accuracy"]) == (2, 5)


def test_linked_run_directories_are_read(runs: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "elsewhere").symlink_to(runs)
    (linked / "once").symlink_to(runs / "a1")
    (linked / "round").symlink_to(linked)
    assert len(read_runs(linked)[0]) == len(read_runs(runs)[0])


def test_the_same_settings_and_seed_again_are_left_out(runs: Path) -> None:
    make_run(runs / "z", 99.0, compact("flow"))
    line = f"{runs / 'z'}: the same settings and seed as {runs / 'deep' / 'b'}"
    assert repeated_runs(read_runs(runs)[0]) == [line]


def text(file: str, content: str | bytes) -> Callable[[Path], object]:
    """Replaces a file's content."""
    content = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / file).write_bytes(content)


def config(**values: object) -> Callable[[Path], object]:
    """Changes values of the settings."""
    return lambda folder: change(folder / "config.json", **values)


def result(name: str, value: object) -> Callable[[Path], object]:
    """Changes a value of the result."""
    return lambda folder: change(folder / "result.json", **{name: value})


SPOILED = [
    ("test_examples", 0),
    ("steps", 10**400),
    ("versions", {"jax": 1.0}),
    ("peak_memory_bytes", "x"),
    ("data_fingerprint", [1]),
    ("official_data", "yes"),
    ("test_accuracy_best", 150),
    ("test_accuracy_last", True),
    ("valid_accuracy_best", "99"),
    (LENGTHS, [1]),
    (LENGTHS, {"20": 101}),
    ("chance", {}),
]


DAMAGES = [
    (text("result.json", "{"), "result.json: expected"),
    (text("result.json", "{}"), "a number, got None"),
    (text("config.json", "nul"), "config.json: expected JSON"),
    (text("config.json", "{}"), "config: expected the fields"),
    (text("config.json", "[" * 100_000), "config.json: "),
    (text("config.json", b"\xff"), "config.json: "),
    (text("metrics.jsonl", "{a}\n"), "metrics.jsonl, line 1: expected metrics"),
    (config(task="../x"), "got '../x'"),
    (config(model="deep", train=3), ": "),
    (config(pretrain={"steps": 1, "target": "notes"}), "pretrain.target='tokens'"),
    (result("steps_per_second", math.nan), "result.json: steps_per_second: "),
    (result("seal", "0" * 64), "result.json: expected"),
    (result("test_perplexity_best", [1]), "scores: perplexity_best: expected a"),
    (result("test_bits_per_byte_best", math.inf), "scores: bits_per_byte_best"),
    *((result(name, value), f"result.json: {name}") for name, value in SPOILED),
]


def test_damaged_runs_are_named_and_the_others_are_shown(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (spoil, _) in enumerate(DAMAGES):
        spoil(make_run(runs / f"damaged{number:02}"))
    # A folder with nothing but a damaged run may also be named itself.
    folders = str(runs), str(runs / "damaged00")
    report.main([*folders, f"--out={tmp_path / 'report'}", "--format=md"])
    out, err = capsys.readouterr()
    assert out.startswith("4 runs in")
    page = (tmp_path / "report" / "report.md").read_text()
    for number, (line, (_, part)) in enumerate(
        zip(err.splitlines(), DAMAGES, strict=True)
    ):
        start = f"warning: {runs / f'damaged{number:02}'}"
        assert line.startswith(start) and part in line, (line, part)
        assert part in page
