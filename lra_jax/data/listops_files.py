"""The official ListOps files: reading, checking and writing them.

`basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv` of `lra_release/listops-1000`:
tab separated, CRLF line ends, a header `Source`, `Target`, then on each line one
expression in nested binary form and its value.
"""

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from lra_jax.data import checks, listops_language, originals
from lra_jax.data.dataset import SequenceDataset
from lra_jax.errors import expected, within
from lra_jax.files import expand_home, read_lines, replacing

FILES = {
    "train": "basic_train.tsv",
    "valid": "basic_val.tsv",
    "test": "basic_test.tsv",
}

_HEADER = ["Source", "Target"]


def find(path: str | os.PathLike) -> dict[str, pathlib.Path]:
    """Returns the file of each split, below an unpacked archive or its ListOps folder.

    Raises:
      ValueError: the folder or one of the three files is missing.
    """
    return originals.split_files(checks.existing_path(path), "listops-1000", FILES)


def count(file: pathlib.Path) -> int:
    """Returns the number of examples in a file, without parsing them.

    Raises:
      ValueError: there are none.
    """
    examples = sum(1 for line in read_lines(file) if line.strip()) - 1
    if examples < 0:
        raise expected(str(file), "a header and examples", "an empty file")
    if examples == 0:
        raise expected(str(file), "examples after the header", "none")
    return examples


def read(file: pathlib.Path, max_length: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields each example as its token ids, `uint8 [length]`, and its value.

    Args:
      file: one of the official files.
      max_length: maximum number of tokens in an expression.

    Raises:
      ValueError: the file is malformed; the message names file and line.
    """
    for number, line in enumerate(read_lines(file), 1):
        place = f"{file}, line {number}"
        try:
            row = line.decode("utf-8").rstrip("\r\n").split("\t")
        except UnicodeDecodeError as error:
            raise expected(place, "UTF-8", error) from None
        try:
            if number == 1 and row != _HEADER:
                raise expected("header", _HEADER, checks.shorten(row))
            if number > 1 and row != [""]:
                yield _parse(row, max_length)
        except ValueError as error:
            raise within(place, error) from None


def write(dataset: SequenceDataset, folder: str | os.PathLike) -> None:
    """Writes the three official files, for other code bases.

    Args:
      dataset: one of `listops.prepare`.
      folder: created if missing; files of these names in it are replaced.
    """
    place = expand_home(folder, "folder")
    place.mkdir(parents=True, exist_ok=True)
    for split, name in FILES.items():
        with replacing(place / name) as partial, partial.open("wb") as file:
            file.write("\t".join(_HEADER).encode() + b"\r\n")
            for row in dataset.source(split):
                source = listops_language.to_nested(row["tokens"])
                file.write(f"{source}\t{row['label']}\r\n".encode())


def _parse(row: list[str], max_length: int) -> tuple[np.ndarray, int]:
    if len(row) != len(_HEADER):
        raise expected("line", f"{len(_HEADER)} columns", len(row))
    source, target = row
    if len(target) != 1 or target not in "0123456789":
        raise expected("Target", "a digit", checks.shorten(target))
    tokens = listops_language.encode(source)
    if not 0 < len(tokens) <= max_length:
        raise expected("Source", f"1..{max_length} tokens (max_length)", len(tokens))
    value = listops_language.evaluate(tokens)
    if value != int(target):
        raise expected("Target", f"{value}, which the expression gives", target)
    return tokens, value
