"""Tests of state tracking: trained on short sequences, tested on longer ones.

Source of parity and modular arithmetic: NX-AI/xlstm, experiments/data/formal_language,
whose code produced the published numbers (Grazzi et al. 2024, "Unlocking State-Tracking
in Linear RNNs Through Negative Eigenvalues", arXiv:2411.12537). As there, lengths
include the answer; what the model reads is one token shorter. All lengths from least to
most are equally likely, except that a length without sequences becomes the nearest one
that the task has, as in the original.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from lra_jax.data import memory
from lra_jax.data.suites import brackets

SHORTEST = 3
"""Shortest length: one token, an end marker or another token, and the answer."""


def prepare(*, task: str, **settings: Any) -> memory.MemoryDataset:
    """Draws the examples of a test; see `memory.generate_by_length`.

    Args:
      task: its name.
      **settings: those of `lra_jax.configs.state`, and the sizes of the task.
    """
    draw = GENERATORS[task]
    return memory.generate_by_length(task, draw, shortest=SHORTEST, **settings)


def draw_parity(
    rng: np.random.Generator, count: int, *, least: int, most: int
) -> memory.Examples:
    """Parity: whether a string of bits contains an odd number of ones.

    Tokens are 1 and 2 for the bits 0 and 1. At the last bit the target is the parity.
    """
    lengths = rng.integers(least, most + 1, size=count) - 1
    bits = rng.integers(2, size=(count, most - 1))
    read = np.arange(most - 1) < lengths[:, None]
    labels = (bits * read).sum(1) % 2
    return memory.at_end((bits + 1) * read, lengths, labels)


MODULUS = 5
PLUS, MINUS, TIMES, EQUALS, ZERO = 1, 2, 3, 4, 5


def draw_modular(
    rng: np.random.Generator, count: int, *, least: int, most: int
) -> memory.Examples:
    """Modular arithmetic without brackets: the value of ``2+3*1-4=`` modulo 5.

    Tokens 1 to 4 are ``+ - * =``, and 5 to 9 the digits 0 to 4; 0 is padding. Products
    take precedence over sums. At the ``=`` the target is the value. An expression of n
    digits has `2 n` tokens and, with its answer, `2 n + 1`: lengths are odd, and an
    even one is reduced to the odd one before it.
    """
    sizes = rng.integers((least + 1) // 2, (most + 1) // 2 + 1, size=count) - 1
    digits = rng.integers(MODULUS, size=(count, int(sizes.max())))
    operators = rng.integers(PLUS, TIMES + 1, size=digits.shape)
    total, product = np.zeros(count, np.int64), digits[:, 0]
    labels = np.zeros(count, np.int64)
    for index in range(digits.shape[1]):
        if index:
            before, digit = operators[:, index - 1], digits[:, index]
            times = before == TIMES
            total = np.where(times, total, total + product) % MODULUS
            signed = np.where(before == MINUS, -digit, digit)
            product = np.where(times, product * digit, signed) % MODULUS
        ended = sizes == index + 1
        labels[ended] = (total + product)[ended] % MODULUS
    tokens = np.stack([ZERO + digits, operators], -1).reshape(count, -1)
    lengths = 2 * sizes
    place = np.arange(tokens.shape[1])
    tokens[place == lengths[:, None] - 1] = EQUALS
    return memory.at_end(tokens * (place < lengths[:, None]), lengths, labels)


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


def draw_words(
    rng: np.random.Generator, count: int, *, group: str, least: int, most: int
) -> memory.Examples:
    """Word problems of the groups S5 and A5: the product of all elements so far.

    Each token is an element of the group, and at every position the target is the
    product of the elements up to it, ``g_1 g_2 ... g_t``: first g_1, then g_2, and so
    on. S5 is all 120 permutations of five things, and A5 the 60 even ones. Neither is
    solvable, so no circuit of constant depth is known to multiply their elements
    (Merrill, Petty and Sabharwal 2024, "The Illusion of State in State-Space Models",
    arXiv:2404.08819).

    Source: jopetty/word-problem, src/generate_data.py. Elements are numbered in
    lexicographic order here, 0 the identity.
    """
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


GENERATORS: dict[str, Callable[..., memory.Examples]] = {
    "parity": draw_parity,
    "modular": draw_modular,
    "modular-brackets": brackets.examples,
    "s5": functools.partial(draw_words, group="s5"),
    "a5": functools.partial(draw_words, group="a5"),
}
"""By task: ``(rng, count, least=, most=) -> Examples``."""
