"""Text: film reviews (IMDb) byte by byte, positive or negative.

    dataset = prepare(data_dir)
    dataset = prepare(data_dir, path="aclImdb_v1.tar.gz", max_length=1000)

From the original archive (given, or downloaded), its folder ``aclImdb``, or MEGA's
files of integers (``token_files``). Tokens are the bytes of a review, 0..255, without
white space around it, as in TensorFlow's dataset, which the Long-Range Arena reads;
truncated to ``max_length``. Its ids are one higher, with 0 for padding. Label 0 is neg,
1 is pos.

The archive has 25,000 reviews for training, 25,000 for testing, and none for
validation; the Long-Range Arena validates on the test split. ``validation="holdout"``
instead uses a tenth of each class of the training reviews, chosen by ``seed``; all
copies of a review are in the same part. Other folders in this layout may also have
``valid/pos`` and ``valid/neg``.
"""

import collections
import hashlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import tensorflow_datasets as tfds

from lra_jax.data import archives, builder, originals, token_files
from lra_jax.data.dataset import SPLITS, SequenceDataset
from lra_jax.errors import expected, known
from lra_jax.files import open_regular

ARCHIVE = archives.Archive(
    name="aclImdb_v1.tar.gz",
    url="https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
    size=84_125_825,
    sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
)
LABELS = {"neg": 0, "pos": 1}

_FOLDER = "aclImdb"
_REVIEW = re.compile(r"(train|valid|test)/([^/]+)/([^/.][^/]*)")
# Reviews without a label, in the training folder.
_UNLABELLED = "unsup"
_MEAN_BYTES = 1300
# Read beyond the bytes that are kept, because white space around a review is not.
_MOST_BLANKS = 1 << 16


class Review(NamedTuple):
    """Attributes: the file's name; the text that is kept; a hash of all that was read,
    since the beginnings of different reviews may be equal."""

    name: str
    text: bytes
    digest: bytes


# By split and class.
Reviews = dict[tuple[str, str], list[Review]]


class ImdbBytes(builder.SequenceBuilder):
    """Text of the Long-Range Arena: IMDb reviews as bytes."""

    name = "lra_text"
    VERSION = tfds.core.Version("1.2.0")
    VOCAB_SIZE = 256
    NUM_CLASSES = 2


def prepare(
    data_dir: str | os.PathLike | None = None,
    *,
    path: str | os.PathLike | None = None,
    max_length: int = 4000,
    validation: Literal["holdout", "test"] = "holdout",
    seed: int = 0,
) -> SequenceDataset:
    """Opens the task's data, preparing them first if necessary.

    Args:
      data_dir, path: see `originals.locate`; the path may also be the folder in it.
      max_length, validation, seed: see `lra_jax.configs.text.TextData`.

    Returns:
      Splits of `tokens` and `label`; for errors, see `originals.locate` and
      `builder.prepare`.
    """
    known("validation", validation, ("holdout", "test"))
    source = originals.locate(ARCHIVE, path, _files)

    def examples(root: pathlib.Path) -> builder.Splits:
        if source.layout is not None:
            chosen = "test" if validation == "test" else "valid"
            layout = {**source.layout, "valid": source.layout[chosen]}
            return token_files.examples(layout, 256, 2, max_length)
        reviews = _read(source.open(root), max_length)
        return _split(reviews, seed if validation == "holdout" else None)

    held_out = f"holdout-seed{seed}" if validation == "holdout" else "test"
    config = builder.SequenceConfig(
        name=f"{source.name}-length{max_length}-{held_out}",
        max_length=max_length,
        expected_bytes=75_000 * min(_MEAN_BYTES, max_length) if path is None else 1,
        examples=examples,
    )
    dataset = builder.prepare(ImdbBytes, config, data_dir)
    if source.layout is None:
        dataset.raw = {"kind": "bytes", "max_length": max_length, "strip": True}
    return dataset


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files in a folder on which the data depend."""
    folder = originals.inside(path, _FOLDER)
    files = [
        file
        for split in SPLITS
        for label in LABELS
        for file in (folder / split / label).glob("[!.]*.txt")
    ]
    if not files:
        got = f"{path} without train/pos/*.txt"
        raise originals.unknown(ARCHIVE, _FOLDER, got)
    return files


def _read(path: pathlib.Path, max_length: int) -> Reviews:
    """The truncated reviews of an archive, or of its folder."""
    reviews: Reviews = {}
    if path.is_dir():
        folder = originals.inside(path, _FOLDER)
        for file in filter(pathlib.Path.is_file, folder.glob("*/*/*")):
            name = file.relative_to(folder).as_posix()
            with open_regular(file) as content:
                _keep(reviews, folder, name, content.read, max_length)
    else:
        with archives.open_members(ARCHIVE, path) as contents:
            for member, content in contents:
                if member.startswith(f"{_FOLDER}/"):
                    name = member.removeprefix(f"{_FOLDER}/")
                    _keep(reviews, path, name, content.read, max_length)
    has_valid = any(split == "valid" for split, _ in reviews)
    for split in SPLITS if has_valid else ("train", "test"):
        for label in LABELS:
            if (split, label) not in reviews:
                raise expected(str(path), f"reviews in {split}/{label}", "none")
            # The same order for every archive and file system.
            reviews[split, label].sort()
    return reviews


def _keep(
    reviews: Reviews,
    place: pathlib.Path,
    name: str,
    read: Callable[[int], bytes],
    max_length: int,
) -> None:
    """Records a review if the name is one."""
    match = _REVIEW.fullmatch(name)
    if match is None:
        return
    split, label, file = match.groups()
    if label in LABELS:
        if not file.endswith(".txt"):
            raise expected(f"{place}: {name}", "a review, NAME.txt", "another file")
        content = read(max_length + _MOST_BLANKS).strip()
        # An empty review would be a sequence without tokens.
        text, digest = content[:max_length] or b"\n", hashlib.blake2b(content).digest()
        reviews.setdefault((split, label), []).append(Review(file, text, digest))
    elif label != _UNLABELLED:
        needed = f"a label of {', '.join(LABELS)}"
        raise expected(f"{place}: {name}", needed, f"{label!r}")


def _split(reviews: Reviews, seed: int | None) -> builder.Splits:
    """Validates on reviews of its own, if there are any, or holds out a tenth of each
    class, chosen by the seed; None: validates on test."""
    parts: dict[str, list[tuple[bytes, int]]] = {split: [] for split in SPLITS}
    for split, label in itertools.product(SPLITS, LABELS):
        some = reviews.get((split, label), [])
        parts[split] += [(review.text, LABELS[label]) for review in some]
    if seed is not None and not parts["valid"]:
        parts |= _held_out(reviews, seed)
    if seed is None:
        parts["valid"] = parts["test"]
    return {split: (len(part), _tokens(part)) for split, part in parts.items()}


def _held_out(reviews: Reviews, seed: int) -> dict[str, list[tuple[bytes, int]]]:
    """The training reviews in two parts, the second a tenth of each class. Copies of a
    review, if they have the same label, are in the same part."""
    parts: dict[str, list[tuple[bytes, int]]] = {"train": [], "valid": []}
    rng = np.random.Generator(np.random.Philox(seed))
    for label, number in LABELS.items():
        train = reviews["train", label]
        copies = list(collections.Counter(review.digest for review in train).items())
        left, held_out = len(train) // 10, set()
        for index in rng.permutation(len(copies)).tolist():
            digest, count = copies[index]
            if count <= left:
                held_out.add(digest)
                left -= count
        if not held_out:
            needed = "at least 10 reviews, to hold a tenth out without its copies"
            raise expected(f"train/{label}", needed, len(train))
        for review in train:
            split = "valid" if review.digest in held_out else "train"
            parts[split].append((review.text, number))
    return parts


def _tokens(reviews: list[tuple[bytes, int]]) -> Iterator[tuple[np.ndarray, int]]:
    for text, label in reviews:
        yield np.frombuffer(text, np.uint8), label
