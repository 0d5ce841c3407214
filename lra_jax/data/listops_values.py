"""The value of every expression within a ListOps expression.

An example has one label, the value of its root, and a hundred operators and more whose
values follow from its tokens alone. They are no other data, but labels that the task
does not give: a report says so.
"""

import numpy as np

from lra_jax.data.listops_language import CLOSE, DIGIT_0, MIN, PAD, apply


def values(tokens: np.ndarray) -> np.ndarray:
    """The digits that brackets are worth, at both brackets of each operator.

    Args:
      tokens: ids of one expression or several in a row, `[length]`; padding is skipped,
        and an operator whose bracket is cut off has no value.

    Returns:
      `[length]` of the same dtype: the id of the value's digit where a bracket is, and
      0, the id of padding, elsewhere.
    """
    found = np.zeros_like(tokens)
    opened: list[tuple[int, list[int]]] = []
    for position, token in enumerate(tokens.tolist()):
        if MIN <= token < CLOSE:
            opened.append((position, []))
            continue
        if token == CLOSE:
            start, arguments = opened.pop()
            value = apply(int(tokens[start]), arguments)
            found[start] = found[position] = value + DIGIT_0
        elif token != PAD:
            value = token - DIGIT_0
        else:
            continue
        if opened:
            opened[-1][1].append(value)
    return found
