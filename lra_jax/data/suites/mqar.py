"""Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv:2312.04927).

A sequence begins with pairs ``k1 v1 k2 v2 ...`` of distinct keys and values. Then every
key is queried once: at its position the target is its value. Between the queries are
random tokens, or token 0::

    tokens   2 8  4 7  0 0  4 0  0 0  2 0 ...
    targets  . .  . .  . .  7 .  . .  8 . ...

Queries are at even places after the pairs. The probability of place i is proportional
to ``i^(power - 1)``, so that most queries come soon; power 1 is uniform.

Source: HazyResearch/zoology, zoology/data/multiquery_ar.py. Keys are 1..V/2 - 1 and
values V/2..V - 1 of a vocabulary V. The places are sampled without replacement, as
there, but by the exponential race, which has the same distribution.
"""

import functools
from typing import NamedTuple

import numpy as np

from lra_jax.data import memory
from lra_jax.errors import expected


class Part(NamedTuple):
    """Sequences of one kind: their length, number of pairs, and how many there are."""

    length: int
    pairs: int
    number: int

    @property
    def name(self) -> str:
        """As in results: ``LENGTH/PAIRS``."""
        return f"{self.length}/{self.pairs}"


def parse_parts(name: str, text: str) -> list[Part]:
    """Parses ``"64/4:1000,128/8:500"``: 1,000 sequences of 64 tokens with 4 pairs, etc.

    Raises:
      ValueError: it is not of that form, a number is not positive, two parts are of the
        same kind, or pairs and their queries do not fit into the length.
    """
    try:
        split = [part.replace("/", ":").split(":") for part in text.split(",")]
        parts = [Part(*map(int, numbers)) for numbers in split]
    except (TypeError, ValueError):
        parts = []
    distinct = len({part.name for part in parts}) == len(parts)
    if not parts or not distinct or min(map(min, parts)) < 1:
        needed = "distinct LENGTH/PAIRS:COUNT,... as in 64/4:1000,128/8:500"
        raise expected(name, needed, f"{text!r}")
    for part in parts:
        if part.length < 4 * part.pairs or part.length % 2:
            needed = f"even lengths of at least four times their {part.pairs} pairs"
            raise expected(name, needed, part.length)
    return parts


def prepare(
    *,
    seed: int,
    train: str,
    test: str,
    num_valid: int,
    vocab_size: int,
    power: float,
    noise: bool,
) -> memory.MemoryDataset:
    """Draws the examples; the settings are those of `lra_jax.configs.mqar.MqarData`.

    Raises:
      ValueError: the pairs do not fit into a length or the vocabulary.
    """
    trained = parse_parts("--data.train", train)
    tests = parse_parts("--data.test", test)
    pairs = max(part.pairs for part in trained + tests)
    if vocab_size // 2 - 1 < pairs:
        needed = f"at least {2 * pairs + 2}, to hold the keys and values of {pairs}"
        raise expected("--data.vocab_size", f"{needed} pairs", vocab_size)
    share = -(-num_valid // len(tests))

    def mix(parts: list[Part]) -> tuple[int, memory.Generator]:
        count = sum(part.number for part in parts)
        return count, lambda rng, _: memory.join([draw(rng, *part) for part in parts])

    draw = functools.partial(examples, vocab_size=vocab_size, power=power, noise=noise)
    splits = {
        "train": mix(trained),
        "valid": mix([part._replace(number=share) for part in tests]),
        "test": mix(tests),
    }
    if len(tests) > 1:
        splits |= {part.name: mix([part]) for part in tests}
    return memory.generate(
        "mqar", seed, splits, vocab_size=vocab_size, num_classes=vocab_size
    )


def examples(
    rng: np.random.Generator,
    length: int,
    pairs: int,
    count: int,
    *,
    vocab_size: int,
    power: float,
    noise: bool,
) -> memory.Examples:
    """Draws sequences of one kind."""
    half, begin = vocab_size // 2, 2 * pairs
    keys = 1 + _distinct(rng, count, half - 1, pairs)
    values = half + _distinct(rng, count, vocab_size - half, pairs)
    places = (length - begin) // 2
    weights = np.arange(1, places + 1) ** (power - 1.0)
    # The first arrivals of exponential clocks at these rates.
    arrivals = rng.exponential(size=(count, places)) / weights
    asked = begin + 2 * np.argsort(arrivals, axis=1)[:, :pairs]
    tokens = np.zeros((count, length), np.int64)
    if noise:
        tokens = rng.integers(vocab_size, size=tokens.shape)
    tokens[:, 0:begin:2] = keys
    tokens[:, 1:begin:2] = values
    np.put_along_axis(tokens, asked, keys, 1)
    order = np.argsort(asked, axis=1)
    lengths = np.full(count, length)
    positions, labels = (np.take_along_axis(x, order, 1) for x in (asked, values))
    return memory.Examples(tokens, lengths, positions, labels)


def _distinct(
    rng: np.random.Generator, count: int, choices: int, size: int
) -> np.ndarray:
    """`[count, size]`: rows of distinct numbers below `choices`, in random order.

    Rows with a repeated number are drawn again, if at least about one row in eight is
    good; otherwise all choices are shuffled.
    """
    if size * size > 4 * choices:
        shuffled = np.argsort(rng.random((count, choices)), axis=1)
        return shuffled[:, :size]
    drawn = rng.integers(choices, size=(count, size))
    while True:
        ordered = np.sort(drawn, axis=1)
        again = (ordered[:, 1:] == ordered[:, :-1]).any(1)
        if not again.any():
            return drawn
        drawn[again] = rng.integers(choices, size=(int(again.sum()), size))
