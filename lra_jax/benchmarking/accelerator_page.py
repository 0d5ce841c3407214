"""The page of the accelerator's view, from the values of its JSON."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lra_jax.benchmarking.cases import FUSED, form
from lra_jax.benchmarking.parts import PARTS
from lra_jax.benchmarking.tables import significant
from lra_jax.reports.page import Page

Row = Mapping[str, Any]

_TITLES = {part.name: part.title for part in PARTS}


def outcome(part: Row) -> str:
    """The outcome of a part, in words."""
    reason = f": {part['reason']}" if part["reason"] else ""
    return f"{part['status']}{reason} ({part['seconds']:,.0f} s)"


def make(values: Row, folder: Path) -> Page:
    """The page of all measurements so far."""
    page = Page(f"lra_jax on {values['device']}", folder)
    versions = ", ".join(f"{name} {x}" for name, x in values["versions"].items())
    made = f"Made by {values['command']} at commit {values['commit']}"
    page.text(f"{made}, with {versions}.")
    page.text(
        "Please attach this page and accelerator.json, which has all figures, to an "
        "issue."
        if values["complete"]
        else "Some parts are missing or have failed. The same command repeats them "
        "and leaves the others alone."
    )
    page.heading("Parts")
    page.table(
        ("part", "outcome"),
        [(_TITLES[part["name"]], outcome(part)) for part in values["parts"]],
        words=(0, 1),
    )
    found = {part["name"]: part["found"] for part in values["parts"]}
    _add_errors(page, found)
    _add_kernels(page, found)
    _add_times(page, found)
    _add_trainings(page, [found[name] for name in ("listops", "lm") if found.get(name)])
    return page


def _add_errors(page: Page, found: Row) -> None:
    parts = [found.get(name, {}) for name in ("correctness", "kernels")]
    rows = [row for part in parts for row in part.get("rows", ())]
    if not rows:
        return
    tolerances = next(part for part in parts if part)["tolerances"]
    judged = [row for row in rows if row["status"] == "measured"]
    wrong = [row for row in judged if not row["holds"]]
    page.heading("Errors")
    head = ["attention", "form"]
    for dtype in tolerances:
        head += [f"{dtype}: output", "gradients"]
    page.table((*head, "remark"), _error_rows(rows, tolerances), words=(0, 1, 6))
    limits = " and ".join(f"{x:g} in {dtype}" for dtype, x in tolerances.items())
    page.text(
        "Each error is the largest difference from a computation in float64 on the "
        "CPU, divided by the largest entry of the array; for gradients, the worst over "
        "all inputs and the mechanism's own arrays. Products in float32 have the "
        f"highest precision. Errors of up to {limits} count as rounding, which holds "
        f"for {len(judged) - len(wrong)} of {len(judged)} comparisons."
    )


def _error_rows(rows: Sequence[Row], dtypes: Sequence[str]) -> list[list[str]]:
    """One row for each mechanism and form."""
    forms: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        name = row["attention"], form(row["causal"], row["rows"])
        forms.setdefault(name, {})[row["dtype"]] = row
    lines = []
    for name, found in forms.items():
        line, remarks = [*name], []
        for dtype in dtypes:
            row = found.get(dtype)
            if row is None or row["status"] != "measured":
                line += ["-", "-"]
                if row is not None:
                    remarks.append(f"{dtype} {row['status']}: {row['reason']}")
                continue
            line += [f"{row['output']:.1e}", f"{row['gradients']:.1e}"]
            if not row["holds"]:
                remarks.append(f"{dtype} beyond the tolerance")
        lines.append([*line, "; ".join(remarks)])
    return lines


def _add_kernels(page: Page, found: Row) -> None:
    """Adds the time of the XLA form divided by that of the kernel."""
    rows = _rows_of(found, "kernel-times", "kernel-times-causal")
    index = {
        (row["attention"], *_line(row), row["length"]): row["median_ms"]
        for row in rows
        if row["status"] == "measured"
    }
    lengths = sorted({row["length"] for row in rows})
    lines = []
    for row in rows:
        name, _, implementation = row["attention"].partition("[implementation=")
        if implementation != "pallas]" or row["length"] != lengths[0]:
            continue
        cells = []
        for length in lengths:
            kernel, xla = (
                index.get((f"{name}[implementation={x}]", *_line(row), length))
                for x in ("pallas", "xla")
            )
            cells.append(
                f"{significant(kernel)} ({significant(xla / kernel, 2)}x)"
                if kernel and xla
                else "-"
            )
        lines.append((name, form(row["causal"]), row["work"], row["dtype"], *cells))
    if lines:
        page.heading("Pallas kernels")
        head = ("attention", "form", "work", "dtype", *(f"{x:,}" for x in lengths))
        page.table(head, lines, words=(0, 1, 2, 3))
        page.text(
            "Milliseconds of the kernel by the number of tokens; in brackets, the time "
            "of the form compiled by XLA divided by it: above 1x the kernel is faster."
        )


def _line(row: Row) -> tuple[bool, str, str]:
    return row["causal"], row["work"], row["dtype"]


def _rows_of(found: Row, *names: str) -> list[Row]:
    return [row for name in names for row in found.get(name, {}).get("rows", ())]


def _add_times(page: Page, found: Row) -> None:
    rows = _rows_of(found, "times", "times-causal", "flash-linear-attention")
    if not rows:
        return
    page.heading("Times")
    for name in ("times", "times-causal"):
        if found.get(name, {}).get("roofline"):
            page.text(f"{_TITLES[name]}: {_machine(found[name]['roofline'])}")
    lengths = sorted({row["length"] for row in rows})
    head = ("attention", *(f"{length:,}" for length in lengths))
    for line in sorted({_line(row) for row in rows}):
        members = [row for row in rows if _line(row) == line]
        words, work, dtype = form(line[0]), *line[1:]
        first = members[0]
        page.text(
            f"{work} in {dtype}, {words} form, batch {first['batch_size']}, "
            f"{first['heads']} heads of {first['head_dim']}:"
        )
        page.table(head, _time_rows(members, lengths))
    page.text(
        "Milliseconds of a call by the number of tokens. In brackets: the time of "
        f"{FUSED}, the best softmax attention here ({_best_softmax(found)}), divided "
        "by it, and its share of the roofline, which is the shortest time that the "
        "call's bytes and arithmetic could take on this machine, divided by the "
        "measured one."
    )


def _machine(roofline: Row) -> str:
    rates = roofline["flops_per_second"].items()
    products = ", ".join(f"{x / 1e12:,.3g} Tflop/s in {dtype}" for dtype, x in rates)
    copies = f"{roofline['bytes_per_second'] / 1e9:,.0f} GB/s"
    return f"this machine copied at {copies} and multiplied matrices at {products}."


def _best_softmax(found: Row) -> str:
    chosen = {
        name
        for part in ("times", "times-causal")
        for name in found.get(part, {}).get("softmax_fused", {}).values()
    }
    return ", ".join(sorted(chosen)) or "not measured"


def _time_rows(rows: Sequence[Row], lengths: Sequence[int]) -> list[list[str]]:
    index = {(row["attention"], row["length"]): row for row in rows}
    names = dict.fromkeys(row["attention"] for row in rows)
    cell = functools.partial(_time_cell, index)
    return [[name, *(cell(name, length) for length in lengths)] for name in names]


def _time_cell(index: Mapping[tuple[str, int], Row], name: str, length: int) -> str:
    row, base = index.get((name, length)), index.get((FUSED, length))
    if row is None or row["status"] != "measured":
        return "-" if row is None else row["status"]
    remarks = []
    if base is not None and base["status"] == "measured":
        remarks.append(f"{significant(base['median_ms'] / row['median_ms'], 2)}x")
    if "roofline_share" in row:
        remarks.append(f"{100 * row['roofline_share']:.0f} %")
    return f"{significant(row['median_ms'])} ({', '.join(remarks) or '-'})"


def _add_trainings(page: Page, runs: Sequence[Row]) -> None:
    if not runs:
        return
    page.heading("Training runs")
    head = ("task", "attention", "preset", "test score", "steps", "steps/s", "s")
    page.table(head, map(_run_cells, runs), words=(0, 1, 2, 3))
    page.text(
        "The score is that of the checkpoint with the best validation score; the "
        "seconds cover the whole run, including evaluations and compilation."
    )


def _run_cells(run: Row) -> tuple[str, ...]:
    score = f"{run['test_accuracy_best']:.2f} % correct"
    if "test_bits_per_byte_best" in run:
        score = f"{run['test_bits_per_byte_best']:.3f} bits per byte"
    return (
        *(
            run["task"],
            run["attention"],
            run["preset"],
            score,
            f"{run['steps']:,}",
        ),
        *(f"{run['steps_per_second']:.1f}", f"{run['seconds']:,.0f}"),
    )
