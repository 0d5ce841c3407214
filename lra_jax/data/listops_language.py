"""The language of ListOps: its tokens, its file format, and the value of an expression.

The evaluator here walks a stack, one token at a time. It shares nothing with the
vectorised generator, so each checks the other; it also checks files made elsewhere.
"""

import dataclasses
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lra_jax.data.checks import shorten
from lra_jax.errors import expected

TOKENS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X")
"""The token with id i + 1. Id 0 is padding; `X` is `]`, which closes an expression."""

VOCAB_SIZE = len(TOKENS) + 1
"""16: padding and 15 tokens. LRA has a 17th id for unknown words; none can occur."""

PAD = 0
DIGIT_0 = 1 + TOKENS.index("0")
MIN, MAX, MED, SM = (1 + TOKENS.index(op) for op in ("[MIN", "[MAX", "[MED", "[SM"))
CLOSE = 1 + TOKENS.index("X")

SHORTEST_OPERATOR = 4
"""Tokens of an operator with two digits."""

_WORDS = ("", *TOKENS[:-1], "]")
_IDS = {word: i for i, word in enumerate(_WORDS) if i} | {"X": CLOSE}
_DROP_PARENTHESES = str.maketrans("()", "  ")

WORDS = {"ids": _IDS, "ignored": "()"}
"""The id of each word of the file format, and the characters that are blanks there."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Which trees are generated; the defaults are LRA's.

    Attributes:
      min_length: trees have more tokens than this.
      max_length: trees have fewer tokens than this.
      max_depth: nodes at this depth are digits; the root has depth 1.
      max_args: most arguments of an operator, 2..32.

    Raises:
      ValueError: a value is out of range, or no tree can satisfy all of them.
    """

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10

    def __post_init__(self):
        if not 2 <= self.max_args <= 32:
            raise expected("max_args", "an integer of 2..32", self.max_args)
        if self.max_depth < 2:
            raise expected("max_depth", "at least 2, for an operator", self.max_depth)
        # Lengths are strictly between the two.
        least = max(self.min_length + 1, SHORTEST_OPERATOR) + 1
        if self.max_length < least:
            needed = f"at least {least} with min_length={self.min_length}"
            raise expected("max_length", needed, self.max_length)
        if self.longest() <= self.min_length:
            limits = f"max_depth={self.max_depth} and max_args={self.max_args}"
            needed = f"less than {self.longest()}, the longest tree with {limits}"
            raise expected("min_length", needed, self.min_length)

    def longest(self) -> int:
        """Number of tokens in the largest tree of this depth, at most `max_length`."""
        length = 1
        for _ in range(self.max_depth - 1):
            length = min(2 + self.max_args * length, self.max_length)
        return length


def encode(text: str) -> np.ndarray:
    """Returns the ids of an expression, `uint8 [length]`.

    Args:
      text: words separated by white space, as in `[MAX 2 [MIN 3 4 ] ]`. The parentheses
        of the file format are dropped; `X` is accepted for `]`.

    Raises:
      ValueError: a word is not a token.
    """
    words = text.translate(_DROP_PARENTHESES).split()
    try:
        return np.fromiter(map(_IDS.__getitem__, words), np.uint8, len(words))
    except KeyError as error:
        word = error.args[0]
        place = f"token {words.index(word)}"
        raise expected(place, f"one of {' '.join(_WORDS[1:])}", shorten(word)) from None


def decode(tokens: Iterable[int]) -> str:
    """Returns the text of token ids, without padding.

    Raises:
      ValueError: an id is not in 0..15.
    """
    ids = _checked_ids(tokens)
    return " ".join(_WORDS[i] for i in ids if i != PAD)


def evaluate(tokens: Iterable[int]) -> int:
    """Returns the value, 0..9, of one complete expression of token ids.

    Raises:
      ValueError: the ids are not exactly one expression.
    """
    stack: list[tuple[int, list[int]]] = [(PAD, [])]
    for position, token in enumerate(_checked_ids(tokens)):
        if token == PAD:
            raise expected(f"token {position}", "no padding", PAD)
        if token < MIN:
            stack[-1][1].append(token - DIGIT_0)
        elif token != CLOSE:
            stack.append((token, []))
        else:
            operator, values = stack.pop()
            if not values or not stack:
                got = "an operator without arguments" if stack else "nothing"
                raise expected(f"token {position}", "`]` after an operator", got)
            stack[-1][1].append(apply(operator, values))
    if len(stack) > 1:
        raise expected(
            "expression", "a `]` for each operator", f"{len(stack) - 1} fewer"
        )
    values = stack[0][1]
    if len(values) != 1:
        raise expected("tokens", "one expression", len(values))
    return values[0]


def to_nested(tokens: Iterable[int]) -> str:
    """Returns the binary form of the official files, of one complete expression.

    Applying x to y is written `( x y )`, and the last argument of an operator is its
    bracket, so that k arguments have k + 1 pairs of parentheses.
    """
    words: list[str] = []
    opened: list[int] = []  # Places in `words` of operators that are not closed.
    for token in _checked_ids(tokens):
        words.append(_WORDS[token])
        if MIN <= token < CLOSE:
            opened.append(len(words) - 1)
            continue
        closed = [opened.pop()] if token == CLOSE else []
        for place in (*closed, *opened[-1:]):
            words[place] = f"( {words[place]}"
            words.append(")")
    return " ".join(words)


class Tree(NamedTuple):
    """An expression as a drawing: digits and operators, indexed in token order.

    Attributes:
      places: index of the leaf from the left, and depth; an operator is above the
        middle of its arguments, and a closing bracket has no place.
      parents: the operator to which an argument belongs.
      words: the word of each.
    """

    places: dict[int, tuple[float, int]]
    parents: dict[int, int]
    words: dict[int, str]


def tree(tokens: np.ndarray) -> Tree:
    """Returns how to draw one complete expression of token ids."""
    places: dict[int, tuple[float, int]] = {}
    parents: dict[int, int] = {}
    opened: list[tuple[int, list[float]]] = []
    leaves = 0
    for index, token in enumerate(tokens):
        if MIN <= token < CLOSE:
            if opened:
                parents[index] = opened[-1][0]
            opened.append((index, []))
            continue
        if token == CLOSE:
            node, columns = opened.pop()
            column = float(np.mean(columns))
        else:
            node, column = index, float(leaves)
            leaves += 1
            if opened:
                parents[index] = opened[-1][0]
        places[node] = (column, len(opened) + 1)
        if opened:
            opened[-1][1].append(column)
    words = {node: _WORDS[tokens[node]].strip("[") for node in places}
    return Tree(places, parents, words)


def apply(operator: int, values: list[int]) -> int:
    """The value, 0..9, of an operator, as a token id, applied to digits.

    The median of an even number of digits is the mean of the middle two, rounded down;
    a sum is taken modulo 10.
    """
    if operator == MIN:
        return min(values)
    if operator == MAX:
        return max(values)
    if operator == SM:
        return sum(values) % 10
    return int(statistics.median(values))


def _checked_ids(tokens: Iterable[int]) -> list[int]:
    ids = np.asarray(tokens).reshape(-1).tolist()
    for token in ids:
        if not 0 <= token < VOCAB_SIZE:
            raise expected("token", f"an id of 0..{VOCAB_SIZE - 1}", token)
    return ids
