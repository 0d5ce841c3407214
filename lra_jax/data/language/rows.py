"""Documents as rows of a fixed length, on which a language model trains.

A document is ``END d_1 ... d_n END``: the model reads all but the last token and
predicts all but the first, so that every byte, and the end, is predicted once. A
document longer than a row is cut, and each piece starts without context. Short pieces
share rows, and are distinguished by their ``segment_ids``.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lra_jax.data.dataset import Rows, SequenceDataset, fingerprint
from lra_jax.errors import expected
from lra_jax.vocabularies import Bytes, Vocabulary

NO_TARGET = -1
SLIDING = "sliding"


class Stream(NamedTuple):
    """The documents of a split, one after the other.

    Attributes:
      tokens: `[n + 1]`: each document preceded by END; END comes last.
      starts: starting positions of the documents, and n.
      num_bytes: size of their texts.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int


class Piece(NamedTuple):
    """A part of a document in a row: positions `start` to `stop` of the stream; those
    from `scored` on are targets."""

    start: int
    stop: int
    scored: int


def make_stream(
    documents: Sequence[np.ndarray], end: int, num_bytes: int, dtype: np.dtype
) -> Stream:
    """Joins documents."""
    last = np.array([end], dtype)
    parts = [part for tokens in documents for part in (last, tokens.astype(dtype))]
    sizes = [len(tokens) + 1 for tokens in documents]
    starts = np.cumsum([0, *sizes])
    return Stream(np.concatenate([*parts, last]), starts, num_bytes)


def cut(starts: np.ndarray, length: int, step: int) -> list[Piece]:
    """Pieces of at most `length` positions, which begin `step` apart.

    Every position is scored once, in the piece that gives it the most context.
    """
    pieces = []
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        scored, start = begin, begin
        while scored < end:
            stop = min(start + length, end)
            pieces.append(Piece(start, stop, scored))
            scored, start = stop, start + step
    return pieces


def fill(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """Arranges pieces in rows, longest first, each where it leaves the least room."""
    rooms: list[list[list[Piece]]] = [[] for _ in range(length + 1)]
    rows = []
    for piece in sorted(pieces, key=lambda piece: piece.start - piece.stop):
        size = piece.stop - piece.start
        room = next((x for x in range(size, length + 1) if rooms[x]), None)
        if room is None:
            row: list[Piece] = []
            rows.append(row)
            room = length
        else:
            row = rooms[room].pop()
        row.append(piece)
        rooms[room - size].append(row)
    return rows


class TextDataset(SequenceDataset):
    """Rows of text, with the interface of a dataset.

    Args:
      name: name of the corpus.
      streams: the streams of train, valid and test.
      length: positions in a row.
      vocabulary: vocabulary of the token ids.
      slides: whether there is a part `SLIDING`: the test split in rows that overlap by
        half, in which only positions with that much context are scored.

    Attributes:
      num_bytes: size of the texts of each split.

    Raises:
      ValueError: the training text is shorter than a row, or a split has no text.
    """

    def __init__(
        self,
        name: str,
        streams: Mapping[str, Stream],
        *,
        length: int,
        vocabulary: Vocabulary,
        slides: bool = True,
    ):
        size = len(streams["train"].tokens) - 1
        if size < length:
            needed = f"at least a row of --data.max_length={length} tokens to train on"
            raise expected("--data.path", needed, f"{size}, of {name}")
        for split, stream in streams.items():
            if not stream.num_bytes:
                needed = f"text for {', '.join(streams)}"
                raise expected("--data.path", needed, f"none for {split}, of {name}")
        self.name, self.parts = name, (SLIDING,) if slides else ()
        self.raw = vocabulary.raw
        if not isinstance(vocabulary, Bytes):
            self.raw = {"kind": "vocabulary", "vocabulary": vocabulary.raw}
        self.decode = lambda tokens: vocabulary.decode(tokens).decode(errors="replace")
        self.vocab_size = self.num_classes = vocabulary.size
        self.max_length = length
        self.token_dtype = streams["train"].tokens.dtype
        self.num_bytes = {split: s.num_bytes for split, s in streams.items()}
        self._streams = dict(streams)
        self._rows = {
            split: fill(cut(stream.starts, length, length), length)
            for split, stream in streams.items()
        }
        if slides:
            self._streams[SLIDING] = streams["test"]
            self.num_bytes[SLIDING] = self.num_bytes["test"]
            half = cut(streams["test"].starts, length, max(length // 2, 1))
            self._rows[SLIDING] = fill(half, length)
        self._labels = {x: np.zeros((len(r), 0), int) for x, r in self._rows.items()}
        self._lengths = {
            split: np.full(len(rows), length, np.int32)
            for split, rows in self._rows.items()
        }
        self._sources = {
            split: Rows(len(rows), functools.partial(self._row, split))
            for split, rows in self._rows.items()
        }
        # Other words may have the same ids.
        is_bytes = isinstance(vocabulary, Bytes)
        words = "" if is_bytes else json.dumps(vocabulary.raw, sort_keys=True)
        parts: list[str | np.ndarray] = [f"{length}", words]
        for split, stream in streams.items():
            for array in (stream.tokens, stream.starts):
                parts += [f"{split} {array.shape} {array.dtype}", array]
        self.fingerprint = fingerprint(*parts)

    def num_targets(self, split: str) -> int:
        """The number of predicted tokens in a split."""
        return len(self._streams[self._check_split(split)].tokens) - 1

    def batch(self, split: str, ids: np.ndarray) -> dict[str, np.ndarray]:
        rows = self.source(split).__getitems__(ids.tolist())
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def answer(self, split: str, index: int) -> str:
        return f"row {index}, {len(self._rows[self._check_split(split)][index])} pieces"

    def _row(self, split: str, index: int) -> dict[str, np.ndarray]:
        """The arrays `[length]` of a row: a label is the next token, or `NO_TARGET`."""
        tokens = np.zeros(self.max_length, self.token_dtype)
        segment_ids = np.zeros(self.max_length, np.int32)
        labels = np.full(self.max_length, NO_TARGET, np.int32)
        stream = self._streams[split].tokens
        place = 0
        for number, (start, stop, scored) in enumerate(self._rows[split][index], 1):
            after = place + stop - start
            tokens[place:after] = stream[start:stop]
            segment_ids[place:after] = number
            first = after - (stop - scored)
            labels[first:after] = stream[scored + 1 : stop + 1]
            place = after
        return {"tokens": tokens, "segment_ids": segment_ids, "labels": labels}
