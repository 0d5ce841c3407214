"""MAD's selective copying (Poli et al. 2024, arXiv:2403.17844).

Tokens to copy, each in a random place among blanks, then a marker, then as many blanks,
at which the targets are the tokens in order::

    tokens   _ a _ _ b _ c ! _ _ _
    targets  . . . . . . . . a b c

Source: athms/mad-lab, mad/data/instances.py. The last token of the vocabulary is the
marker, the one before it the blank. As there, each blank falls before any of the tokens
to copy with the same probability, so that the last of them is never followed by one.
"""

import numpy as np

from lra_jax.data import memory
from lra_jax.errors import expected


def examples(
    rng: np.random.Generator, count: int, *, vocab_size: int, length: int, copied: int
) -> memory.Examples:
    """Draws sequences."""
    if vocab_size < 3:
        raise expected("--data.vocab_size", "at least 3", vocab_size)
    if length <= 2 * copied + 1:
        wanted = f"more than {2 * copied + 1} for {copied} tokens to copy"
        raise expected("--data.length", wanted, length)
    blank = vocab_size - 2
    blanks = length - 2 * copied - 1
    letters = rng.integers(blank, size=(count, copied))
    before = rng.multinomial(blanks, np.full(copied, 1 / copied), size=count)
    tokens = np.full((count, length), blank)
    places = np.cumsum(before, axis=1) + np.arange(copied)
    np.put_along_axis(tokens, places, letters, 1)
    tokens[:, -copied - 1] = vocab_size - 1
    targets = np.full_like(tokens, memory.NO_TARGET)
    targets[:, -copied:] = letters
    return memory.whole(tokens, targets)
