"""The README shows what results/ holds, and results say how they were made."""

import json
import re
from pathlib import Path

import pytest
import results_tables as TABLES

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "results").rglob("*.json"))


@pytest.mark.parametrize(("page", "name"), TABLES.TABLES)
def test_tables_are_made_from_results(page: str, name: str) -> None:
    """After new results: python benchmarks/results_tables.py."""
    assert (ROOT / page).read_text() == TABLES.filled(page, name)


def test_the_headline_compares_equal_budgets() -> None:
    table = TABLES.full_runs()
    assert "| cosformer |" in table and "modern-quick" in table
    shorter = json.loads(
        (ROOT / "results/listops/softmax-compact-seed0.json").read_text()
    )
    assert "--train.steps=2500" in shorter["command"]
    (row,) = (line for line in table.splitlines() if line.startswith("| softmax |"))
    assert row.endswith(" | - |")  # Not the run of 2,500 steps.


def test_the_pages_quote_the_causal_ratios() -> None:
    """Both allocators; a ratio is the time of attnax over that of our linear form."""
    report = json.loads((ROOT / "results" / "causal.json").read_text())

    def span(longer: int, *passes: str) -> str:
        ratios = [
            row["ratio"]
            for row in report["times"]
            if row["form"] == "attnax"
            and row["pass"] in passes
            and row["length"] >= longer
        ]
        return f"{min(ratios):.2f} to {max(ratios):.1f} times as fast as attnax"

    both = span(4096, "forward", "forward+backward")
    assert both in " ".join((ROOT / "README.md").read_text().split())
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    assert span(0, "forward") in page


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_result_names_command_commit_and_versions(file: Path) -> None:
    result = json.loads(file.read_text())
    assert result["command"].startswith("python ")
    # Several if runs of several versions are in one file.
    assert {len(commit) for commit in result["commit"].split("; ")} == {40}
    assert {"python", "numpy"} <= set(result["versions"])
    for place in ("/home/", "/tmp/", "/work/"):
        assert place not in file.read_text()


@pytest.mark.parametrize("marker", ["train", "test"])
def test_readme_holds_its_commands(marker: str) -> None:
    """The gate runs what stands between the marker and the end of the block."""
    _, _, rest = (ROOT / "README.md").read_text().partition(f"<!-- {marker} -->")
    block = rest.split("```")[1]
    assert re.match(r"bash\npython -m venv .venv( && |\n).venv/bin/pip install", block)
    assert "lra_jax" in block or "pytest" in block
