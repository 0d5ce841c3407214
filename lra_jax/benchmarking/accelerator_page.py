"""The page of the accelerator's view, from the values of its JSON."""

import functools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lra_jax.benchmarking.cases import FUSED, form
from lra_jax.benchmarking.parts import PARTS
from lra_jax.benchmarking.tables import Grid, significant, steps_per_second
from lra_jax.reports.page import Page, Part, Section
from lra_jax.reports.table import Table

Row = dict[str, Any]

_TITLES = {part.name: part.title for part in PARTS} | {
    # Of earlier versions, whose pages are in results/accelerator.
    "kernels": "Errors of the Pallas kernels",
    "kernel-times": "Times of the kernels",
    "kernel-times-causal": "Times of the causal kernels",
}


def outcome(part: Row) -> str:
    """The outcome of a part, in words."""
    reason = f": {part['reason']}" if part["reason"] else ""
    return f"{part['status']}{reason} ({part['seconds']:,.0f} s)"


def make(values: Row, folder: Path) -> Page:
    """The page of all measurements so far."""
    page = Page(f"lra_jax on {values['device']}", folder)
    versions = ", ".join(f"{name} {x}" for name, x in values["versions"].items())
    origin = f"Made by {values['command']} at commit {values['commit']}"
    page.add(
        f"{origin}, with {versions}.",
        "Please attach this page and accelerator.json, which has all figures, to an "
        "issue."
        if values["complete"]
        else "Some parts are missing or have failed. The same command repeats them "
        "and leaves the others alone.",
    )
    outcomes = [(_TITLES[part["name"]], outcome(part)) for part in values["parts"]]
    page.add(Section("Parts", [Table(("part", "outcome"), outcomes, words=(0, 1))]))
    results = {part["name"]: part["found"] for part in values["parts"]}
    for make_section in (_errors, _kernels, _times, _trainings):
        section = make_section(results)
        if section.parts:
            page.add(section)
    return page


def _errors(results: Row) -> Section:
    rows = _rows_of(results, "correctness", "kernels")
    if not rows:
        return Section("Errors", [])
    parts = (results.get(name, {}) for name in ("correctness", "kernels"))
    tolerances = next(part for part in parts if part)["tolerances"]
    judged = [row for row in rows if row["status"] == "measured"]
    head = ["attention", "form"]
    for dtype in tolerances:
        head += [f"{dtype}: output", "gradients"]
    limits = " and ".join(f"{x:g} in {dtype}" for dtype, x in tolerances.items())
    text = (
        "Each error is the largest difference from a computation in float64 on the "
        "CPU, divided by the largest entry of the array; for gradients, the worst over "
        "all inputs and the mechanism's own arrays. Products in float32 have the "
        f"highest precision. Errors of up to {limits} count as rounding, which holds "
        f"for {sum(row['holds'] for row in judged)} of {len(judged)} comparisons."
    )
    lines = _error_lines(rows, tolerances)
    return Section("Errors", [Table((*head, "remark"), lines, words=(0, 1, 6)), text])


def _error_lines(rows: Sequence[Row], dtypes: Sequence[str]) -> list[list[str]]:
    """One line for each mechanism and form."""
    forms: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        name = row["attention"], form(row["causal"], row["rows"])
        forms.setdefault(name, {})[row["dtype"]] = row
    lines = []
    for name, by_dtype in forms.items():
        cells, remarks = [], []
        for dtype in dtypes:
            row = by_dtype.get(dtype)
            if row is None or row["status"] != "measured":
                cells += ["-", "-"]
                if row is not None:
                    remarks.append(f"{dtype} {row['status']}: {row['reason']}")
                continue
            cells += [f"{row['output']:.1e}", f"{row['gradients']:.1e}"]
            if not row["holds"]:
                remarks.append(f"{dtype} beyond the tolerance")
        lines.append([*name, *cells, "; ".join(remarks)])
    return lines


def _kernels(results: Row) -> Section:
    """The time of the XLA form divided by that of the kernel."""
    rows = _rows_of(results, "kernel-times", "kernel-times-causal")
    rows = rows or _rows_of(results, "times", "times-causal")
    lines, every = [], Grid(rows)
    for line, grid in _grids(rows).items():
        for subject in grid.names:
            name, _, implementation = subject.partition("[implementation=")
            if implementation == "pallas]":
                xla = f"{name}[implementation=xla]"
                base = xla if xla in grid.names else name
                cells = grid.cells(subject, functools.partial(_faster, grid, base))
                lines.append((name, form(line[0]), *line[1:], *cells))
    text = (
        "Milliseconds of the kernel by the number of tokens; in brackets, the time "
        "of the form compiled by XLA divided by it: above 1x the kernel is faster."
    )
    head = ("attention", "form", "work", "dtype", *every.head)
    table = Table(head, lines, words=(0, 1, 2, 3))
    return Section("Pallas kernels", [table, text] if lines else [])


def _faster(grid: Grid, base: str, row: Row) -> str:
    """Milliseconds, and how many times faster that is than another mechanism."""
    remarks = [grid.times(row, base, steps_per_second)]
    if "roofline_share" in row and base == FUSED:
        remarks.append(f"{100 * row['roofline_share']:.0f} %")
    return f"{significant(row['median_ms'])} ({', '.join(remarks)})"


def _grids(rows: Sequence[Row]) -> dict[tuple[bool, str, str], Grid]:
    """A grid of all lengths for each form, work and dtype."""
    lines: dict[tuple[bool, str, str], list[Row]] = {}
    for row in rows:
        line = row["causal"], row["work"], row["dtype"]
        lines.setdefault(line, []).append(row)
    lengths = {row["length"] for row in rows}
    return {line: Grid(members, lengths) for line, members in lines.items()}


def _rows_of(results: Row, *names: str) -> list[Row]:
    return [row for name in names for row in results.get(name, {}).get("rows", ())]


def _times(results: Row) -> Section:
    rows = _rows_of(results, "times", "times-causal")
    if not rows:
        return Section("Times", [])
    parts: list[Part] = [
        f"{_TITLES[name]}: {_machine(results[name]['roofline'])}"
        for name in ("times", "times-causal")
        if results.get(name, {}).get("roofline")
    ]
    for (causal, work, dtype), grid in sorted(
        _grids(rows).items(), key=operator.itemgetter(0)
    ):
        text = functools.partial(_faster, grid, FUSED)
        lines = [(name, *grid.cells(name, text)) for name in grid.names]
        parts += [
            f"{work} in {dtype}, {form(causal)} form, batch {rows[0]['batch_size']}, "
            f"{rows[0]['heads']} heads of {rows[0]['head_dim']}:",
            Table(("attention", *grid.head), lines),
        ]
    parts.append(
        "Milliseconds of a call by the number of tokens. In brackets: the time of "
        f"{FUSED}, the best softmax attention here ({_best_softmax(results)}), divided "
        "by it, and its share of the roofline, which is the shortest time that the "
        "call's bytes and arithmetic could take on this machine, divided by the "
        "measured one."
    )
    return Section("Times", parts)


def _machine(roofline: Row) -> str:
    rates = roofline["flops_per_second"].items()
    products = ", ".join(f"{x / 1e12:,.3g} Tflop/s in {dtype}" for dtype, x in rates)
    copies = f"{roofline['bytes_per_second'] / 1e9:,.0f} GB/s"
    return f"this machine copied at {copies} and multiplied matrices at {products}."


def _best_softmax(results: Row) -> str:
    names = {
        name
        for part in ("times", "times-causal")
        for name in results.get(part, {}).get("softmax_fused", {}).values()
    }
    return ", ".join(sorted(names)) or "not measured"


def _trainings(results: Row) -> Section:
    runs = [results[name] for name in ("listops", "lm") if results.get(name)]
    head = ("task", "attention", "preset", "test score", "steps", "steps/s", "s")
    table = Table(head, [*map(_run_cells, runs)], words=(0, 1, 2, 3))
    text = (
        "The score is that of the checkpoint with the best validation score; the "
        "seconds cover the whole run, including evaluations and compilation."
    )
    return Section("Training runs", [table, text] if runs else [])


def _run_cells(run: Row) -> tuple[str, ...]:
    score = f"{run['test_accuracy_best']:.2f} % correct"
    if "test_bits_per_byte_best" in run:
        score = f"{run['test_bits_per_byte_best']:.3f} bits per byte"
    names = (run["task"], run["attention"], run["preset"], score)
    speed = f"{run['steps_per_second']:.1f}"
    return *names, f"{run['steps']:,}", speed, f"{run['seconds']:,.0f}"
