"""The layout of MEGA's processed data: files of integers, one sequence per line.

    input/train.src   label/train.label
    input/valid.src   label/valid.label
    input/test.src    label/test.label

Integers are separated by blanks: pixels 0..255, or token ids. A label file has one
integer per line. The second document of a pair is in ``input/train.src1`` etc.

Images are written like this by the code of "Mega: Moving Average Equipped Gated
Attention", in examples/mega/lra/data_process.py of facebookresearch/mega. Texts in the
same form are our extension: there, they are the binary files that fairseq makes
(``src-bin``), a different format, which is not supported.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lra_jax.data import checks
from lra_jax.data.dataset import SPLITS
from lra_jax.errors import expected
from lra_jax.files import read_lines


class SplitFiles(NamedTuple):
    """Files of one split: one or two of sequences, and one of labels."""

    sequences: tuple[pathlib.Path, ...]
    labels: pathlib.Path


def find(root: pathlib.Path, suffixes: tuple[str, ...]) -> dict[str, SplitFiles] | None:
    """The files of each split below a folder; None if it does not have this layout.

    Args:
      root: contains ``input`` and ``label``.
      suffixes: suffixes of the sequences' files, such as ``(".src",)``.

    Raises:
      ValueError: some of the files exist, and others do not.
    """
    if not (root / "input").is_dir() or not (root / "label").is_dir():
        return None
    layout = {
        split: SplitFiles(
            tuple(root / "input" / f"{split}{suffix}" for suffix in suffixes),
            root / "label" / f"{split}.label",
        )
        for split in SPLITS
    }
    missing = [file for file in list_files(layout) if not file.is_file()]
    if missing:
        names = ", ".join(str(file.relative_to(root)) for file in missing)
        needed = "a file of sequences and one of labels for each split"
        raise expected(str(root), needed, f"no {names}")
    return layout


def list_files(layout: Mapping[str, SplitFiles]) -> list[pathlib.Path]:
    """All files of a layout."""
    return [file for s in layout.values() for file in (*s.sequences, s.labels)]


def examples(
    layout: Mapping[str, SplitFiles],
    vocab_size: int,
    num_classes: int,
    max_length: int,
    exact: bool = False,
) -> dict[str, tuple[int, Iterator[tuple]]]:
    """For each split its size, and its examples: sequences, and the label.

    They are truncated to ``max_length``; if ``exact``, they must have that length.

    Raises:
      ValueError: files of a split differ in their number of lines, or have none; while
        reading, if a value is not an integer in range, or a sequence has another
        length, with file and line.
    """

    def read(files: SplitFiles) -> Iterator[tuple]:
        return _read(files, vocab_size, num_classes, max_length, exact)

    return {split: (_count(files), read(files)) for split, files in layout.items()}


def _count(files: SplitFiles) -> int:
    every = (*files.sequences, files.labels)
    counts = {file: checks.line_count(file) for file in every}
    if len(set(counts.values())) != 1:
        each = ", ".join(f"{file.name}: {n}" for file, n in counts.items())
        needed = "files with the same number of lines"
        raise expected(str(files.labels.parents[1]), needed, each)
    return counts[files.labels]


def _read(
    files: SplitFiles, vocab_size: int, num_classes: int, max_length: int, exact: bool
) -> Iterator[tuple]:
    streams = [_rows(file, vocab_size, max_length, exact) for file in files.sequences]
    labels = _rows(files.labels, num_classes, 2)
    for number, (label, *arrays) in enumerate(zip(labels, *streams, strict=True), 1):
        if len(label) != 1:
            place = f"{files.labels}, line {number}"
            raise expected(place, "one label", len(label))
        yield *arrays, int(label[0])


def _rows(
    file: pathlib.Path, limit: int, max_length: int, exact: bool = False
) -> Iterator[np.ndarray]:
    for number, line in enumerate(read_lines(file), 1):
        place = f"{file}, line {number}"
        try:
            values = np.array(line.split(), np.int64)
        except (ValueError, OverflowError):
            values = np.zeros(0, np.int64)
        if not values.size or values.min() < 0 or values.max() >= limit:
            got = checks.shorten(line.decode("utf-8", errors="replace").strip())
            raise expected(place, f"integers of 0..{limit - 1}", got)
        if exact and values.size != max_length:
            raise expected(place, f"{max_length} integers", values.size)
        yield values[:max_length].astype(np.uint8)
