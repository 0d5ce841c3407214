"""Generated examples, kept in memory, with class labels at some of their positions.

A generator is a function of a numpy generator and a number of examples. Each split uses
its own stream, keyed by the seed and the split, so the examples depend neither on the
machine nor on the number of processes, and one split can grow without changing another.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lra_jax.data.dataset import SequenceDataset, fingerprint, of_arrays
from lra_jax.errors import expected

# Maximum number of generated examples in a split.
_MOST = 10_000_000
NO_TARGET = -1
"""The label that pads a row of targets."""


class Examples(NamedTuple):
    """Sequences, and the classes to predict at some of their positions.

    Attributes:
      tokens: `[n, T]`, 0 beyond a sequence's end.
      lengths: `[n]`.
      positions: `[n, K]`, the positions of the targets; 0 in padding.
      labels: `[n, K]`, the classes; `NO_TARGET` in padding.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    positions: np.ndarray
    labels: np.ndarray


Generator = Callable[[np.random.Generator, int], Examples]


def from_targets(tokens: np.ndarray, targets: np.ndarray) -> Examples:
    """Examples of equal length.

    Args:
      tokens: `[n, T]`.
      targets: `[n, T]`, a class for each position, or `NO_TARGET`.
    """
    lengths = np.full(len(tokens), tokens.shape[1], np.int32)
    return Examples(tokens, lengths, *at_positions(targets))


def at_end(tokens: np.ndarray, lengths: np.ndarray, labels: np.ndarray) -> Examples:
    """Examples `[n, T]` with one target each, at their last position."""
    return Examples(tokens, lengths, lengths[:, None] - 1, labels[:, None])


def at_positions(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The positions and labels of `Examples` for targets `[n, T]`."""
    is_target = targets != NO_TARGET
    width = int(is_target.sum(1).max())
    # The targets come first, in order.
    order = np.argsort(~is_target, axis=1, kind="stable")[:, :width]
    labels = np.take_along_axis(targets, order, 1)
    return np.where(labels == NO_TARGET, 0, order), labels


def join(parts: list[Examples]) -> Examples:
    """Several sets of examples as one, padded to the longest."""

    def stack(arrays: list[np.ndarray], fill: int) -> np.ndarray:
        width = max(array.shape[1] for array in arrays)
        padded = [
            np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)
            for x in arrays
        ]
        return np.concatenate(padded)

    return Examples(
        stack([part.tokens for part in parts], 0),
        np.concatenate([part.lengths for part in parts]),
        stack([part.positions for part in parts], 0),
        stack([part.labels for part in parts], NO_TARGET),
    )


class MemoryDataset(SequenceDataset):
    """Examples in memory, with the interface of a dataset.

    Args:
      name: name of the dataset.
      splits: the examples of train, valid and test, and of the parts.
      vocab_size: token ids are below this.
      num_classes: labels are below this.
    """

    def __init__(
        self,
        name: str,
        splits: Mapping[str, Examples],
        *,
        vocab_size: int,
        num_classes: int,
    ):
        self.name, self.vocab_size, self.num_classes = name, vocab_size, num_classes
        self.parts = tuple(split for split in splits if split not in self.splits)
        self.max_length = max(int(x.lengths.max()) for x in splits.values())
        self.token_dtype = np.min_scalar_type(vocab_size - 1)
        kinds = (self.token_dtype, np.int32, np.int32, np.min_scalar_type(-num_classes))
        self._examples = {
            split: Examples(*(x.astype(k) for x, k in zip(arrays, kinds, strict=True)))
            for split, arrays in splits.items()
        }
        parts: list[str | np.ndarray] = []
        self._lengths, self._labels, self._sources = {}, {}, {}
        for split, x in self._examples.items():
            self._lengths[split], self._labels[split] = x.lengths, x.labels
            self._sources[split] = of_arrays(x.tokens, x.lengths)
            parts += [f"{split} {x.tokens.shape}", *x]
        self.fingerprint = fingerprint(*parts)

    def positions(self, split: str) -> np.ndarray:
        return self._examples[self._check_split(split)].positions


def generate(
    name: str,
    seed: int,
    splits: Mapping[str, tuple[int, Generator]],
    *,
    vocab_size: int,
    num_classes: int,
) -> MemoryDataset:
    """Generates a dataset.

    Args:
      name: name of the dataset.
      seed: fixes every example.
      splits: number of examples of each split, and their generator: train, valid and
        test, then the parts, on which a model is tested separately.
      vocab_size: token ids are below this.
      num_classes: labels are below this.

    Raises:
      ValueError: they do not fit into memory.
    """
    drawn = {}
    for split, (count, draw) in splits.items():
        place, needed = f"the {split} split of {name}", "examples that fit into memory"
        if count > _MOST:
            raise expected(place, f"at most {_MOST:,} examples", f"{count:,}")
        try:
            drawn[split] = draw(stream_of(seed, split), count)
        except MemoryError as error:
            raise expected(place, needed, f"more: {error}") from None
    return MemoryDataset(name, drawn, vocab_size=vocab_size, num_classes=num_classes)


def generate_by_length(
    name: str,
    draw: Callable[..., Examples],
    *,
    shortest: int,
    seed: int,
    num_train: int,
    num_valid: int,
    num_test: int,
    min_length: int,
    max_length: int,
    test_min: int,
    test_max: int,
    parts: str,
    vocab_size: int,
    num_classes: int,
) -> MemoryDataset:
    """Generates a dataset whose test lengths differ from its training lengths.

    Args:
      name, seed, vocab_size, num_classes: as in `generate`.
      draw: makes examples, `(rng, count, least=, most=) -> Examples`.
      shortest: the shortest length that `draw` can make.
      num_train, num_valid, num_test: number of examples; a part has `num_test`.
      min_length, max_length, test_min, test_max, parts: see
        `lra_jax.configs.state.StateData`.

    Raises:
      ValueError: lengths that are not in increasing order, or below `shortest`.
    """
    for names, least, most in (
        (("min_length", "max_length"), min_length, max_length),
        (("test_min", "test_max"), test_min, test_max),
    ):
        if least < shortest:
            raise expected(f"--data.{names[0]}", f"at least {shortest}", least)
        if most < least:
            needed = f"at least --data.{names[0]}={least}"
            raise expected(f"--data.{names[1]}", needed, most)

    def between(least: int, most: int) -> Generator:
        return functools.partial(draw, least=least, most=most)

    tested = between(test_min, test_max)
    splits = {
        "train": (num_train, between(min_length, max_length)),
        "valid": (num_valid, tested),
        "test": (num_test, tested),
    }
    for length in _parse_lengths("--data.parts", parts, shortest):
        splits[str(length)] = num_test, between(length, length)
    return generate(name, seed, splits, vocab_size=vocab_size, num_classes=num_classes)


def hold_out(
    groups: np.ndarray, seed: int, split: str, share: float = 0.2
) -> np.ndarray:
    """Chooses examples of a training split for another split, a share of each group.

    Args:
      groups: `[n]`, such as the labels.
      seed: fixes the choice, together with the split.
      split: the other split.
      share: of each group.

    Returns:
      Boolean `[n]`.

    Raises:
      ValueError: there are too few.
    """
    order = stream_of(seed, split).permutation(len(groups))
    held = np.zeros(len(groups), bool)
    for group in np.unique(groups):
        members = order[groups[order] == group]
        held[members[: round(share * len(members))]] = True
    if not held.any():
        needed = "3 examples of a class or more, to hold out one"
        raise expected("--data.path", needed, f"{len(groups)} in all")
    return held


def stream_of(seed: int, split: str) -> np.random.Generator:
    """The random generator of a split."""
    entropy = np.random.SeedSequence((seed, *split.encode()))
    return np.random.Generator(np.random.Philox(entropy))


def decode(tokens: np.ndarray) -> str:
    """Token ids as text."""
    return " ".join(map(str, tokens.tolist()))


def _parse_lengths(name: str, text: str, floor: int) -> list[int]:
    """Parses ``"64,256"`` to distinct numbers of at least `floor`; empty for none."""
    try:
        lengths = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        lengths = [0]
    if len(set(lengths)) < len(lengths) or min(lengths, default=floor) < floor:
        needed = f"distinct lengths of at least {floor}, as in 64,256"
        raise expected(name, needed, f"{text!r}")
    return lengths
