"""A prepared dataset, as used by the rest of the library."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from lra_jax.errors import known

SPLITS = ("train", "valid", "test")
"""The splits of every dataset."""


class Source(Protocol):
    """Random access to examples, from 0; several can be read at once."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self)))

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class Rows(Source):
    """Examples by a function of their index."""

    def __init__(self, count: int, read: Callable[[int], dict[str, Any]]):
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._read(index)


def fingerprint(*parts: str | np.ndarray) -> str:
    """A hash of texts and arrays, one after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        is_text = isinstance(part, str)
        digest.update(part.encode() if is_text else np.ascontiguousarray(part).data)
    return digest.hexdigest()


class SequenceDataset:
    """Labelled sequences of token ids, with their lengths in memory.

    Attributes:
      name: of the data and their settings.
      folder: folder of the records.
      splits: the names of the splits, usually train, valid, test.
      parts: the names of further splits on which a model is tested separately, such as
        longer sequences; none for data on disk.
      sequences: the names of the sequences of an example; one, or two for a pair of
        documents.
      vocab_size: token ids are below this; for real vectors, their width C.
      token_dtype: the dtype of the tokens.
      token_shape: `(C,)` if each token is a vector `[C]`, as in time series.
      num_classes: labels are below this; how many numbers, if labels are numbers.
      scale: the mean and the deviation that were taken out of labels that are numbers.
      metric: the score that chooses checkpoints and ranks runs, 1 at best: accuracy, or
        one of the task's own scores, such as r2.
      classes: the word of each label, in order; None if labels are numbers only.
      several: whether an example may have any number of classes.
      max_length: no sequence is longer than this.
      image_shape: rows and columns, if a sequence is an image; else None.
      step_parts: names of the tokens of a step, where tokens are real vectors.
      raw: how raw examples become tokens, if that depends on the data; else None.
      decode: ``(tokens) -> str``, if that also depends on the data; else None.
      fingerprint: a hash of every example in order: equal for equal data.
    """

    name: str
    vocab_size: int
    num_classes: int
    max_length: int
    fingerprint: str
    # The values for examples in memory.
    folder: str = "memory"
    splits: tuple[str, ...] = SPLITS
    parts: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ("tokens",)
    token_dtype: np.dtype = np.dtype(np.uint8)
    image_shape: tuple[int, int] | None = None
    token_shape: tuple[int, ...] = ()
    step_parts: tuple[str, ...] = ()
    raw: dict[str, Any] | None = None
    decode: Callable[[np.ndarray], str] | None = None
    classes: Sequence[str] | None = None
    scale: tuple[float, float] = (0.0, 1.0)
    metric: str = "accuracy"
    several: bool = False

    # For each split and part.
    _lengths: dict[str, np.ndarray]
    _labels: dict[str, np.ndarray]
    _sources: dict[str, Source]

    def _hold(self, rows: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Keeps the sequences of each split in memory, `[n][length, ...]`."""
        self._lengths = {x: np.array([*map(len, r)], np.int32) for x, r in rows.items()}
        self._sources = {x: of_arrays(r, self._lengths[x]) for x, r in rows.items()}

    def __repr__(self) -> str:
        sizes = ", ".join(f"{s}={self.num_examples(s)}" for s in self.splits)
        return f"SequenceDataset({self.name}, {sizes})"

    @property
    def has_numbers(self) -> bool:
        """Whether labels are numbers to predict, and not classes."""
        return self.labels(self.splits[0]).dtype.kind == "f"

    @property
    def raw_answers(self) -> dict[str, Any]:
        """How logits become answers, for `raw`, if not one class each."""
        scale = {"scale": list(self.scale)} if self.has_numbers else {}
        return scale | ({"several": True} if self.several else {})

    def num_examples(self, split: str) -> int:
        """The number of examples in a split."""
        return len(self.labels(split))

    def lengths(self, split: str) -> np.ndarray:
        """The lengths of a split, `int32 [n]`; `[n, 2]` for pairs of sequences."""
        return self._lengths[self._check_split(split)]

    def labels(self, split: str) -> np.ndarray:
        """The labels of a split, integers `[n]`, or `[n, K]` at `positions`, padded
        with -1; float32 `[n]` where numbers are to be predicted; 0 and 1
        `[n, classes]` where an example has `several`."""
        return self._labels[self._check_split(split)]

    def positions(self, split: str) -> np.ndarray | None:
        """The positions of a split's labels, `int32 [n, K]`; None if labels belong to
        whole sequences."""
        self._check_split(split)
        return None

    def batch(self, split: str, ids: np.ndarray) -> dict[str, np.ndarray] | None:
        """The arrays of a batch, if examples are rows that are already packed; None if
        the pipeline makes them from the examples."""
        self._check_split(split)
        return None

    def answer(self, split: str, index: int) -> str:
        """The answer to an example, for display."""
        labels, positions = self.labels(split)[index], self.positions(split)
        if self.has_numbers:
            mean, deviation = self.scale
            return f"number {labels * deviation + mean:.6g}"
        if positions is None:
            return f"label {self.name_classes(labels)}"
        targets = zip(positions[index].tolist(), labels.tolist(), strict=True)
        pairs = (f"{place}: {label}" for place, label in targets if label >= 0)
        return f"labels at positions {', '.join(pairs)}"

    def name_classes(self, label: np.ndarray) -> Any:
        """The class of a label, a word or an integer; a list of those that it marks."""
        words = self.classes or range(self.num_classes)
        if self.several:
            return [words[index] for index in np.flatnonzero(label > 0).tolist()]
        return words[int(label)]

    def source(self, split: str) -> Source:
        """Random access to a split.

        Element i is a dict with `token_dtype [length, *token_shape]` for each name of
        `sequences`, and, from disk, the integer `label`. `__getitems__(ids)` reads
        several at once.
        """
        return self._sources[self._check_split(split)]

    def _check_split(self, split: str) -> str:
        return known("split", split, self._labels)


def of_arrays(rows: Sequence[np.ndarray] | np.ndarray, lengths: np.ndarray) -> Source:
    """Sequences in memory, `[n][T, ...]`, cut to their lengths."""
    return Rows(len(lengths), lambda index: {"tokens": rows[index][: lengths[index]]})
