"""The benchmark of short runs: its table, its merging, and what it has published."""

import json
import math

import short_runs as SCRIPT

ROW = {"first_loss": 2.3, "last_loss": 2.1, "steps_per_second": 4.0, "parameters": 5}


def test_parts_are_merged_and_other_sizes_dropped(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(SCRIPT, "RESULT", tmp_path / "runs.json")
    monkeypatch.setattr(SCRIPT, "PAGE", tmp_path / "page.md")
    SCRIPT.PAGE.write_text(f"a\n{SCRIPT.MARKS[0]}\n{SCRIPT.MARKS[1]}\nb\n")
    SCRIPT.publish({"gau": ROW, "no_such": ROW}, 10, 2)
    SCRIPT.publish({"softmax": ROW}, 10, 2)
    report = json.loads(SCRIPT.RESULT.read_text())
    assert list(report["mechanisms"]) == ["softmax", "gau"]
    page = SCRIPT.PAGE.read_text()
    assert page.startswith("a\n") and page.endswith("\nb\n")
    assert "| gau | 2.300 | 2.100 | 4.0 | 5 |" in page
    SCRIPT.publish({"flash": ROW}, 11, 2)
    assert list(json.loads(SCRIPT.RESULT.read_text())["mechanisms"]) == ["flash"]


def test_published_runs_are_those_of_the_results() -> None:
    """After a change: python benchmarks/short_runs.py --publish."""
    _, _, rest = SCRIPT.PAGE.read_text().partition(SCRIPT.MARKS[0] + "\n")
    shown = rest.partition(SCRIPT.MARKS[1])[0]
    if not SCRIPT.RESULT.exists():
        assert not shown
        return
    report = json.loads(SCRIPT.RESULT.read_text())
    assert shown == SCRIPT.table(report) + "\n"
    for row in report["mechanisms"].values():
        assert math.isfinite(row["last_loss"]) and row["steps_per_second"] > 0
