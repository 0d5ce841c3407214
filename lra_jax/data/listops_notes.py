"""The notes that a reader of a ListOps expression takes, one reading after another.

In its first reading it evaluates the operators whose arguments are all digits, and
notes their values at their brackets. The next reading evaluates the operators whose
arguments are digits or noted, and so on. An operator that is evaluated closes the
brackets of its arguments: the value of an inner operator is needed once, and a reader
that passes it later must not take it for an argument of an outer one::

    expression   [SM   4  [MAX   2   7   ]   5   ]
    1st reading    .   .    7    2   7   7   .   .
    2nd reading    6   4    ]    2   7   1   6   6

So an opening bracket with a digit is an argument, whatever its own arguments were, and
everything else that is noted can be skipped. The last token of an argument is noted
with the value of its operator up to there: 4, 1 and 6 in the second reading, 2 and 7 in
the first. They are labels that the task does not provide, and a report says so.

Source of the idea, that the steps of an algorithm are taught one at a time from
correct beginnings: the hints of Veličković et al. 2022, "The CLRS Algorithmic Reasoning
Benchmark", arXiv:2205.15659.
"""

import numpy as np

from lra_jax.data.listops_language import CLOSE, MIN, PAD
from lra_jax.data.listops_values import evaluated

_LATE = 0.05
"""The share of operators that are noted one reading late.

A model makes mistakes, so it must also read expressions in which a part is late.
"""

_NEVER = np.iinfo(np.int32).max


def notes(tokens: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The notes before a random reading of an expression, and after it.

    Args:
      tokens: ids of one expression or several in a row, `[length]`; padding is skipped,
        and an operator whose closing bracket was cut off never gets a note.
      rng: draws the number of readings, from none to one less than all, and the late
        operators.

    Returns:
      ``notes``, before the reading, and ``targets``, after it, `[length]` of the same
      dtype: the id of a digit or of a closing bracket, or 0, the padding id, for no
      note.
    """
    own, outer, readable, noted = _readings(tokens, rng)
    complete = noted[noted < _NEVER]
    done = rng.integers(complete.max(initial=1))
    value, so_far = evaluated(tokens)
    first = np.where(value > 0, value, so_far)
    last = np.where(tokens == CLOSE, so_far, CLOSE)

    def after(count: int, reading: np.ndarray) -> np.ndarray:
        inner = np.where(reading[own] <= count, first, PAD)
        return np.where(reading[outer] <= count, last, inner).astype(tokens.dtype)

    return {"notes": after(done, noted), "targets": after(done + 1, readable)}


def _readings(
    tokens: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Which operators there are, and in which reading they are evaluated.

    Returns:
      own: for each token, the opening bracket of its operator, -1 if there is none.
      outer: for each bracket, that of the operator around its own; -1 elsewhere.
      readable: for each opening bracket, the first reading that can evaluate its
        operator, from 1; _NEVER if it was cut off, and at -1.
      noted: the reading that does.
    """
    size = len(tokens)
    late = rng.random(size) < _LATE
    own, outer = np.full(size, -1), np.full(size, -1)
    readable = np.full(size + 1, _NEVER, np.int32)
    noted = readable.copy()
    opened: list[tuple[int, int]] = []  # Opening bracket, first possible reading.
    for position, token in enumerate(tokens.tolist()):
        if MIN <= token < CLOSE:
            outer[position] = opened[-1][0] if opened else -1
            opened.append((position, 1))
        if opened and token != PAD:
            own[position] = opened[-1][0]
        if token == CLOSE:
            start, reading = opened.pop()
            outer[position] = outer[start]
            readable[start], noted[start] = reading, reading + late[start]
            if opened:
                around, first = opened[-1]
                opened[-1] = (around, max(first, int(noted[start]) + 1))
    return own, outer, readable, noted
