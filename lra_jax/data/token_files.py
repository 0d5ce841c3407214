"""The layout of MEGA's processed data: files of integers, one sequence a line.

    input/train.src   label/train.label
    input/valid.src   label/valid.label
    input/test.src    label/test.label

Integers are separated by blanks: pixels 0..255, or token ids. A label file has one
integer a line. The second document of a pair stands in ``input/train.src1`` etc.

Written by the code of "Mega: Moving Average Equipped Gated Attention", in
examples/mega/lra/data_process.py of facebookresearch/mega. The binary files that
fairseq makes of texts (``src-bin``) are another format, which is not read.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lra_jax.data.checks import line_count

SPLITS = ("train", "valid", "test")


class SplitFiles(NamedTuple):
    """Files of one split: one or two of sequences, and the labels."""

    sequences: tuple[pathlib.Path, ...]
    labels: pathlib.Path


def find(root: pathlib.Path, suffixes: tuple[str, ...]) -> dict[str, SplitFiles] | None:
    """The files of each split below a folder; None where it has not this layout.

    Args:
      root: holds ``input`` and ``label``.
      suffixes: of the sequences' files, as ``(".src",)``.

    Raises:
      ValueError: some of the files are there, and others are not.
    """
    if not (root / "input").is_dir() or not (root / "label").is_dir():
        return None
    found = {
        split: SplitFiles(
            tuple(root / "input" / f"{split}{suffix}" for suffix in suffixes),
            root / "label" / f"{split}.label",
        )
        for split in SPLITS
    }
    files = [file for s in found.values() for file in (*s.sequences, s.labels)]
    missing = [str(file.relative_to(root)) for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{root} lacks {', '.join(missing)}")
    return found


def count(files: SplitFiles) -> int:
    """Examples of a split.

    Raises:
      ValueError: its files have different numbers of lines, or none.
    """
    counts = {file: line_count(file) for file in (*files.sequences, files.labels)}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        each = ", ".join(f"{file}: {n}" for file, n in counts.items())
        raise ValueError(f"expected as many lines in each file, and some: {each}")
    return counts[files.labels]


def read(
    files: SplitFiles, vocab_size: int, num_classes: int, max_length: int
) -> Iterator[tuple]:
    """Yields the sequences of each example, cut to ``max_length``, and its label.

    Raises:
      ValueError: what is not an integer of the right range, with file and line.
    """
    streams = [_rows(file, vocab_size, max_length) for file in files.sequences]
    labels = _rows(files.labels, num_classes, 2)
    for number, (label, *arrays) in enumerate(zip(labels, *streams, strict=True), 1):
        if len(label) != 1:
            raise ValueError(f"{files.labels}, line {number}: expected one label")
        yield *arrays, int(label[0])


def _rows(file: pathlib.Path, limit: int, max_length: int) -> Iterator[np.ndarray]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                values = np.array(line.split(), np.int64)
            except (ValueError, OverflowError):
                values = np.zeros(0, np.int64)
            if not values.size or values.min() < 0 or values.max() >= limit:
                raise ValueError(
                    f"{file}, line {number}: expected integers of 0..{limit - 1}, got "
                    f"{_short(line)}"
                )
            yield values[:max_length].astype(np.uint8)


def _short(line: bytes) -> str:
    text = repr(line.decode("utf-8", errors="replace").strip())
    return text if len(text) <= 60 else text[:60] + "..."
