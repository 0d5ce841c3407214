"""Texts with labels: the IMDb reviews, or tables of your own.

See `tables` for their files. A folder has train.tsv and test.tsv (or .csv), and may
have valid.tsv; without it a tenth of the training texts is held out. From a single
table, a tenth is for validation and a tenth for the test. An ``.npz`` file has splits
of its own.
"""

import collections
import itertools
import json
from pathlib import Path

import numpy as np

from lra_jax.data import archives, checks, text, token_files
from lra_jax.data.dataset import SPLITS, SequenceDataset, fingerprint
from lra_jax.data.labels import Kind, code_labels, names_of
from lra_jax.data.language import tables
from lra_jax.data.language.tables import Ids, Texts
from lra_jax.data.memory import stream_of
from lra_jax.errors import expected, known
from lra_jax.vocabularies import Bytes, Vocabulary

_SHARE = 0.1
# Bytes of a review that are read for each token that is kept.
_BYTES_PER_TOKEN = 16
# A folder of reviews, or of MEGA's files of integers, has one of these.
_OF_REVIEWS = (text.ARCHIVE.name, "aclImdb", "train", "input")


class LabelledDataset(SequenceDataset):
    """Texts in memory, with the interface of a dataset.

    Args:
      name: name of the texts.
      splits: the texts of each split.
      max_length: a text is truncated to this many tokens.
      vocabulary: vocabulary of the token ids.
      labels: what the labels are.
    """

    def __init__(
        self,
        name: str,
        splits: dict[str, Texts],
        max_length: int,
        vocabulary: Vocabulary,
        labels: Kind = "classes",
    ):
        self.name, splits = name, {split: splits[split] for split in SPLITS}
        code = code_labels(self, labels, splits["train"].labels)
        self._labels = {split: code(texts.labels) for split, texts in splits.items()}
        self.vocab_size, self.max_length = vocabulary.size, max_length
        if isinstance(vocabulary, Ids):
            self.raw = vocabulary.raw
        elif not isinstance(vocabulary, Bytes):
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

        rows = {split: list(map(tokens, x.texts)) for split, x in splits.items()}
        self._hold(rows)
        if self.raw_answers:
            raw = self.raw or {"kind": "bytes", "max_length": max_length}
            self.raw = raw | self.raw_answers
        # Other words may have the same ids.
        words = "" if self.raw is None else json.dumps(self.raw, sort_keys=True)
        parts = [f"{max_length}", "\t".join(self.classes or ()), words]
        for split in SPLITS:
            parts += [*rows[split], self._lengths[split], self._labels[split]]
        self.fingerprint = fingerprint(*parts)


def prepare(
    data_dir: str | None = None,
    *,
    path: str | None = None,
    seed: int = 0,
    max_length: int = 512,
    vocabulary: Vocabulary | None = None,
    labels: Kind = "classes",
) -> SequenceDataset:
    """Reads tables, or else the reviews if the path is not a table.

    Args:
      data_dir: folder of the prepared reviews.
      path, seed, max_length, labels: see `lra_jax.configs.finetune.FinetuneData`.
      vocabulary: vocabulary of the tokens; None = bytes.

    Raises:
      ValueError: a file is missing or malformed, has a text that the vocabulary cannot
        express, or has integers although there is a vocabulary.
    """
    root = None if path is None else checks.existing_path(path)
    if root is not None and root.suffix == ".npz":
        splits, ids, labels = tables.read_ids(root, labels)
        if "valid" not in splits:
            splits |= _held_out(splits["train"], labels, seed, "valid")
        return LabelledDataset(root.name, splits, max_length, ids, labels)
    if vocabulary is None:
        vocabulary = Bytes()
    elif root is not None and root.is_dir() and token_files.find(root, (".src",)):
        needed = "texts, to be read in the vocabulary of --data.checkpoint"
        raise expected("--data.path", needed, f"files of integers in {root}")
    splits = None if root is None else _read_tables(root, labels, seed)
    if root is not None and splits is not None:
        return LabelledDataset(root.name, splits, max_length, vocabulary, labels)
    if labels != "classes":
        needed = f"a table of texts, for --data.labels={labels}"
        raise expected("--data.path", needed, path)
    if isinstance(vocabulary, Bytes):
        return text.prepare(data_dir, path=path, max_length=max_length, seed=seed)
    most = _BYTES_PER_TOKEN * max_length
    reviews = text.prepare(data_dir, path=path, max_length=most, seed=seed)
    reviewed = {split: _texts_of(reviews, split) for split in SPLITS}
    dataset = LabelledDataset(reviews.name, reviewed, max_length, vocabulary)
    dataset.raw = {**(dataset.raw or {}), "strip": True}  # Unlike a table's cells.
    return dataset


def _read_tables(root: Path, labels: Kind, seed: int) -> dict[str, Texts] | None:
    """The splits of a table or of a folder of tables; None for anything else."""
    if root.suffix in tables.SUFFIXES:
        return _held_out(tables.read(root, labels), labels, seed, "valid", "test")
    others = {x.name for end in tables.SUFFIXES for x in root.glob(f"[!.]*{end}")}
    for suffix in tables.SUFFIXES if others else ():
        files = {x: root / f"{x}{suffix}" for x in SPLITS}
        names = {x.name for x in files.values()} & others
        if not {f"train{suffix}", f"test{suffix}"} <= names:
            continue
        if others - names:
            needed = f"train, test and perhaps valid{suffix}, and no other table"
            got = f"{root}, which also has {min(others - names)}"
            raise expected("--data.path", needed, got)
        splits = {x: tables.read(f, labels) for x, f in files.items() if f.exists()}
        taught = sorted(
            {x for label in splits["train"].labels for x in names_of(label, labels)}
        )
        for split, texts in splits.items():
            for line, label in zip(texts.lines, texts.labels, strict=True):
                place = f"--data.path: {files[split]}, line {line}: label"
                for name in names_of(label, labels):
                    known(place, name, taught)
        if "valid" not in splits:
            splits |= _held_out(splits["train"], labels, seed, "valid")
        return splits
    may_be_reviews = any((root / name).exists() for name in _OF_REVIEWS)
    if root.is_file():
        may_be_reviews = (
            archives.may_be_gzip(root) and root.stem[-4:] not in tables.SUFFIXES
        )
    if others or not may_be_reviews:
        needed = (
            "a .tsv or .csv table, a folder with train.tsv and test.tsv (or .csv), an "
            ".npz file, or the IMDb reviews"
        )
        got = f"{root}, with {', '.join(sorted(others)) or 'none'}"
        raise expected("--data.path", needed, root if root.is_file() else got)
    return None


def _texts_of(dataset: SequenceDataset, split: str) -> Texts:
    """The texts of a dataset of bytes, without bytes that are not valid UTF-8.

    A text that was truncated may end within a character.
    """
    labels = dataset.labels(split)
    rows = dataset.source(split).__getitems__(list(range(len(labels))))
    texts = [row["tokens"].tobytes().decode(errors="ignore").encode() for row in rows]
    return Texts(texts, labels.astype(str).tolist(), list(range(len(texts))))


def _held_out(table: Texts, kind: Kind, seed: int, *splits: str) -> dict[str, Texts]:
    """Draws a tenth of the texts for each of the splits; the others are to train on.

    A text that occurs several times in a table is in one of the splits only. No class
    loses its last text of training.
    """
    places: dict[bytes, list[int]] = {}
    for place, one in enumerate(table.texts):
        places.setdefault(one, []).append(place)
    different = list(places.values())
    labels = [
        {name for place in same for name in names_of(table.labels[place], kind)}
        for same in different
    ]
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
        split: table.at([place for number in numbers for place in different[number]])
        for split, numbers in parts.items()
    }
