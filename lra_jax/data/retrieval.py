"""Retrieval: two papers byte by byte (ACL Anthology Network); does one cite the other?

    dataset = prepare(data_dir, path="lra_release")

From the Long-Range Arena's own files ``new_aan_pairs.{train,eval,test}.tsv``: a folder
that holds them, the unpacked release around them (the inner one, if there are two),
the original release ``lra_release.gz`` (given, or downloaded; only these files are
extracted), or MEGA's layout of integers (``token_files``).

The files are tab separated, without header or quotes: label (0 or 1, written as 0.0 or
1.0), two ids, two texts. Tokens are the bytes of the texts, 0..255, each truncated to
``max_length``; the Long-Range Arena's ids are one higher, with 0 for padding.
"""

import os
import pathlib
from collections.abc import Iterator

import numpy as np

from lra_jax.data import archives, builder, checks, originals, token_files
from lra_jax.data.dataset import SequenceDataset
from lra_jax.errors import expected
from lra_jax.files import lock, read_lines

ARCHIVE = archives.Archive(
    name="lra_release.gz",
    url="https://storage.googleapis.com/long-range-arena/lra_release.gz",
    size=7_700_000_000,
)
FILES = {
    "train": "new_aan_pairs.train.tsv",
    "valid": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}

_COLUMNS = ("label", "id 1", "id 2", "text 1", "text 2")
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
_RELEASED_PAIRS = 182_613


class AanPairs(builder.SequenceBuilder):
    """Retrieval of the Long-Range Arena: pairs of papers as bytes."""

    name = "lra_retrieval"
    SEQUENCES = ("tokens_1", "tokens_2")
    VOCAB_SIZE = 256
    NUM_CLASSES = 2


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    path: str | os.PathLike | None = None,
    max_length: int = 4000,
) -> SequenceDataset:
    """Opens the task's data, preparing them first if necessary.

    Args:
      data_dir, path: see `originals.locate`; the path may also be the unpacked release.
      max_length: documents are truncated to this many bytes.

    Returns:
      Splits of `tokens_1`, `tokens_2` and `label`; for errors, see `originals.locate`
      and `builder.prepare`.
    """
    source = originals.locate(ARCHIVE, path, _files, (".src", ".src1"))
    expected_bytes = 2 * max_length * _RELEASED_PAIRS
    if source.size is not None:
        expected_bytes = min(expected_bytes, source.size + 1)

    def examples(root: pathlib.Path) -> builder.Splits:
        if source.layout is not None:
            return token_files.examples(source.layout, 256, 2, max_length)
        opened = source.open(root)
        files = _find(opened) if opened.is_dir() else _unpack(opened, root)
        return {
            split: (checks.line_count(file), _read(file, max_length))
            for split, file in files.items()
        }

    config = builder.SequenceConfig(
        name=f"{source.name}-length{max_length}",
        max_length=max_length,
        expected_bytes=expected_bytes,
        examples=examples,
    )
    return builder.prepare(AanPairs, config, data_dir)


def _read(file: pathlib.Path, max_length: int) -> Iterator[tuple]:
    """Yields both texts, ``uint8 [length]``, and the label of each line."""
    for number, line in enumerate(read_lines(file), 1):
        columns, place = line.rstrip(b"\r\n").split(b"\t"), f"{file}, line {number}"
        if len(columns) != len(_COLUMNS):
            needed = f"{len(_COLUMNS)} columns ({', '.join(_COLUMNS)})"
            raise expected(place, needed, len(columns))
        label, _, _, *texts = columns
        if label.strip() not in _LABELS:
            shown = label.decode("utf-8", errors="replace")
            raise expected(place, "a label of 0 or 1", checks.shorten(shown))
        # An empty text would be a sequence without tokens.
        arrays = (np.frombuffer(text[:max_length] or b"\n", np.uint8) for text in texts)
        yield *arrays, _LABELS[label.strip()]


def _files(root: pathlib.Path) -> list[pathlib.Path]:
    """The files in a folder on which the data depend."""
    return list(_find(root).values())


def _find(root: pathlib.Path) -> dict[str, pathlib.Path]:
    return originals.split_files(root, "tsv_data", FILES)


def _unpack(path: pathlib.Path, root: pathlib.Path) -> dict[str, pathlib.Path]:
    """The three files of the release, extracted next to the downloads."""
    downloads = root / "downloads"
    folder = downloads / f"lra_release-{checks.digest([path])}"
    downloads.mkdir(parents=True, exist_ok=True)
    with lock(downloads / f".{folder.name}.lock"):
        if not folder.is_dir():
            members = {f"tsv_data/{name}": name for name in FILES.values()}
            archives.extract(ARCHIVE, path, members, folder)
    return {split: folder / name for split, name in FILES.items()}
