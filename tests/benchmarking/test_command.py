"""The command: errors of one line, tables, JSON, picture, views, Ctrl-C."""

import json
import re
import signal

import helpers
import pytest

from lra_jax import benchmark
from lra_jax.benchmarking import published, tables
from lra_jax.benchmarking.picture import draw
from lra_jax.benchmarking.programs import Program
from lra_jax.benchmarking.settings import (
    BenchmarkConfig,
    linformer_name,
    make_cases,
    published_tables,
)
from lra_jax.reports import charts
from lra_jax.reports.page import Page

TINY = ("--quick=True", "--batch-size=1", "--heads=1", "--head-dim=4")


def outcome(capsys, *args: str) -> tuple[object, str, str]:
    """Exit code, output and errors of the command."""
    code: object = 0
    try:
        benchmark.main(list(args))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


def view(name: str, rows: list[tables.Row]) -> str:
    """The tables of a view."""
    page = Page("view")
    tables.add_view(page, name, rows)
    return page.markdown()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--attention=linaer", ["'linaer'", "did you mean 'linear'"]),
        ("--attention=linear,", ["--attention", "'linear,'"]),
        ("--attention=linear,linear", ["--attention", "different"]),
        ("--lengths=1M", ["--lengths", "'1M'"]),
        ("--lengths=0", ["--lengths", "'0'"]),
        ("--work=", ["--work", "got ''"]),
        ("--dtypes=", ["--dtypes", "got ''"]),
        ("--view=linformer --features=", ["--features", "got ''"]),
        ("--dtypes=float64", ["--dtypes", "'float64'", "bfloat16"]),
        ("--view=lra --work=decode", ["--work", "--view=lra", "'decode'"]),
        ("--view=lro", ["--view", "'lro'"]),
        ("--max-seconds=nan", ["--max_seconds", "nan"]),
        ("--max-gb=0", ["--max_gb", "0"]),
        ("--out=FILE/x", ["FILE"]),
        ("--length=3", ["--length: expected a flag", "did you mean '--lengths'"]),
    ],
)
def test_errors(capsys, tmp_path, flags, parts) -> None:
    file = tmp_path / "file"
    file.touch()
    flags, *parts = (text.replace("FILE", str(file)) for text in (flags, *parts))
    code, out, err = outcome(capsys, *flags.split())
    helpers.assert_one_error(code, err, 2, *parts)
    assert out == ""


def test_no_picture(capsys, tmp_path) -> None:
    flags = ("--attention=linear", "--lengths=8", "--work=forward", "--picture=False")
    code, _, err = outcome(capsys, f"--out={tmp_path}", *TINY, *flags)
    assert code == 0, err
    assert [file.name for file in tmp_path.iterdir()] == ["attention.json"]


def test_no_case_measured_is_a_failure(capsys, tmp_path) -> None:
    """The row says why, and so does the error."""
    flags = ("--attention=fnet", "--work=decode", "--lengths=8")
    code, out, err = outcome(capsys, *TINY, *flags, f"--out={tmp_path}")
    helpers.assert_one_error(code, err, 1, "no case was measured", "no stream")
    assert "not supported: no stream to decode with" in out
    assert [file.name for file in tmp_path.iterdir()] == ["attention.json"]
    # The figures of an earlier run are not replaced by none.
    (tmp_path / "attention.json").write_text("earlier")
    (tmp_path / "attention.png").write_text("earlier")
    code, out, err = outcome(capsys, *TINY, *flags, f"--out={tmp_path}")
    assert code == 1 and "attention.incomplete.json" in out
    for name in ("attention.json", "attention.png"):
        assert (tmp_path / name).read_text() == "earlier"
    flags = ("--attention=fnet,linear", "--work=decode", "--lengths=8")
    assert outcome(capsys, *TINY, *flags)[0] == 0


def test_figures_and_picture(capsys, tmp_path) -> None:
    flags = (
        "--attention=linear,linformer[features=4]",
        "--lengths=8,16",
        "--work=forward",
        "--dtypes=float32,bfloat16",
    )
    code, out, err = outcome(capsys, *TINY, *flags, f"--out={tmp_path}/deep/x.json")
    assert code == 0, err
    assert "Gflop/s" in out and "| linformer[features=4]" in out and "T^" in out
    report = json.loads((tmp_path / "deep" / "x.json").read_text())
    assert report["command"].startswith("python -m lra_jax.benchmark --quick=True")
    assert report["complete"] and len(report["rows"]) == 8
    assert {"jax", "numpy", "python"} <= set(report["versions"])
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", report["commit"])
    assert report["roofline"]["bytes_per_second"] > 0
    assert len(report["exponents"]) == 4
    assert (tmp_path / "deep" / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize("works", [1, 2])
def test_the_title_of_a_picture_is_not_cut(works) -> None:
    case = {"attention": "linear", "dtype": "float32", "status": "measured"}
    case |= {"batch_size": 16, "heads": 16, "head_dim": 128, "causal": True}
    case |= {"length": 1024, "median_ms": 1.0, "peak_bytes": 10**9}
    names = ["forward", "forward+backward"][:works]
    device = "64 CPU cores (Intel(R) Xeon(R) CPU @ 2.20GHz)"
    report = {
        "rows": [case | {"work": name} for name in names],
        "device": device,
        "versions": {"jax": "0.10.2"},
    }
    with charts.style():
        figure = draw(report)
        figure.draw_without_rendering()
    title = figure.get_suptitle()
    assert device in title and "causal" in title
    (text,) = [text for text in figure.texts if text.get_text() == title]
    box = text.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_ctrl_c_keeps_the_figures(capsys, tmp_path, monkeypatch) -> None:
    sample = Program.sample

    def interrupted(self: Program) -> float:
        if self.case.length == 16:
            # A kill would leave this.
            report = json.loads((tmp_path / "attention.incomplete.json").read_text())
            assert not report["complete"]
            assert [row["length"] for row in report["rows"]] == [8]
            raise KeyboardInterrupt
        return sample(self)

    monkeypatch.setattr(Program, "sample", interrupted)
    flags = ("--attention=linear", "--lengths=8,16", "--work=forward")
    flags = (*TINY, *flags, f"--out={tmp_path}", "--picture=False")
    code, out, err = outcome(capsys, *flags)
    helpers.assert_one_error(code, err, 128 + signal.SIGINT, "kept")
    assert "| linear" in out
    report = json.loads((tmp_path / "attention.json").read_text())
    assert not report["complete"]
    assert [row["length"] for row in report["rows"]] == [8]
    assert [path.name for path in tmp_path.iterdir()] == ["attention.json"]
    # The figures of an earlier run are not replaced by fewer.
    (tmp_path / "attention.json").write_text("earlier")
    code, out, err = outcome(capsys, *flags)
    helpers.assert_one_error(code, err, 128 + signal.SIGINT, "kept")
    kept = tmp_path / "attention.incomplete.json"
    assert f"wrote {kept}\n" in out
    assert (tmp_path / "attention.json").read_text() == "earlier"
    assert len(json.loads(kept.read_text())["rows"]) == 1


def test_the_view_of_lra() -> None:
    """Ours and theirs, each over softmax."""
    config = BenchmarkConfig(
        view="lra",
        attention="softmax,linear",
        lengths="16",
        layers=1,
        batch_size=1,
        quick=True,
    )
    report = benchmark.run(config)
    rows = report["rows"]
    assert {row["status"] for row in rows} == {"measured"}
    naive, linear = (row["median_ms"] for row in rows)
    text = view("lra", rows)
    assert f"({naive / linear:.2g}x, -)" in text
    # A length that was not published has no published cell.
    assert re.search(r"linear, published +\| +- ", text)
    assert "arXiv:2011.04006" in text
    long = [row | {"length": 4096} for row in rows]
    assert "7.8 (5.6x)" in view("lra", long)
    assert "1.03 (0.11x)" in view("lra", long)


def test_the_view_of_cosformer_shows_who_ran_out_of_memory() -> None:
    row = {"attention": "softmax", "work": "train", "length": 4096}
    row |= {"dtype": "float32", "batch_size": 2}
    row |= {"model": {"num_layers": 4, "remat": True}}
    rows = [row | {"status": "does not fit", "reason": "60 GB needed"}]
    rows += [row | {"attention": "cosformer", "status": "measured", "median_ms": 100.0}]
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
    row = {"work": "inference", "dtype": "float32", "length": 512, "batch_size": 1}
    row |= {"model": {"num_layers": 2, "remat": False}}
    sizes = {names[0]: (30.0, 3e9), names[1]: (20.0, 2e9), names[2]: (10.0, 1e9)}
    rows = [
        row
        | {
            "attention": name,
            "status": "measured",
            "median_ms": time,
            "peak_bytes": memory,
        }
        for name, (time, memory) in sizes.items()
    ]
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
        {
            "attention": attention,
            "dtype": dtype,
            "work": work,
            "length": 512,
            "status": "measured",
            "median_ms": cost,
            "peak_bytes": cost * 1e9,
            "batch_size": 1,
            "model": {"num_layers": 2, "remat": False},
        }
        for (attention, dtype), cost in costs.items()
    ]
    both = view(name, rows)
    for dtype in ("bfloat16", "float32"):
        alone = view(name, [row for row in rows if row["dtype"] == dtype])
        assert f", {dtype}" in alone and alone.partition("\n")[2].strip() in both


@pytest.mark.parametrize("name", ["lra", "linformer", "cosformer"])
def test_published_tables_are_whole(name: str) -> None:
    for table in published_tables(name):
        assert "arXiv:" in table.source and "Table" in table.source
        assert {len(cells) for cells in table.rows.values()} == {len(table.columns)}
    # 8.1 to 1.4 steps/s in the paper's first row.
    assert published.LRA_STEPS.rows["softmax"] == (8.1, 4.9, 2.3, 1.4)


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
        {
            "attention": name,
            "work": "decode",
            "length": length,
            "dtype": "float32",
            "status": "measured",
            "median_ms": time,
            "peak_bytes": 10**9,
        }
        for name, costs in times.items()
        for length, time in zip((1000, 2000, 4000), costs, strict=True)
    ]
    # From twice softmax's time to 2^-0.5 of it: two thirds of the way.
    wanted = f"{round(1000 * 2 ** (2 / 3)):,}"
    text = view("decode", rows)
    assert re.search(rf"linear +\| +{wanted} +\| +not up to 4,000", text)
    assert re.search(r"flow +\| +below 1,000", text)
    assert re.search(r"gla +\| +not up to 4,000", text)
