"""The tables of a benchmark: every case, or a paper's table together with ours."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lra_jax.benchmarking.cases import FUSED, split_subject
from lra_jax.benchmarking.runner import exponent
from lra_jax.benchmarking.settings import linformer_name
from lra_jax.files import read_json
from lra_jax.reports.page import Page, Section
from lra_jax.reports.table import Table, number

Row = dict[str, Any]
Cost = Callable[[Row], float]
Published = Mapping[str, Any]

PUBLISHED: dict[str, list[Published]] = read_json(
    Path(__file__).with_name("published.json")
)
"""The efficiency tables of papers, by the view that shows them with our figures.

Each has a ``source``, ``columns`` (lengths, or Linformer's K) and ``rows`` (named after
our mechanisms, or lengths), with a figure for each column; None is a cell that the
paper leaves empty or marks as out of memory.
"""


def steps_per_second(row: Row) -> float:
    """Calls per second."""
    return 1e3 / row["median_ms"]


def milliseconds(row: Row) -> float:
    """The median time of a call."""
    return row["median_ms"]


def gigabytes(row: Row) -> float:
    """Peak memory of the compiled call."""
    return row["peak_bytes"] / 1e9


def significant(value: float, digits: int = 3) -> str:
    """A number rounded to so many digits, in full: 120 instead of 1.2e+02."""
    if not math.isfinite(value):
        return str(value)
    return f"{float(f'{value:.{digits}g}'):,.{max(digits, 6)}g}"


class Grid:
    """Rows of one kind of work in one dtype, by mechanism and length.

    Args:
      rows: the rows.
      lengths: the columns; by default the lengths of the rows.

    Attributes:
      names: the mechanisms, in order.
      lengths: the lengths, increasing.
    """

    def __init__(self, rows: Iterable[Row], lengths: Iterable[int] | None = None):
        self._rows = {(row["attention"], row["length"]): row for row in rows}
        self.names = list(dict.fromkeys(name for name, _ in self._rows))
        every = lengths or (length for _, length in self._rows)
        self.lengths = sorted(set(every))

    @property
    def head(self) -> tuple[str, ...]:
        """The lengths as the head of a table."""
        return tuple(f"{length:,}" for length in self.lengths)

    def find(self, name: str, length: int) -> Row | None:
        """A row, if there is one and its case was measured."""
        row = self._rows.get((name, length))
        return row if row and row["status"] == "measured" else None

    def cells(self, name: str, text: Callable[[Row], str]) -> list[str]:
        """A cell for each length: the text of its row, why there is none, or "-"."""
        rows = [self._rows.get((name, x), {"status": "-"}) for x in self.lengths]
        return [text(x) if x["status"] == "measured" else x["status"] for x in rows]

    def times(self, row: Row, base: str, cost: Cost) -> str:
        """The cost of a row as a multiple of a mechanism's, "-" if that is unknown."""
        other = self.find(base, row["length"])
        return f"{significant(cost(row) / cost(other), 2)}x" if other else "-"


def make_page(view: str, rows: Sequence[Row]) -> Page:
    """Every case, the growth with the length, and the tables of a view."""
    page = Page("Benchmark")
    head = (
        "attention",
        "work",
        "dtype",
        "tokens",
        "ms",
        "fastest..slowest",
        "GB",
        "tokens/s",
        "of roofline",
        "remark",
    )
    table = Table(head, [*map(_case_cells, rows)], words=(0, 1, 2, 9))
    page.add(Section("Cases", [table]))
    growth = exponents(rows)
    if growth:
        head = ("attention", "work", "dtype", "time", "memory")
        cells = [
            (*list(x.values())[:3], f"T^{x['time']:.2f}", f"T^{x['memory']:.2f}")
            for x in growth
        ]
        table = Table(head, cells, words=(0, 1, 2))
        page.add(Section("Growth with the length", [table]))
    page.add(*view_sections(view, rows))
    return page


def _case_cells(row: Row) -> tuple[str, ...]:
    start = (row["attention"], row["work"], row["dtype"], f"{row['length']:,}")
    memory = significant(gigabytes(row)) if "peak_bytes" in row else "-"
    if row["status"] != "measured":
        return *start, "-", "-", memory, "-", "-", f"{row['status']}: {row['reason']}"
    share, remark = "-", "the roofline was measured on a busy machine"
    if "roofline_share" in row:
        share = f"{100 * row['roofline_share']:.0f} % ({row['roofline_bound']})"
        remark = ""
    return (
        *start,
        significant(row["median_ms"]),
        f"{significant(row['fastest_ms'])}..{significant(row['slowest_ms'])}",
        memory,
        f"{row['tokens_per_second']:,.0f}",
        share,
        remark,
    )


def exponents(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Growth of time and memory with the length, for each line of cases; none if there
    is only one length."""
    names = ("attention", "work", "dtype")
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == "measured":
            lines.setdefault(tuple(row[name] for name in names), []).append(row)
    growth = []
    for line, members in lines.items():
        lengths = [row["length"] for row in members]
        time = exponent(lengths, [row["median_ms"] for row in members])
        memory = exponent(lengths, [row["peak_bytes"] for row in members])
        if time is not None:
            named = dict(zip(names, line, strict=True))
            growth.append({**named, "time": time, "memory": memory})
    return growth


def view_sections(view: str, rows: Sequence[Row]) -> list[Section]:
    """The tables of a view for each dtype, with the published figures below ours."""
    columns = {
        "lra": (("train", steps_per_second), ("train", gigabytes)),
        "cosformer": (("inference", steps_per_second), ("train", steps_per_second)),
        "linformer": (("inference", milliseconds), ("inference", gigabytes)),
    }.get(view, ())
    sections = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        members = [row for row in rows if row["dtype"] == dtype]
        if view == "decode":
            sections.append(_decoding(members))
        for table, (work, cost) in zip(PUBLISHED.get(view, ()), columns, strict=True):
            compare = _linformer if view == "linformer" else _by_length
            chosen = [row for row in members if row["work"] == work]
            if chosen:
                sections.append(compare(chosen, table, cost))
    return sections


def _decoding(rows: Sequence[Row]) -> Section:
    """The position from which a step is faster, or smaller, than softmax's."""
    names = dict.fromkeys(row["attention"] for row in rows)
    lines = [
        (name, crossover(rows, name, milliseconds), crossover(rows, name, gigabytes))
        for name in names
        if name != "softmax"
    ]
    text = (
        "The position from which a token costs less than with softmax and its cache of "
        "keys and values, interpolated between two lengths on a logarithmic scale."
    )
    table = Table(("attention", "faster from", "smaller from"), lines)
    return Section(f"Crossover with softmax, {rows[0]['dtype']}", [table, text])


def crossover(rows: Sequence[Row], name: str, cost: Cost) -> str:
    """The length from which a mechanism costs less than softmax, in words.

    From there on it is lower at all measured lengths.
    """
    grid = Grid(rows)
    points = [
        (length, math.log(cost(row) / cost(base)))
        for length in grid.lengths
        if (row := grid.find(name, length)) and (base := grid.find("softmax", length))
    ]
    above = [place for place, (_, ratio) in enumerate(points) if ratio >= 0]
    if not points:
        return "not measured"
    if not above:
        return f"below {points[0][0]:,}"
    if above[-1] == len(points) - 1:
        return f"not up to {points[-1][0]:,}"
    (first, high), (second, low) = points[above[-1] : above[-1] + 2]
    share = high / (high - low)
    return f"{round(first * (second / first) ** share):,}"


def _by_length(rows: Sequence[Row], table: Published, cost: Cost) -> Section:
    """Mechanisms by length; in brackets relative to softmax, and to the fused one."""
    grid = Grid(rows)

    def text(row: Row) -> str:
        ratios = [grid.times(row, base, cost) for base in ("softmax", FUSED)]
        return f"{significant(cost(row))} ({', '.join(ratios)})"

    lines = []
    for subject in grid.names:
        lines.append((subject, *grid.cells(subject, text)))
        name = split_subject(subject)[0]
        if name in table["rows"]:
            cells = [_published_cell(table, name, length) for length in grid.lengths]
            lines.append((f"{name}, published", *cells))
    unit = "GB" if cost is gigabytes else "steps/s"
    first = rows[0]
    note = (
        f"{unit}; in brackets, compared with softmax and with {FUSED}. "
        f"{_our_model(first)} Published: {table['source']}"
    )
    heading = f"Compared with the paper: {first['work']}, {unit}, {first['dtype']}"
    return Section(heading, [Table(("attention", *grid.head), lines), note])


def _our_model(row: Row) -> str:
    """A sentence on the model and batch of a row of a view."""
    model = row["model"]
    recomputes = model["remat"] and row["work"] == "train"
    again = ", whose activations are computed again" if recomputes else ""
    return (
        f"Ours: batches of {row['batch_size']}, models of {model['num_layers']} layers"
        f"{again}."
    )


def _published_cell(table: Published, name: str, length: int) -> str:
    if length not in table["columns"]:
        return "-"
    column = table["columns"].index(length)
    value, base = table["rows"][name][column], table["rows"]["softmax"][column]
    if value is None:
        return "out of memory"
    return f"{value:g}" if base is None else f"{value:g} ({value / base:.2g}x)"


def _linformer(rows: Sequence[Row], table: Published, cost: Cost) -> Section:
    """Lengths by K: softmax over Linformer, the fused one in brackets; then theirs."""
    # The compiler's memory figure is enough if the call itself did not fit.
    needed = "peak_bytes" if cost is gigabytes else "median_ms"
    costs = {(x["attention"], x["length"]): cost(x) for x in rows if needed in x}
    features = sorted({size for row in rows if (size := _features(row["attention"]))})
    lines = []
    for length in sorted({row["length"] for row in rows}):
        cells = []
        for size in features:
            ours = costs.get((linformer_name(size), length))
            bases = [costs.get((name, length)) for name in ("softmax", FUSED)]
            ratios = [f"{x / ours:.2g}" if ours and x else "-" for x in bases]
            cells.append(f"{ratios[0]} ({ratios[1]})" if ours else "-")
        lines.append((f"{length:,}", *cells))
        theirs = dict(
            zip(table["columns"], table["rows"].get(str(length), ()), strict=False)
        )
        cells = (number(theirs.get(size), "g") for size in features)
        lines.append(("published", *cells))
    dtype = rows[0]["dtype"]
    kind = "memory" if cost is gigabytes else "time"
    text = (
        f"In brackets, {FUSED} over Linformer. {_our_model(rows[0])} Published: "
        f"{table['source']}"
    )
    heading = f"Compared with the paper: {kind}, softmax over Linformer, {dtype}"
    head = ("tokens", *(f"K={size}" for size in features))
    return Section(heading, [Table(head, lines), text])


def _features(subject: str) -> int | None:
    """K of one of the view's Linformers; None for another mechanism."""
    digits = re.sub(r"\D", "", subject)
    return int(digits) if digits and linformer_name(int(digits)) == subject else None
