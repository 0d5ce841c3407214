"""Texts with one label each: the IMDb reviews, or tables of your own.

A table is a ``.tsv`` file whose first line names its columns, including ``text`` and
``label``, in any order. Blanks around a label do not count. Only LF and CRLF end a
line: a text can hold other breaks. A folder has train.tsv and test.tsv, and may have
valid.tsv; without it a tenth of the training texts is held out. From a single file, a
tenth is for validation and a tenth for the test.
"""

import collections
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lra_jax.data import archives, checks, text, token_files
from lra_jax.data.dataset import SPLITS, SequenceDataset
from lra_jax.data.memory import MemorySource, stream_of
from lra_jax.errors import expected, known, reason
from lra_jax.files import read_bytes
from lra_jax.vocabularies import Bytes, Vocabulary

_SHARE = 0.1
# Bytes of a review that are read for each token that is kept.
_BYTES_PER_TOKEN = 16
# A folder of reviews, or of MEGA's files of integers, has one of these.
_OF_REVIEWS = (text.ARCHIVE.name, "aclImdb", "train", "input")
# How a cell lists several labels.
_LIST = re.compile(r"[,;|]")
# As spreadsheets write it: quotation marks within a cell are doubled.
_QUOTED = re.compile(rb'"(?:[^"]|"")*"')

_logger = logging.getLogger(__name__)


class Texts(NamedTuple):
    """Texts as bytes, and their labels as strings."""

    texts: list[bytes]
    labels: list[str]

    def at(self, indices: Sequence[int]) -> "Texts":
        """Selects some of them."""
        texts = [self.texts[index] for index in indices]
        return Texts(texts, [self.labels[index] for index in indices])


class LabelledDataset(SequenceDataset):
    """Texts in memory, with the interface of a dataset.

    Args:
      name: name of the texts.
      splits: the texts of each split.
      max_length: a text is truncated to this many tokens.
      vocabulary: vocabulary of the token ids.
    """

    def __init__(
        self,
        name: str,
        splits: dict[str, Texts],
        max_length: int,
        vocabulary: Vocabulary,
    ):
        self.name, self.splits = name, tuple(splits)
        names = sorted(set(splits["train"].labels))
        if len(names) < 2:
            raise expected("--data.path", "two labels or more", f"{names}")
        numbers = [str(number) for number in range(len(names))]
        self.classes = None if names == numbers else names
        self.vocab_size, self.num_classes = vocabulary.size, len(names)
        self.max_length = max_length
        if not isinstance(vocabulary, Bytes):
            self.raw = {
                "kind": "vocabulary",
                "vocabulary": vocabulary.raw,
                "max_length": max_length,
            }
        self.decode = lambda tokens: vocabulary.decode(tokens).decode(errors="replace")
        self.token_dtype = np.min_scalar_type(vocabulary.size - 1)
        end = np.array([vocabulary.end])

        def tokens(text: bytes) -> np.ndarray:
            encoded = vocabulary.encode(text)[:max_length]
            return (encoded if len(encoded) else end).astype(self.token_dtype)

        self._tokens = {s: list(map(tokens, x.texts)) for s, x in splits.items()}
        self._lengths = {
            split: np.array([len(tokens) for tokens in rows], np.int32)
            for split, rows in self._tokens.items()
        }
        ids = {name: index for index, name in enumerate(names)}
        self._labels = {
            split: np.array([ids[label] for label in texts.labels], np.int32)
            for split, texts in splits.items()
        }
        digest = hashlib.blake2b(f"{max_length}".encode(), digest_size=16)
        if self.classes is not None:
            digest.update("\t".join(names).encode())
        if self.raw is not None:  # Other words may have the same ids.
            digest.update(json.dumps(self.raw, sort_keys=True).encode())
        for split, rows in self._tokens.items():
            for array in (*rows, self._lengths[split], self._labels[split]):
                digest.update(array.tobytes())
        self.fingerprint = digest.hexdigest()

    def source(self, split: str) -> MemorySource:
        """See the base class."""
        split = self._checked(split)
        return MemorySource(self._tokens[split], self._lengths[split])


def prepare(
    data_dir: str | None = None,
    *,
    path: str | None = None,
    seed: int = 0,
    max_length: int = 512,
    vocabulary: Vocabulary | None = None,
) -> SequenceDataset:
    """Reads tables, or else the reviews if the path is not a table.

    Args:
      data_dir: folder of the prepared reviews.
      path: a table, a folder of them, or a path for `lra_jax.data.text.prepare`.
      seed: seed for choosing the examples held out.
      max_length: a text is truncated to this many tokens.
      vocabulary: vocabulary of the tokens; None = bytes.

    Raises:
      ValueError: a file is missing or malformed, has a text that the vocabulary cannot
        express, or has integers although there is a vocabulary.
    """
    root = None if path is None else checks.existing(path)
    _check_kind(root)
    if vocabulary is None:
        vocabulary = Bytes()
    elif root is not None and root.is_dir() and token_files.find(root, (".src",)):
        needed = "texts, to be read in the vocabulary of --data.checkpoint"
        raise expected("--data.path", needed, f"files of integers in {root}")
    if root is not None and root.suffix == ".tsv":
        splits = _held_out(_read(root), seed, "valid", "test")
        return LabelledDataset(root.name, splits, max_length, vocabulary)
    if root is not None and (root / "train.tsv").exists():
        splits = {
            split: _read(root / f"{split}.tsv")
            for split in SPLITS
            if split != "valid" or (root / "valid.tsv").exists()
        }
        _check_labels(root, splits)
        if "valid" not in splits:
            held_out = _held_out(splits["train"], seed, "valid")
            splits = {**held_out, "test": splits["test"]}
        return LabelledDataset(root.name, splits, max_length, vocabulary)
    if isinstance(vocabulary, Bytes):
        return text.prepare(data_dir, path=path, max_length=max_length, seed=seed)
    most = _BYTES_PER_TOKEN * max_length
    reviews = text.prepare(data_dir, path=path, max_length=most, seed=seed)
    splits = {split: _texts_of(reviews, split) for split in SPLITS}
    dataset = LabelledDataset(reviews.name, splits, max_length, vocabulary)
    dataset.raw = {**(dataset.raw or {}), "strip": True}  # Unlike a table's cells.
    return dataset


def _check_labels(root: Path, splits: dict[str, Texts]) -> None:
    """Refuses a label that is not among those of the training texts."""
    taught = sorted(set(splits["train"].labels))
    for split, texts in splits.items():
        for line, label in enumerate(texts.labels, 2):
            place = f"--data.path: {root / split}.tsv, line {line}: label"
            known(place, label, taught)


def _check_single(file: Path, labels: Sequence[str]) -> None:
    """Refuses labels that list several classes, as ``pos,even`` beside ``pos``.

    Each combination would silently be a class of its own. A name with a comma is one
    class if no other label shares a part of it.
    """
    parts = {label: set(map(str.strip, _LIST.split(label))) for label in labels}
    uses = collections.Counter(itertools.chain.from_iterable(parts.values()))
    for line, label in enumerate(labels, 2):
        shared = [part for part in parts[label] if uses[part] > 1]
        if len(parts[label]) > 1 and shared:
            got = f"{label!r}, while another label has {min(shared)!r} too"
            raise expected(f"--data.path: {file}, line {line}", "one label", got)


def _check_kind(root: Path | None) -> None:
    """Refuses what is neither a table nor can be the reviews."""
    if root is None:
        return
    needed = "a .tsv table, a folder with train.tsv and test.tsv, or the IMDb reviews"
    if root.name.endswith(".tsv.gz"):
        raise expected(
            "--data.path", needed.replace("a .tsv", "an uncompressed .tsv"), root
        )
    if root.is_file() and root.suffix != ".tsv" and not archives.may_be_gzip(root):
        raise expected("--data.path", needed, root)
    tables = sorted(file.name for file in root.glob("[!.]*.tsv"))
    names = [f"{split}.tsv" for split in SPLITS if f"{split}.tsv" in tables]
    of_reviews = any((root / name).exists() for name in _OF_REVIEWS)
    whole = {"train.tsv", "test.tsv"} <= set(names)
    if root.is_dir() and not whole and (names or not of_reviews):
        only = f"whose only tables are {', '.join(tables)}" if tables else "without any"
        raise expected("--data.path", needed, f"{root}, {only}")
    others = [table for table in tables if table not in names]
    if names and others:
        only = "train.tsv, test.tsv and perhaps valid.tsv, and no other table"
        raise expected("--data.path", only, f"{root}, which also has {others[0]}")


def _texts_of(dataset: SequenceDataset, split: str) -> Texts:
    """The texts of a dataset of bytes, without bytes that are not valid UTF-8.

    A text that was truncated may end within a character.
    """
    labels = dataset.labels(split)
    rows = dataset.source(split).__getitems__(list(range(len(labels))))
    texts = [row["tokens"].tobytes().decode(errors="ignore").encode() for row in rows]
    return Texts(texts, labels.astype(str).tolist())


def _held_out(whole: Texts, seed: int, *splits: str) -> dict[str, Texts]:
    """Draws a tenth of the texts for each of the splits; the others are to train on.

    A text that occurs several times in a table is in one of the splits only. No label
    loses its last text of training.

    Raises:
      ValueError: there are too few texts for that.
    """
    places: dict[bytes, list[int]] = {}
    for place, one in enumerate(whole.texts):
        places.setdefault(one, []).append(place)
    different = list(places.values())
    labels = [{whole.labels[place] for place in same} for same in different]
    left = collections.Counter(itertools.chain.from_iterable(labels))
    order = stream_of(seed, "holdout").permutation(len(different)).tolist()
    most = len(splits) * max(1, round(_SHARE * len(order)))
    drawn: list[int] = []
    for number in order:
        if len(drawn) < most and all(left[label] > 1 for label in labels[number]):
            left.subtract(labels[number])
            drawn.append(number)
    size = len(drawn) // len(splits)
    if not size:
        needed = f"enough texts of each label to hold {len(splits)} or more out"
        got = f"different texts: {len(different)}, labels: {len(left)}"
        raise expected("--data.path", needed, got)
    parts = {
        split: drawn[number * size : (number + 1) * size]
        for number, split in enumerate(splits)
    }
    taken = set(itertools.chain.from_iterable(parts.values()))
    parts = {"train": [number for number in order if number not in taken], **parts}
    return {
        split: whole.at([place for number in numbers for place in different[number]])
        for split, numbers in parts.items()
    }


def _read(file: Path) -> Texts:
    needed = "a table of UTF-8 text"
    try:
        content = read_bytes(file)
    except OSError as error:
        raise expected("--data.path", needed, f"{file}: {reason(error)}") from error
    try:
        # Some editors write a mark first. Reading as text would end lines at every CR.
        whole = content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        got = f"{file}, line {line}: {reason(error)}"
        raise expected("--data.path", needed, got) from error
    lines = whole.removesuffix("\n").split("\n") if whole else []
    columns = lines[0].split("\t") if lines else []
    if any(columns.count(name) != 1 for name in ("text", "label")):
        needed = "a first line with the columns text and label"
        got = f"{checks.shortened(lines[0]) if lines else 'none'} in {file}"
        raise expected("--data.path", needed, got)
    place = {name: columns.index(name) for name in ("text", "label")}
    table = Texts([], [])
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) == len(columns):
            cells[place["label"]] = cells[place["label"]].strip()
        if len(cells) != len(columns) or not all(cells[i] for i in place.values()):
            needed = f"{len(columns)} columns with text and label"
            got = f"{checks.shortened(line)} in line {number} of {file}"
            raise expected("--data.path", needed, got)
        table.texts.append(cells[place["text"]].encode())
        table.labels.append(cells[place["label"]])
    if not table.texts:
        raise expected("--data.path", "texts after the first line", f"none in {file}")
    _check_single(file, table.labels)
    cells = [*table.texts, *(label.encode() for label in table.labels)]
    quoted = sum(_QUOTED.fullmatch(cell) is not None for cell in cells)
    if quoted:
        _logger.warning(
            "%s: %d cells are in quotation marks, which are read as part of them: "
            "write tables without quoting",
            *(file, quoted),
        )
    return table
