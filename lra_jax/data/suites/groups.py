"""Word problems of the groups S5 and A5: the product of all elements so far.

Each token is an element of the group, and at every position the target is the product
of the elements up to it, ``g_1 g_2 ... g_t``: first g_1, then g_2, and so on. S5 is all
120 permutations of five things, and A5 the 60 even ones. Neither is solvable, so no
circuit of constant depth is known to multiply their elements (Merrill,
Petty and Sabharwal 2024, "The Illusion of State in State-Space Models",
arXiv:2404.08819).

Source: jopetty/word-problem, src/generate_data.py. Elements are numbered in
lexicographic order here, 0 the identity.
"""

import functools
import itertools

import numpy as np

from lra_jax.data import memory


@functools.cache
def elements(group: str) -> np.ndarray:
    """The permutations of a group, `[order, 5]`: row i holds the images of 0..4."""
    every = np.array(list(itertools.permutations(range(5))))
    if group == "s5":
        return every
    left, right = np.triu_indices(5, 1)
    inversions = (every[:, left] > every[:, right]).sum(1)
    return every[inversions % 2 == 0]


@functools.cache
def products(group: str) -> np.ndarray:
    """The table `[order, order]` of ``first g, then h``."""
    rows = elements(group)
    number = {tuple(row): index for index, row in enumerate(rows.tolist())}
    # composed[g, h, x] = h(g(x))
    composed = rows[:, rows].swapaxes(0, 1)
    flat = map(tuple, composed.reshape(-1, 5).tolist())
    return np.array([number[row] for row in flat]).reshape(len(rows), len(rows))


def examples(
    rng: np.random.Generator, count: int, *, group: str, least: int, most: int
) -> memory.Examples:
    """Draws words of `least` to `most` elements."""
    table = products(group)
    lengths = rng.integers(least, most + 1, size=count)
    tokens = rng.integers(len(table), size=(count, most))
    targets = tokens.copy()
    for index in range(1, most):
        targets[:, index] = table[targets[:, index - 1], tokens[:, index]]
    beyond = np.arange(most) >= lengths[:, None]
    tokens[beyond] = 0
    targets[beyond] = memory.NO_TARGET
    return memory.Examples(tokens, lengths, *memory.at_positions(targets))
