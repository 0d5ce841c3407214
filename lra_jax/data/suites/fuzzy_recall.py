"""MAD's fuzzy in-context recall (Poli et al. 2024, arXiv:2403.17844).

In-context recall (`lra_jax.data.suites.mad`) where keys and values are *motifs* of one
to three distinct tokens. Nothing marks where a motif ends, but keys and values use
separate tokens. In a test every key has the full size. The last pair repeats an earlier
key, and the sequence is padded on the left with the last token of the vocabulary. A
model predicts the next token: every one in training, in a test those of values whose
key has occurred before.

Source: athms/mad-lab, mad/data/instances.py, with several queries. There, if its place
is too far back, the key of the last pair may be missing before it.
"""

import itertools

import numpy as np

from lra_jax.data import memory
from lra_jax.errors import expected


class Motifs:
    """All motifs of some tokens, with 1 to `most` distinct tokens each.

    Attributes:
      tokens: `[motifs, most]`, 0 beyond a motif's end.
      sizes: `[motifs]`.
    """

    def __init__(self, alphabet: range, most: int):
        sizes = range(1, most + 1)
        motifs = [list(itertools.permutations(alphabet, size)) for size in sizes]
        counts = list(map(len, motifs))
        self._ends = np.cumsum(counts)
        self.sizes = np.repeat(sizes, counts)
        every = itertools.chain.from_iterable(motifs)
        self.tokens = np.array([motif + (0,) * (most - len(motif)) for motif in every])

    def draw(
        self, rng: np.random.Generator, shape: tuple[int, ...], least: int = 1
    ) -> np.ndarray:
        """Indices of motifs: a size of at least `least`, then one of that size."""
        size = rng.integers(least - 1, len(self._ends), size=shape)
        begins = np.concatenate([[0], self._ends[:-1]])
        return rng.integers(begins[size], self._ends[size])


def examples(
    rng: np.random.Generator,
    count: int,
    *,
    training: bool,
    vocab_size: int,
    length: int,
    motif: int,
) -> memory.Examples:
    """Draws sequences; in training keys have any size, and every token is a target."""
    real = vocab_size - 1
    if real // 2 < motif:
        needed = f"at least {2 * motif + 1}, for motifs of {motif} distinct tokens"
        raise expected("--data.vocab_size", needed, vocab_size)
    if length <= 4 * motif:
        needed = f"more than {4 * motif}, two pairs of motifs of {motif} tokens"
        raise expected("--data.length", needed, length)
    keys = Motifs(range(real // 2), motif)
    values = Motifs(range(real // 2, real), motif)
    least = 1 if training else motif
    asked, answer = keys.draw(rng, (count,), least), values.draw(rng, (count,))
    rows = np.arange(count)
    tail = keys.sizes[asked] + values.sizes[answer]
    stop = length - tail - 2 * motif
    place = rng.integers(stop)  # The queried key occurs here, or a little earlier.
    tokens = np.zeros((count, length + 1 + 2 * motif), np.int64)
    targets = np.full_like(tokens, memory.NO_TARGET)
    used = np.zeros(count, np.int64)
    book = _Book(count, tokens.shape[1] // 2)

    def write(key: np.ndarray, where: np.ndarray) -> None:
        """Appends a key and its value to some rows."""
        new = np.where(key == asked[where], answer[where], values.draw(rng, key.shape))
        value, again = book.look_up(where, key, new)
        for source, index, asks in ((keys, key, False), (values, value, True)):
            for column in range(motif):
                there = source.sizes[index] > column
                row, token = where[there], source.tokens[index[there], column]
                at = used[row]
                tokens[row, at] = token
                known = again[there] & asks
                targets[row[known], at[known]] = token[known]
                used[row] += 1

    while (growing := np.flatnonzero(used < stop)).size:
        key = keys.draw(rng, growing.shape, least)
        due = used[growing] + 2 * motif > place[growing]
        due &= ~book.holds(growing, asked[growing])
        write(np.where(due, asked[growing], key), growing)
    write(asked, rows)
    tokens = _to_the_right(tokens, used, length + 1, fill=vocab_size - 1)
    if training:
        targets = tokens
    else:
        targets = _to_the_right(targets, used, length + 1, fill=memory.NO_TARGET)
    return memory.from_targets(tokens[:, :-1], targets[:, 1:])


class _Book:
    """Each sequence's keys and their values: few of all motifs, of which there may be
    hundreds of thousands."""

    def __init__(self, count: int, most: int):
        self._keys = np.full((count, most), -1, np.int64)
        self._values = np.zeros((count, most), np.int64)
        self._size = np.zeros(count, np.int64)

    def holds(self, where: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Whether the sequences ``where`` hold these keys."""
        return (self._keys[where] == key[:, None]).any(1)

    def look_up(
        self, where: np.ndarray, key: np.ndarray, new: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The value of a key in each of some sequences, and whether it was there; else
        the new value is entered."""
        again = self.holds(where, key)
        row = where[~again]
        place = self._size[row]
        self._keys[row, place], self._values[row, place] = key[~again], new[~again]
        self._size[row] += 1
        column = (self._keys[where] == key[:, None]).argmax(1)
        return self._values[where, column], again


def _to_the_right(
    rows: np.ndarray, used: np.ndarray, width: int, fill: int
) -> np.ndarray:
    """Aligns rows `[n, ...]` on the right, given their numbers of used columns."""
    place = np.arange(width)[None] - (width - used[:, None])
    moved = np.take_along_axis(rows, place % rows.shape[1], 1)
    return np.where(place < 0, fill, moved)
