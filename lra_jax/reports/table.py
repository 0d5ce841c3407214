"""One way to make a table: text cells, written in any format."""

import csv
import html
import io
import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

# Characters that are special in Markdown; `<`, `>` and `&` are already entities at this
# point.
_MARKS = re.compile(r"[\\`*|~]|(?<=\])[(\[:]|_(?![^\W_])|(?<![^\W_])_|^[#+-](?=\s)")
# Characters that are special in LaTeX, that its first font lacks, or that would be an
# option of the line break above them.
_LATEX_MARKS = str.maketrans(
    {mark: f"\\{mark}" for mark in "&%$#_{}"}
    | {mark: f"{{{mark}}}" for mark in "[]*"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedblright{}",
        "`": r"\textasciigrave{}",
        "±": r"$\pm$",
        "²": "$^2$",
        "×": r"$\times$",
    }
)
_LIGATURES = re.compile("-(?=-)")
_LONG = 30  # A column with more characters breaks lines, also inside names and paths.
_COMMANDS = re.compile(r"\\[a-z]+|[\\{}$]")  # Not characters that are seen.
_MOST_LINES = 40  # On a page.
_BREAKS = re.compile(r"(?<=[/=])(?=\w)")
_BREAKING = r">{\raggedright\arraybackslash\hangindent1em}X"
# A spreadsheet takes these for the start of a formula.
_OF_FORMULAS = ("=", "+", "-", "@")


class Table(NamedTuple):
    """A table for every format; text is escaped, and `Markup` is left as it is.

    Attributes:
      head: a cell for each column.
      rows: cells of any type.
      words: columns that are left-aligned; the others are right-aligned.
      ours: the first so many rows are highlighted as our own.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    words: Collection[int] = (0,)
    ours: int = 0

    def markdown(self) -> Markup:
        """Markdown whose columns also line up in a terminal."""
        rows = [[to_markdown(cell) for cell in row] for row in (self.head, *self.rows)]
        columns = []
        for index, cells in enumerate(zip(*rows, strict=True)):
            width = max(3, *map(len, cells))
            is_text = index in self.words
            rule = "-" * width if is_text else "-" * (width - 1) + ":"
            pad = str.ljust if is_text else str.rjust
            columns.append([rule, *(pad(str(cell), width) for cell in cells)])
        rule, head, *lines = (
            f"| {' | '.join(row)} |" for row in zip(*columns, strict=True)
        )
        return Markup("\n".join([head, rule, *lines]))

    def latex(self, caption: str, note: Sequence[str] = ()) -> str:
        """LaTeX to paste, labelled after its caption, with the paragraphs of a note
        below it. It needs the packages booktabs and tabularx.

        Columns with long words share the width of the page, and their lines break. Rows
        that would not fit on a page are in a table of their own.
        """
        head, *rows = [list(map(to_latex_text, row)) for row in (self.head, *self.rows)]
        kinds = ["l" if index in self.words else "r" for index in range(len(head))]
        lines = 1  # Of the highest row, in a column of about 20 characters.
        for index in self.words:
            longest = max(len(_COMMANDS.sub("", row[index])) for row in rows)
            if longest > _LONG:
                kinds[index], lines = _BREAKING, max(lines, 1 + longest // 20)
                for row in rows:
                    row[index] = Markup(_BREAKS.sub(r"\\allowbreak ", row[index]))
        most = max(_MOST_LINES // lines, 1)
        if len(rows) > most:
            starts = range(0, len(rows), most)
            parts = [self._replace(rows=self.rows[n : n + most]) for n in starts]
            return "\n".join(
                part.latex(
                    f"{caption}, {n} of {len(parts)}", note if n == len(parts) else ()
                )
                for n, part in enumerate(parts, start=1)
            )
        is_wide = _BREAKING in kinds
        name = r"tabularx}{\linewidth" if is_wide else "tabular"
        end = "tabularx" if is_wide else "tabular"
        label = re.sub("[^a-z0-9]+", "-", caption.lower())
        head, *rows = (rf"{' & '.join(row)} \\" for row in (head, *rows))
        paragraphs = "\\par\n".join(map(to_latex_text, note))
        box = rf"\parbox{{\linewidth}}{{\footnotesize\raggedright {paragraphs}}}"
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{to_latex_text(caption)}}}",
                rf"\label{{tab:{label}}}",
                r"\smallskip",
                *([r"\footnotesize"] if is_wide else []),
                rf"\begin{{{name}}}{{{''.join(kinds)}}}",
                r"\toprule",
                head,
                r"\midrule",
                *rows,
                r"\bottomrule",
                rf"\end{{{end}}}",
                *([r"\par\smallskip", box] if note else []),
                "\\end{table}\n",
            ]
        )

    def csv(self) -> str:
        """CSV with a header; an empty cell is None.

        Spreadsheets would compute text that begins like a formula, so it gets a quote.
        """
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.head)
        for row in self.rows:
            writer.writerow([_without_formula(cell) for cell in row])
        return text.getvalue()


def to_markdown(value: Any) -> Markup:
    """Text as Markdown that displays it literally, on one line; `Markup` as it is."""
    if isinstance(value, Markup):
        return value
    words = " ".join(str(value).split())
    return Markup(_MARKS.sub(r"\\\g<0>", html.escape(words, quote=False)))


def number(value: float | None, spec: str) -> str:
    """A formatted number; "-" for None and NaN."""
    return "-" if value is None or math.isnan(value) else format(value, spec)


def to_latex_text(cell: Any) -> Markup:
    """Text as LaTeX that shows it literally; `Markup` as it is."""
    if isinstance(cell, Markup):
        return cell
    words = " ".join(str(cell).split()).translate(_LATEX_MARKS)
    return Markup(_LIGATURES.sub("-{}", words))


def _without_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell[:1] in _OF_FORMULAS else cell
