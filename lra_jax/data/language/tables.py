"""Tables of texts with labels: ``.tsv`` and ``.csv`` files, and arrays of token ids.

The first line of a table names its columns, including ``text`` and ``label``, in any
order. Blanks around a label do not count. In a ``.tsv`` table only LF and CRLF end a
line, a text can hold other breaks, and quotation marks are part of a cell; a ``.csv``
table has them around cells with commas, line ends or (doubled) quotation marks.

An ``.npz`` file is that of a time series (`lra_jax.data.series_files`) whose values are
token ids: integers `[n, T]` from 0.
"""

import collections
import csv
import io
import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lra_jax.data import checks, series_files
from lra_jax.data.labels import SEPARATORS, Kind, parse_number
from lra_jax.errors import expected, reason
from lra_jax.files import read_bytes

SUFFIXES = (".tsv", ".csv")

# A cell as spreadsheets quote it: quotation marks within are doubled.
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')

Row = tuple[int, list[str], str]
"""The number of a row's first line, its cells, and its text in the file."""

_logger = logging.getLogger(__name__)


class Texts(NamedTuple):
    """Texts as bytes, their labels as strings, and the line of each in its file."""

    texts: list[bytes]
    labels: list[str]
    lines: list[int]

    def at(self, indices: Sequence[int]) -> "Texts":
        """Selects some of them."""
        texts = [self.texts[index] for index in indices]
        labels = [self.labels[index] for index in indices]
        return Texts(texts, labels, [self.lines[index] for index in indices])


def read(file: Path, kind: Kind) -> Texts:
    """The texts of a table.

    Raises:
      ValueError: it is not a table, or a label is not of this kind; names the line.
    """
    rows = _rows_of_csv if file.suffix == ".csv" else _rows_of_tsv
    lines = rows(file, _text(file))
    _, columns, line = next(lines, (1, [], ""))
    if any(columns.count(name) != 1 for name in ("text", "label")):
        needed = "a first line with the columns text and label"
        first = checks.shorten(line) if columns else "none"
        raise expected("--data.path", needed, f"{first} in {file}")
    text, label = columns.index("text"), columns.index("label")
    table = Texts([], [], [])
    for number, cells, line in lines:
        fits = len(cells) == len(columns) and cells[text]
        answer = cells[label].strip() if fits else ""
        if not fits or (not answer and kind != "multi"):
            needed = f"{len(columns)} columns with text and label"
            got = f"{checks.shorten(line)} in line {number} of {file}"
            raise expected("--data.path", needed, got)
        if kind == "numbers":
            parse_number(f"--data.path: {file}, line {number}: label", answer)
        table.texts.append(cells[text].encode())
        table.labels.append(answer)
        table.lines.append(number)
    if not table.texts:
        raise expected("--data.path", "texts after the first line", f"none in {file}")
    if kind == "classes":
        _check_single(file, table)
    if file.suffix == ".tsv":
        _warn_of_quotes(file, table)
    return table


def _text(file: Path) -> str:
    needed = "a table of UTF-8 text"
    try:
        content = read_bytes(file)
    except OSError as error:
        raise expected("--data.path", needed, f"{file}: {reason(error)}") from error
    try:
        return content.decode("utf-8-sig")  # Some editors write a mark first.
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = f"{file}, line {line}: {reason(error)}"
        raise expected("--data.path", needed, got) from error


def _rows_of_tsv(_: Path, text: str) -> Iterator[Row]:
    lines = text.replace("\r\n", "\n").removesuffix("\n")
    for number, line in enumerate(lines.split("\n") if lines else [], 1):
        yield number, line.split("\t"), line


def _rows_of_csv(file: Path, text: str) -> Iterator[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    lines, end = list(io.StringIO(text, newline="")), 0
    reader = csv.reader(lines, strict=True)
    try:
        for cells in reader:
            start, end = end, reader.line_num
            if cells:  # Not an empty line.
                yield start + 1, cells, "".join(lines[start:end]).rstrip("\r\n")
    except csv.Error as error:
        place = f"--data.path: {file}, line {end + 1}"
        raise expected(place, "cells of a .csv table", reason(error)) from error


def _check_single(file: Path, table: Texts) -> None:
    """Refuses labels that list several classes, as ``pos,even`` beside ``pos``.

    Each combination would silently be a class of its own. A name with a comma is one
    class if no other label shares a part of it.
    """
    parts = {x: set(map(str.strip, SEPARATORS.split(x))) for x in table.labels}
    uses = collections.Counter(itertools.chain.from_iterable(parts.values()))
    for line, label in zip(table.lines, table.labels, strict=True):
        shared = [part for part in parts[label] if uses[part] > 1]
        if len(parts[label]) > 1 and shared:
            got = f"{label!r}, while another label has {min(shared)!r} too"
            hint = "; --data.labels=multi reads several"
            raise expected(f"--data.path: {file}, line {line}", "one label", got + hint)


def _warn_of_quotes(file: Path, table: Texts) -> None:
    cells = [*table.texts, *(label.encode() for label in table.labels)]
    quoted = sum(_QUOTED.fullmatch(cell) is not None for cell in cells)
    if quoted:
        _logger.warning(
            "%s: %d cells are in quotation marks, which are read as part of them: "
            "write tables without quoting, or as .csv",
            *(file, quoted),
        )


class Ids:
    """A vocabulary whose texts are the bytes of their token ids, as uint32."""

    end = mask = 0

    def __init__(self, size: int):
        self.size, self.raw = size, {"kind": "ids"}

    def encode(self, text: bytes) -> np.ndarray:
        """The ids."""
        return np.frombuffer(text, np.uint32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """The ids as numbers, for display."""
        return " ".join(map(str, tokens.tolist())).encode()


def read_ids(file: Path, kind: Kind) -> tuple[dict[str, Texts], Ids, Kind]:
    """The splits of an ``.npz`` file, their vocabulary, and what their labels are.

    Raises:
      ValueError: an array is missing or wrong; names it.
    """
    splits, size, most = {}, 0, np.iinfo(np.int32).max
    for split, series in series_files.read(file).items():
        ids = np.concatenate(series.values)
        if ids.shape[1] > 1 or ((ids < 0) | (ids >= most) | (ids % 1 != 0)).any():
            needed = "token ids [n, T], integers from 0"
            raise expected(f"{file}: {split}_values", needed, "others")
        size = max(size, int(ids.max()) + 1)
        kind = kind if series.kind == "classes" else series.kind
        labels = list(map(str, series.labels.tolist()))
        for place, label in enumerate(labels) if kind == "numbers" else ():
            parse_number(f"{file}: {split}_labels: example {place}", label)
        texts = [values.astype(np.uint32).tobytes() for values in series.values]
        splits[split] = Texts(texts, labels, list(range(1, len(texts) + 1)))
    return splits, Ids(size), kind
