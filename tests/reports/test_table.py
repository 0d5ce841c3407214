"""A table in each format for other programs; tests of pages show it in theirs."""

import csv
import io

import pytest
from markupsafe import Markup

from lra_jax.reports.table import Table


@pytest.mark.parametrize("sign", ["=", "+", "-", "@"])
def test_csv_has_no_formulas(sign: str) -> None:
    """Numbers stay as they are, negative ones too, and None is an empty cell."""
    table = Table(
        ("attention", "loss", "seeds", "score"), [(f"{sign}1+1", -1.5, 2, None)]
    )
    (row,) = csv.DictReader(io.StringIO(table.csv(), newline=""))
    cells = {"attention": f"'{sign}1+1", "loss": "-1.5", "seeds": "2", "score": ""}
    assert row == cells


def test_latex_escapes_all_but_formulas() -> None:
    rows = [(r"my_mod:f&g%\x", Markup(r"$1.5 \pm 0.1$"), "{}~^")]
    text = Table(("model", "accuracy, %", "#"), rows, words=(0, 2)).latex("a_b", "5 %")
    assert r"\label{tab:a-b}" in text and r"\footnotesize 5 \%" in text
    assert r"\caption{a\_b}" in text and r"\begin{tabular}{lrl}" in text
    assert r"model & accuracy, \% & \# \\" in text
    first, formula, marks = text.splitlines()[8].removesuffix(r" \\").split(" & ")
    assert first == r"my\_mod:f\&g\%\textbackslash{}x"
    assert formula == r"$1.5 \pm 0.1$"
    assert marks == r"\{\}\textasciitilde{}\textasciicircum{}"
