"""The tables of a benchmark: numbers, and the papers' next to ours."""

import math
import re
from typing import Any

import pytest

from lra_jax.benchmarking import tables
from lra_jax.benchmarking.settings import BenchmarkConfig, linformer_name, make_cases
from lra_jax.benchmarking.tables import significant
from lra_jax.reports.page import Page


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
        (0.012345, 3, "0.0123"),
        (2.0, 3, "2"),
        (99.96, 2, "100"),
        (121.7, 2, "120"),
        (1_234.5, 3, "1,230"),
        (123_456.7, 2, "120,000"),
        (math.nan, 3, "nan"),
        (math.inf, 2, "inf"),
    ],
)
def test_numbers_are_rounded_and_written_in_full(
    value: float, digits: int, words: str
) -> None:
    assert significant(value, digits) == words


def view(name: str, rows: list[tables.Row]) -> str:
    """The tables of a view."""
    page = Page("view")
    page.add(*tables.view_sections(name, rows))
    return page.markdown()


def measured(attention: str, work: str, milliseconds: float, **more: Any) -> Any:
    """A row as a run of the benchmark makes it."""
    return {
        **{"attention": attention, "work": work, "median_ms": milliseconds},
        **{"status": "measured", "length": 512, "dtype": "float32", "batch_size": 1},
        **{"model": {"num_layers": 2, "remat": False}, "peak_bytes": 1e9},
        **more,
    }


def test_the_view_of_lra() -> None:
    """Ours and theirs, each over softmax."""
    names = "softmax,linear"
    config = BenchmarkConfig(view="lra", attention=names, lengths="16", layers=1)
    cases = make_cases(config, on_cpu=True)
    assert [(case.attention, case.work, case.length) for case in cases] == [
        *(("softmax", "train", 16), ("linear", "train", 16))
    ]
    rows = [measured("softmax", "train", 3.0, length=16)]
    rows += [measured("linear", "train", 2.0, length=16)]
    text = view("lra", rows)
    assert "(1.5x, -)" in text
    # A length that was not published has no published cell.
    assert re.search(r"linear, published +\| +- ", text)
    assert "arXiv:2011.04006" in text
    long = [row | {"length": 4096} for row in rows]
    assert "7.8 (5.6x)" in view("lra", long)
    assert "1.03 (0.11x)" in view("lra", long)


def test_the_view_of_cosformer_shows_who_ran_out_of_memory() -> None:
    sizes = {"length": 4096, "batch_size": 2, "model": {"num_layers": 4, "remat": True}}
    lost = {"status": "does not fit", "reason": "60 GB needed"}
    rows = [measured("softmax", "train", 0.0, **sizes, **lost)]
    rows += [measured("cosformer", "train", 100.0, **sizes)]
    text = view("cosformer", rows)
    assert "out of memory" in text and "does not fit" in text
    assert "10 (-, -)" in text and "2.64" in text and "Table 5" in text
    assert "Ours: batches of 2, models of 4 layers, whose activations" in text
    text = view("cosformer", [*rows, rows[1] | {"work": "inference"}])
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert [x.split(",")[0].split()[-1] for x in headings] == ["inference", "train"]


def test_the_view_of_linformer() -> None:
    cases = make_cases(BenchmarkConfig(view="linformer"), on_cpu=True)
    assert (cases[0].length, cases[-1].length) == (512, 65536)
    names = [c.attention for c in cases if c.length == 512]
    assert len(names) == 4 and names[2].startswith("linformer[features=128,")
    costs = zip(names, (30.0, 20.0, 10.0), (3e9, 2e9, 1e9), strict=False)
    rows = [measured(name, "inference", x, peak_bytes=y) for name, x, y in costs]
    text = view("linformer", rows)
    assert "3 (2)" in text and "1.5" in text and "1.7" in text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert len(set(headings)) == 2 and "time" in headings[0]


@pytest.mark.parametrize(
    ("name", "work"),
    [("lra", "train"), ("linformer", "inference"), ("decode", "decode")],
)
def test_each_dtype_of_a_view_has_its_own_tables(name: str, work: str) -> None:
    """A time in one dtype is not compared with one in another."""
    linear = linformer_name(128) if name == "linformer" else "linear"
    costs = {("softmax", "bfloat16"): 3.0, (linear, "bfloat16"): 1.0}
    costs |= {("softmax", "float32"): 40.0, (linear, "float32"): 8.0}
    rows = [
        measured(attention, work, cost, dtype=dtype, peak_bytes=cost * 1e9)
        for (attention, dtype), cost in costs.items()
    ]
    both = view(name, rows)
    for dtype in ("bfloat16", "float32"):
        alone = view(name, [row for row in rows if row["dtype"] == dtype])
        assert f", {dtype}" in alone and alone.partition("\n")[2].strip() in both


@pytest.mark.parametrize("name", ["lra", "linformer", "cosformer"])
def test_published_tables_are_whole(name: str) -> None:
    for table in tables.PUBLISHED[name]:
        assert "arXiv:" in table["source"] and "Table" in table["source"]
        assert {*map(len, table["rows"].values())} == {len(table["columns"])}
    # 8.1 to 1.4 steps/s in the paper's first row.
    assert tables.PUBLISHED["lra"][0]["rows"]["softmax"] == [8.1, 4.9, 2.3, 1.4]


def test_the_view_of_decoding_says_where_it_crosses_softmax() -> None:
    cases = make_cases(BenchmarkConfig(view="decode"), on_cpu=True)
    assert (cases[0].length, cases[-1].length) == (64, 262144)
    assert {case.work for case in cases} == {"decode"}
    times = {
        "softmax": (1.0, 2.0, 4.0),
        "linear": (2.0, 2.0 * 2**-0.5, 2.0),
        "flow": (0.5, 0.5, 0.5),
        "gla": (8.0, 8.0, 8.0),
    }
    rows = [
        measured(name, "decode", time, length=length)
        for name, costs in times.items()
        for length, time in zip((1000, 2000, 4000), costs, strict=True)
    ]
    # From twice softmax's time to 2^-0.5 of it: two thirds of the way.
    expected = f"{round(1000 * 2 ** (2 / 3)):,}"
    text = view("decode", rows)
    assert re.search(rf"linear +\| +{expected} +\| +not up to 4,000", text)
    assert re.search(r"flow +\| +below 1,000", text)
    assert re.search(r"gla +\| +not up to 4,000", text)
