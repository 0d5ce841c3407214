"""A table in each format for other programs; tests of pages show it in theirs."""

import csv
import io

import pytest
from markupsafe import Markup

from lra_jax.reports.table import Table, to_latex_text


@pytest.mark.parametrize("sign", ["=", "+", "-", "@"])
def test_csv_has_no_formulas(sign: str) -> None:
    """Numbers stay as they are, negative ones too, and None is an empty cell."""
    table = Table(
        ("attention", "loss", "seeds", "score"), [(f"{sign}1+1", -1.5, 2, None)]
    )
    (row,) = csv.DictReader(io.StringIO(table.csv(), newline=""))
    cells = {"attention": f"'{sign}1+1", "loss": "-1.5", "seeds": "2", "score": ""}
    assert row == cells


LATEX = {
    r"my_mod:f&g%\x": r"my\_mod:f\&g\%\textbackslash{}x",
    "{}~^#$": r"\{\}\textasciitilde{}\textasciicircum{}\#\$",
    # LaTeX's first font has other characters in their places.
    '<a> | "b" `c`': r"\textless{}a\textgreater{} \textbar{} \textquotedblright{}b"
    r"\textquotedblright{} \textasciigrave{}c\textasciigrave{}",
    # Not a dash, and not options of the line break above.
    "--train.steps [3]*": r"-{}-train.steps {[}3{]}{*}",
    "1 ± 2 × 3²": r"1 $\pm$ 2 $\times$ 3$^2$",
    "two\nlines": "two lines",
}


@pytest.mark.parametrize("text", LATEX)
def test_latex_shows_text_literally(text: str) -> None:
    assert to_latex_text(text) == LATEX[text]
    assert to_latex_text(Markup(r"$1.5 \pm 0.1$")) == r"$1.5 \pm 0.1$"


def test_latex_escapes_every_part_of_a_table() -> None:
    rows = [("f&g", Markup("$1$"), "{}"), ("h", 2, 3)]
    table = Table(("model", "accuracy, %", "#"), rows, words=(0, 2))
    text = table.latex("a_b", ["5 %", "x_y"])
    assert r"\label{tab:a-b}" in text and r"\caption{a\_b}" in text
    assert "\\raggedright 5 \\%\\par\nx\\_y}" in text
    assert "\\begin{tabular}{lrl}\n" in text and "\\end{tabular}\n" in text
    assert "model & accuracy, \\% & \\# \\\\\n" in text
    assert "f\\&g & $1$ & \\{\\} \\\\\nh & 2 & 3 \\\\\n" in text


def test_latex_breaks_the_lines_of_long_names() -> None:
    """A table with a path is as wide as the page, and not wider."""
    rows = [("flow (checkpoint=runs/mlm-flow-tiny-seed0)", 1), ("linear", 2)]
    text = Table(("model", "seeds"), rows).latex("a")
    assert r"\begin{tabularx}{\linewidth}{>{\raggedright" in text
    assert "\\end{tabularx}\n" in text
    assert r"checkpoint=\allowbreak runs/\allowbreak mlm-flow-tiny-seed0" in text


def test_latex_splits_what_does_not_fit_on_a_page() -> None:
    """Also where superscripts make the source of a short name long."""
    rows = [(Markup(rf"flow, official\textsuperscript{{{n}}}"), n) for n in range(50)]
    text = Table(("model", "seeds"), rows).latex("a b", ["the note"])
    first, second = text.split("\\end{table}\n")[:2]
    assert text.count(r"\begin{tabular}{lr}") == 2
    assert r"\caption{a b, 1 of 2}" in first and r"& 39 \\" in first
    assert r"\caption{a b, 2 of 2}" in second and r"& 49 \\" in second
    assert r"\label{tab:a-b-2-of-2}" in second
    assert "the note" not in first and "the note" in second
