"""The README shows what results/ holds, and results say how they were made."""

import json
import re
from pathlib import Path

import pytest
import results_tables as TABLES

from lra_jax.benchmarking.tables import crossover

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "results").rglob("*.json"))


@pytest.mark.parametrize(("page", "name"), TABLES.TABLES)
def test_tables_are_made_from_results(page: str, name: str) -> None:
    """After new results: python benchmarks/results_tables.py."""
    assert (ROOT / page).read_text() == TABLES.fill(page, name)


def test_the_headline_compares_equal_budgets() -> None:
    table = TABLES.full_runs()
    assert "| cosformer " in table and "modern-quick" in table
    shorter = json.loads(
        (ROOT / "results/listops/softmax-compact-seed0.json").read_text()
    )
    assert "--train.steps=2500" in shorter["command"]
    (row,) = (line for line in table.splitlines() if line.startswith("| softmax "))
    assert row.endswith(" - |")  # Not the run of 2,500 steps.


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
        return f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as attnax"

    both = span(4096, "forward", "forward+backward")
    assert both in " ".join((ROOT / "README.md").read_text().split())
    page = " ".join((ROOT / "docs" / "performance.md").read_text().split())
    assert span(0, "forward") in page


def test_the_pages_quote_where_streams_overtake_softmax() -> None:
    report = json.loads((ROOT / "results" / "benchmark" / "decode.json").read_text())
    names = {row["attention"] for row in report["rows"]} - {"softmax"}
    numbers = {
        name: crossover(report["rows"], name, lambda row: row["median_ms"])
        for name in names
    }
    later = {
        name: position
        for name, position in numbers.items()
        if not position.startswith("below")
    }
    first, *_, last = sorted(later.values(), key=lambda x: int(x.replace(",", "")))
    assert len(names) - len(later) == 5
    assert f"overtake softmax between {first} and {last} positions" in _words(
        "explained"
    )
    assert f"the rest from between {first} and {last}" in _words("language_models")
    speed = _words("performance")
    for name, title in (("delta", "DeltaNet"), ("cosformer", "cosFormer")):
        assert re.search(rf"{title} (is faster )?from {later[name]}", speed)


def test_the_pages_quote_costs_beside_linear_attention() -> None:
    files = (f"results/benchmark/kernels-cpu{name}.json" for name in ("", "-gated"))
    times = {
        row["attention"]: row["median_ms"]
        for file in files
        for row in json.loads((ROOT / file).read_text())["rows"]
        if (row["work"], row["length"]) == ("forward+backward", 65_536)
    }

    def ratio(name: str, form: str) -> str:
        time, linear = (times[f"{x}[implementation={form}]"] for x in (name, "linear"))
        return f"{time / linear:.2g}"

    quotes = {
        "gla": "takes {} times as long as linear attention where XLA compiles both, "
        "and {} times with",
        "delta": "takes {} and {} times as long as linear attention",
    }
    for name, quote in quotes.items():
        forms = (ratio(name, form) for form in ("xla", "native"))
        assert quote.format(*forms) in _words("explained")


def test_the_floor_of_a_step_has_its_roofline() -> None:
    name = "results/benchmark/exponents-causal.json"
    roofline = json.loads((ROOT / name).read_text())["roofline"]
    reached = roofline["flops_per_second"]["float32"] / 1e9
    quoted = re.search(
        rf"needs ([\d.]+) Gflop\. Both cores together reach {reached:.0f} Gflop/s in a "
        rf"large product \(the roofline in `{name}`.*? at least (\d+) ms",
        _words("performance"),
    )
    assert quoted is not None
    assert round(1e3 * float(quoted[1]) / reached) == int(quoted[2])


def _words(page: str) -> str:
    """A page of docs/ without its line breaks."""
    return " ".join((ROOT / "docs" / f"{page}.md").read_text().split())


def test_results_name_command_commit_and_versions() -> None:
    for file in FILES:
        text = file.read_text()
        result = json.loads(text)
        assert result["command"].startswith("python "), file
        # Several if runs of several versions are in one file.
        assert {len(x) for x in result["commit"].split("; ")} == {40}, file
        assert {"python", "numpy"} <= set(result["versions"]), file
        for place in ("/home/", "/tmp/", f"{ROOT.parent}/"):
            assert place not in text, file


@pytest.mark.parametrize("marker", ["train", "test"])
def test_readme_holds_its_commands(marker: str) -> None:
    """The gate runs the lines between the marker and the end of the block."""
    _, _, rest = (ROOT / "README.md").read_text().partition(f"<!-- {marker} -->")
    block = rest.split("```")[1]
    assert re.match(r"bash\npython -m venv .venv( && |\n).venv/bin/pip install", block)
    assert "lra_jax" in block or "pytest" in block
