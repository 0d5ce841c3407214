"""MAD's memorisation (Poli et al. 2024, arXiv:2403.17844).

A sequence is a row of ``key ?``, and at every ``?`` the target is the key's value,
which is the same in all sequences: the model must store the table of values in its
weights, since the sequences themselves do not reveal it.

Source: athms/mad-lab, mad/data/instances.py: the last token of the vocabulary is ``?``,
keys are the lower half of the others, and values a permutation of the upper half.
"""

import numpy as np

from lra_jax.data import memory
from lra_jax.errors import expected

_BOOK = 12345  # The seed of the table there, whatever the sequences.


def examples(
    rng: np.random.Generator, count: int, *, vocab_size: int, length: int
) -> memory.Examples:
    """Draws sequences of keys."""
    if vocab_size < 3:
        raise expected("--data.vocab_size", "at least 3", vocab_size)
    if length < 2 or length % 2:
        raise expected("--data.length", "an even number of at least 2", length)
    book = make_book(vocab_size)
    keys = rng.integers(len(book), size=(count, length // 2))
    tokens = np.full((count, 2 * keys.shape[1]), vocab_size - 1)
    tokens[:, 0::2] = keys
    targets = np.full_like(tokens, memory.NO_TARGET)
    targets[:, 1::2] = book[keys]
    return memory.whole(tokens, targets)


def make_book(vocab_size: int) -> np.ndarray:
    """The value of each key, `[keys]`."""
    num_keys = (vocab_size - 1) // 2
    values = np.arange(num_keys, vocab_size - 1)
    return np.random.default_rng(_BOOK).permutation(values)[:num_keys]
