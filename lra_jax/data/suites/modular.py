"""Modular arithmetic without brackets: the value of ``2+3*1-4=`` modulo 5.

Tokens 1 to 4 are ``+ - * =``, and 5 to 9 the digits 0 to 4; 0 is padding. Products take
precedence over sums. At the ``=`` the target is the value. An expression of n digits
has `2 n` tokens and, with its answer, `2 n + 1`: lengths are odd.
"""

import numpy as np

from lra_jax.data import memory

MODULUS = 5
PLUS, MINUS, TIMES, EQUALS, ZERO = 1, 2, 3, 4, 5


def examples(
    rng: np.random.Generator, count: int, *, least: int, most: int
) -> memory.Examples:
    """Draws expressions; an even length is reduced to the odd one before it."""
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
