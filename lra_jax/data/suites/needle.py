"""One token to find in long noise, and to output at its end.

::

    tokens   n n n ! k n n n n n n n ?
    targets  . . . . . . . . . . . . k

The place of the pair ``! k`` is uniform. Noise and k are drawn from the same tokens, so
that only the preceding mark distinguishes k from the noise. Training is on short
sequences and testing on longer ones, to measure length generalisation.

Our own test, in the spirit of passkey retrieval (Mohtashami and Jaggi 2023,
arXiv:2305.16300), with tokens instead of text.
"""

import functools
from typing import Any

import numpy as np

from lra_jax.data import memory

_SHORTEST = 3


def prepare(
    *, vocab_size: int, min_length: int, max_length: int, **settings: Any
) -> memory.MemoryDataset:
    """Draws the examples; the settings are those of `lra_jax.configs.needle`, and for
    errors see `memory.generate_by_length`."""
    return memory.generate_by_length(
        "needle",
        functools.partial(examples, vocab_size=vocab_size),
        shortest=_SHORTEST,
        min_length=min_length,
        max_length=max_length,
        test_min=min_length,
        test_max=max_length,
        vocab_size=vocab_size,
        num_classes=vocab_size - 2,
        **settings,
    )


def examples(
    rng: np.random.Generator, count: int, *, vocab_size: int, least: int, most: int
) -> memory.Examples:
    """Draws sequences; the last two tokens of the vocabulary are ``!`` and ``?``."""
    mark, ask = vocab_size - 2, vocab_size - 1
    lengths = rng.integers(least, most + 1, size=count)
    tokens = rng.integers(mark, size=(count, most))
    rows = np.arange(count)
    place = rng.integers(lengths - 2)
    tokens[rows, place] = mark
    labels = tokens[rows, place + 1]
    tokens[rows, lengths - 1] = ask
    tokens[np.arange(most) >= lengths[:, None]] = 0
    return memory.at_end(tokens, lengths, labels)
