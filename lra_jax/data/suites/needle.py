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

import numpy as np

from lra_jax.data import memory
from lra_jax.errors import expected

_SHORTEST = 3


def prepare(
    *,
    seed: int,
    num_train: int,
    num_valid: int,
    num_test: int,
    vocab_size: int,
    min_length: int,
    max_length: int,
    parts: str,
) -> memory.MemoryDataset:
    """Draws the examples; the settings are those of `lra_jax.configs.needle`.

    Raises:
      ValueError: lengths that are not in increasing order, or too short for the needle
        and the question, or a vocabulary without noise.
    """
    memory.check_range("min_length", min_length, "max_length", max_length, _SHORTEST)
    if vocab_size < 4:
        raise expected("--data.vocab_size", "at least 4", vocab_size)
    draw = functools.partial(examples, vocab_size=vocab_size)
    short = functools.partial(draw, least=min_length, most=max_length)
    long = {
        str(length): (num_test, functools.partial(draw, least=length, most=length))
        for length in memory.parse_lengths("--data.parts", parts, _SHORTEST)
    }
    return memory.generate(
        "needle",
        seed,
        {
            "train": (num_train, short),
            "valid": (num_valid, short),
            "test": (num_test, short),
            **long,
        },
        vocab_size=vocab_size,
        num_classes=vocab_size - 2,
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
