"""Modular arithmetic with brackets: the value of ``((1-3)+(-2))=`` modulo 5.

Tokens 0 to 4 are the digits, 5 to 10 ``+ - * ( ) =``; 11 is the original's padding,
which no sequence here shows. At the ``=`` the target is the value. An expression is a
sum or a difference of two shorter ones in brackets, ``(a+b)`` or ``(a-b)``, where the
length of the left one is uniform; with up to four tokens it is ``x``, ``-x``, ``(x)``
or ``(-x)``.

Source: automl/unlocking_state_tracking, which takes it from
google-deepmind/neural_networks_chomsky_hierarchy. Products are in its vocabulary, but
by default not used. A length includes the ``=``, the answer and one padding token.
"""

import numpy as np

from lra_jax.data import memory

MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE, EQUALS, FILL = range(MODULUS, MODULUS + 7)
SHORT = {1: "x", 2: "-x", 3: "(x)", 4: "(-x)"}
"""The forms of short expressions, by length."""

_AFTER = 3  # Tokens that a length includes after the expression.
_SIGNS = {"-": MINUS, "(": OPEN, ")": CLOSE}


def examples(
    rng: np.random.Generator, count: int, *, least: int, most: int
) -> memory.Examples:
    """Draws expressions."""
    lengths = np.maximum(rng.integers(least, most + 1, size=count), 5) - _AFTER
    tokens, signs = _shapes(rng, lengths)
    is_digit = signs != 0
    digits = rng.integers(MODULUS, size=tokens.shape)
    labels = (digits * signs).sum(1) % MODULUS
    tokens = np.where(is_digit, digits, tokens)
    np.put_along_axis(tokens, lengths[:, None], EQUALS, 1)
    return memory.at_end(tokens, lengths + 1, labels)


def _shapes(
    rng: np.random.Generator, lengths: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Expressions whose digits have not been chosen yet.

    All expressions are split at once, level by level: a piece of one is given by its
    row, its beginning, its length, and whether it counts as positive or negative.

    Returns:
      tokens `[n, longest + 1]`, and the sign of each digit, 0 elsewhere.
    """
    tokens = np.full((len(lengths), int(lengths.max()) + 1), FILL)
    signs = np.zeros_like(tokens)
    row, begin = np.arange(len(lengths)), np.zeros_like(lengths)
    length, sign = lengths, np.ones_like(lengths)
    while row.size:
        for size, form in SHORT.items():
            here = length == size
            at = row[here], begin[here]
            inner = sign[here] * (-1 if "-" in form else 1)
            for offset, mark in enumerate(form):
                place = at[0], at[1] + offset
                if mark == "x":
                    signs[place] = inner
                else:
                    tokens[place] = _SIGNS[mark]
        split = length > max(SHORT)
        row, begin, length, sign = (x[split] for x in (row, begin, length, sign))
        left = rng.integers(1, length - 3) if row.size else length
        is_minus = rng.integers(2, size=row.shape)
        tokens[row, begin] = OPEN
        tokens[row, begin + length - 1] = CLOSE
        tokens[row, begin + 1 + left] = np.where(is_minus, MINUS, PLUS)
        row = np.concatenate([row, row])
        begin = np.concatenate([begin + 1, begin + left + 2])
        sign = np.concatenate([sign, np.where(is_minus, -sign, sign)])
        length = np.concatenate([left, length - left - 3])
    return tokens, signs
