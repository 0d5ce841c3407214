"""The official ListOps files: reading, checking and writing them.

`basic_train.tsv`, `basic_val.tsv` and `basic_test.tsv` of `lra_release/listops-1000`:
tab separated, CRLF line ends, a header `Source`, `Target`, then one expression in
nested binary form and its value a line.
"""

import csv
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from lra_jax.data import listops_language
from lra_jax.files import replacing

if TYPE_CHECKING:
    from lra_jax.data.dataset import SequenceDataset

FILES = {
    "train": "basic_train.tsv",
    "valid": "basic_val.tsv",
    "test": "basic_test.tsv",
}

_HEADER = ["Source", "Target"]
# Where the folder lies in the released archive, which also holds a copy of itself.
_PLACES = (
    "",
    "listops-1000",
    "lra_release/listops-1000",
    "lra_release/lra_release/listops-1000",
)


def find(path: str | os.PathLike) -> dict[str, pathlib.Path]:
    """Returns the file of each split, below an unpacked archive or its ListOps folder.

    Raises:
      ValueError: the folder or one of the three files is missing.
    """
    root = pathlib.Path(path).expanduser()
    if not root.is_dir():
        raise ValueError(
            f"path must be a folder with {', '.join(FILES.values())}, got {root}, "
            + ("a file." if root.exists() else "which does not exist.")
        )
    folders = [root / place for place in _PLACES]
    found = [f for f in folders if any((f / n).is_file() for n in FILES.values())]
    if not found:
        raise ValueError(
            f"Expected {', '.join(FILES.values())} in path={root} (or in its "
            f"{', '.join(_PLACES[1:])}), found none of them."
        )
    files = {split: found[0] / name for split, name in FILES.items()}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise ValueError(f"{found[0]} lacks {', '.join(missing)}.")
    return files


def count(file: pathlib.Path) -> int:
    """Returns how many examples a file holds, without parsing them.

    Raises:
      ValueError: there is none.
    """
    with file.open("rb") as lines:
        examples = sum(1 for line in lines if line.strip()) - 1
    if examples < 0:
        raise ValueError(f"{file} is empty; expected a header and examples.")
    if examples == 0:
        raise ValueError(f"{file} holds no examples after its first line.")
    return examples


def read(file: pathlib.Path, max_length: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields each example as its token ids, `uint8 [length]`, and its value.

    Args:
      file: one of the official files.
      max_length: the most tokens that an expression may have.

    Raises:
      ValueError: the file is malformed; the message names file and line.
    """
    with file.open("rb") as lines:
        # Nothing is quoted in these files; a stray quote must not swallow lines.
        text = (line.decode("utf-8") for line in lines)
        reader = csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            for number, row in enumerate(filter(None, reader)):
                if number > 0:
                    yield _parse(row, max_length)
                elif row != _HEADER:
                    raise ValueError(
                        f"expected the header {_HEADER}, got {_short(row)}."
                    )
        except UnicodeDecodeError as error:
            # The reader has not counted this line.
            line = reader.line_num + 1
            raise ValueError(f"{file}, line {line}: not UTF-8: {error}.") from None
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{file}, line {reader.line_num}: {error}") from None


def write(dataset: "SequenceDataset", folder: str | os.PathLike) -> None:
    """Writes a ListOps dataset as the three official files, for other code bases.

    Args:
      dataset: what `listops.prepare` returns.
      folder: created where missing; files in it are replaced.
    """
    folder = pathlib.Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    for split, name in FILES.items():
        with (
            replacing(folder / name) as partial,
            partial.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.writer(file, delimiter="\t")
            writer.writerow(_HEADER)
            for example in dataset.source(split):
                nested = listops_language.to_nested(example["tokens"])
                writer.writerow((nested, int(example["label"])))


def _parse(row: list[str], max_length: int) -> tuple[np.ndarray, int]:
    if len(row) != len(_HEADER):
        raise ValueError(f"expected {len(_HEADER)} columns, got {len(row)}.")
    source, target = row
    if len(target) != 1 or target not in "0123456789":
        raise ValueError(f"expected a target of 0..9, got {_short(target)}.")
    tokens = listops_language.encode(source)
    if not 0 < len(tokens) <= max_length:
        raise ValueError(
            f"expected 1..{max_length} tokens (max_length), got {len(tokens)}."
        )
    value = listops_language.evaluate(tokens)
    if value != int(target):
        raise ValueError(f"the target is {target}, but the expression gives {value}.")
    return tokens, value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
