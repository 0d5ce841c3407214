"""Retrieval: two papers byte by byte (ACL Anthology Network); does one cite the other?

    dataset = prepare(data_dir, path="lra_release")

From the Long-Range Arena's own files ``new_aan_pairs.{train,eval,test}.tsv``: a folder
that holds them, the unpacked release around them (which also holds a copy of itself),
the release ``lra_release.gz`` as it is (given, or downloaded; only these files are
taken from it), or MEGA's layout of integers (``token_files``).

The files are tab separated, without header or quotes: label (0 or 1, written as 0.0 or
1.0), two ids, two texts. Tokens are the bytes of the texts, 0..255, cut after
``max_length`` each; the Long-Range Arena's ids are one more, with 0 for padding.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from lra_jax.data import archives, builder, checks, token_files
from lra_jax.data.dataset import SequenceDataset
from lra_jax.files import locked

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

# Where they lie in the release, which also holds a copy of itself.
_PLACES = (
    "",
    "tsv_data",
    "lra_release/tsv_data",
    "lra_release/lra_release/tsv_data",
)
_COLUMNS = ("label", "id 1", "id 2", "text 1", "text 2")
_LABELS = {b"0": 0, b"0.0": 0, b"1": 1, b"1.0": 1}
_SUFFIXES = (".src", ".src1")
_RELEASED_PAIRS = 182_613
_UNPACKED_BYTES = 10_700_000_000


@dataclasses.dataclass(eq=False, kw_only=True)
class RetrievalConfig(builder.SequenceConfig):
    """Where the pairs come from; None = the release, to be fetched."""

    path: pathlib.Path | None


class AanPairs(builder.SequenceBuilder):
    """Pairs of papers as bytes."""

    name = "lra_retrieval"
    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First version."}
    SEQUENCES = ("tokens_1", "tokens_2")
    VOCAB_SIZE = 256
    NUM_CLASSES = 2
    DESCRIPTION = "Retrieval of the Long-Range Arena: pairs of papers as bytes."

    def examples(self, dl_manager):
        """See the base class."""
        del dl_manager
        config: RetrievalConfig = self.builder_config
        path, length = config.path, config.max_length
        if path is not None and path.is_dir():
            layout = token_files.find(path, _SUFFIXES)
            if layout is not None:
                return {
                    split: (token_files.count(f), token_files.read(f, 256, 2, length))
                    for split, f in layout.items()
                }
        if path is None:
            path = archives.fetch(ARCHIVE, self.root)
        files = _find(path) if path.is_dir() else _unpacked(path, self.root)
        return {
            split: (_count(file), read(file, length)) for split, file in files.items()
        }


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    path: str | os.PathLike | None = None,
    max_length: int = 4000,
) -> SequenceDataset:
    """Opens the task's data, preparing them first where that was not done before.

    Args:
      data_dir: where prepared data, and downloads, live; None is tfds' own folder.
      path: a folder with the tsv files, the unpacked release, ``lra_release.gz``, or a
        folder with ``input`` and ``label``; None downloads the release.
      max_length: bytes of a document that are kept, the first ones.

    Returns:
      Splits `train`, `valid` and `test` of `tokens_1`, `tokens_2` and `label`.

    Raises:
      ValueError: a setting is wrong, a file is missing, damaged or malformed, or there
        is no network.
      OSError: `data_dir` cannot be written, or its disk is full.
    """
    checks.check_integer("max_length", max_length, 1)
    name, found = "released", None
    expected = 2 * max_length * _RELEASED_PAIRS
    if path is not None:
        found = checks.existing(path)
        if not _holding(found):
            found = archives.given(path, ARCHIVE)
        files = _files(found)
        name = checks.digest(files)
        size = sum(file.stat().st_size for file in files)
        expected = min(expected, size + 1) if found.is_dir() else expected
    config = RetrievalConfig(
        name=f"{name}-length{max_length}",
        max_length=max_length,
        expected_bytes=expected,
        path=found,
    )
    return builder.prepare(AanPairs, config, data_dir)


def read(file: pathlib.Path, max_length: int) -> Iterator[tuple]:
    """Yields both texts, `uint8 [length]`, and the label of each line.

    Raises:
      ValueError: a line is malformed; the message names file and line.
    """
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            columns = line.rstrip(b"\r\n").split(b"\t")
            if len(columns) != len(_COLUMNS):
                raise ValueError(
                    f"{file}, line {number}: expected {len(_COLUMNS)} columns "
                    f"({', '.join(_COLUMNS)}), got {len(columns)}"
                )
            label, _, _, *texts = columns
            if label.strip() not in _LABELS:
                shown = label[:40].decode("utf-8", errors="replace")
                raise ValueError(
                    f"{file}, line {number}: expected a label of 0 or 1, got {shown!r}"
                )
            # An empty text would be a sequence of no tokens.
            arrays = (
                np.frombuffer(text[:max_length] or b"\n", np.uint8) for text in texts
            )
            yield *arrays, _LABELS[label.strip()]


def _count(file: pathlib.Path) -> int:
    count = checks.line_count(file)
    if not count:
        raise ValueError(f"{file} is empty")
    return count


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files on which the data depend."""
    if path.is_file():
        return [path]
    layout = token_files.find(path, _SUFFIXES)
    if layout is not None:
        return [file for s in layout.values() for file in (*s.sequences, s.labels)]
    return list(_find(path).values())


def _holding(root: pathlib.Path) -> list[pathlib.Path]:
    """The folders below this one that hold some of the files."""
    folders = [root / place for place in _PLACES]
    return [f for f in folders if any((f / n).is_file() for n in FILES.values())]


def _find(root: pathlib.Path) -> dict[str, pathlib.Path]:
    found = _holding(root)
    if not found:
        raise ValueError(
            f"--data.path={root}: expected {', '.join(FILES.values())} in it or in its "
            f"{', '.join(_PLACES[1:])}, or {ARCHIVE.name} itself, found none of them"
        )
    files = {split: found[0] / name for split, name in FILES.items()}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise ValueError(f"{found[0]} lacks {', '.join(missing)}")
    return files


def _unpacked(path: pathlib.Path, root: pathlib.Path) -> dict[str, pathlib.Path]:
    """The three files of the release, which has room for them beside the downloads."""
    downloads = root / "downloads"
    folder = downloads / f"lra_release-{checks.digest([path])}"
    downloads.mkdir(parents=True, exist_ok=True)
    with locked(downloads / f".{folder.name}.lock"):
        if not folder.is_dir():
            wanted = {f"tsv_data/{name}": name for name in FILES.values()}
            archives.extract(ARCHIVE, path, wanted, folder)
    return {split: folder / name for split, name in FILES.items()}
