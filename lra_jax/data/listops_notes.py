"""The notes that a reader of a ListOps expression takes, one reading after another.

In its first reading it evaluates the operators whose arguments are all digits, and
notes their values at their tokens. The next reading evaluates the operators whose
arguments are digits or noted, and so on::

    expression   [SM   4  [MAX   2   7   ]   5   ]
    1st reading    .   .    7    2   7   7   .   .
    2nd reading    6   4    7    2   7   7   6   6

A digit's note is the value of its operator up to that digit. They are labels that the
task does not provide, and a report says so.

Source of the idea, that the steps of an algorithm are taught one at a time from
correct beginnings: the hints of Veličković et al. 2022, "The CLRS Algorithmic Reasoning
Benchmark", arXiv:2205.15659.
"""

import numpy as np

from lra_jax.data.listops_language import CLOSE, MIN, PAD
from lra_jax.data.listops_values import values

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
      dtype: the id of a digit, or 0, the padding id, for no note.
    """
    readable, noted = _readings(tokens, rng)
    complete = noted[noted < _NEVER]
    done = rng.integers(complete.max(initial=1))
    found = values(tokens, running=True)
    return {
        "notes": np.where(noted <= done, found, PAD).astype(tokens.dtype),
        "targets": np.where(readable <= done + 1, found, PAD).astype(tokens.dtype),
    }


def _readings(
    tokens: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """For each token, the first reading that can evaluate its operator, from 1, and the
    one that does: int32 `[length]` each."""
    late = rng.random(len(tokens)) < _LATE
    owner = np.full(len(tokens), -1)
    readable = np.full(len(tokens), _NEVER, np.int32)
    noted = readable.copy()
    opened: list[tuple[int, int]] = []  # Opening bracket, first possible reading.
    for position, token in enumerate(tokens.tolist()):
        if MIN <= token < CLOSE:
            opened.append((position, 1))
        if opened and token != PAD:
            owner[position] = opened[-1][0]
        if token == CLOSE:
            start, reading = opened.pop()
            readable[start], noted[start] = reading, reading + late[start]
            if opened:
                outer, first = opened[-1]
                opened[-1] = (outer, max(first, int(noted[start]) + 1))
    own = owner >= 0
    return (
        np.where(own, readable[owner], _NEVER),
        np.where(own, noted[owner], _NEVER),
    )
