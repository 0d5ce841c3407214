"""Parity: whether a string of bits contains an odd number of ones.

Tokens are 1 and 2 for the bits 0 and 1. At the last bit the target is the parity.
"""

import numpy as np

from lra_jax.data import memory


def examples(
    rng: np.random.Generator, count: int, *, least: int, most: int
) -> memory.Examples:
    """Draws strings of `least - 1` to `most - 1` bits."""
    lengths = rng.integers(least, most + 1, size=count) - 1
    bits = rng.integers(2, size=(count, most - 1))
    read = np.arange(most - 1) < lengths[:, None]
    labels = (bits * read).sum(1) % 2
    return memory.at_end((bits + 1) * read, lengths, labels)
