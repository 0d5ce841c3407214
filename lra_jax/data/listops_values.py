"""The value of every expression within a ListOps expression.

An example has one label, the value of its root, but a hundred or more operators whose
values follow from its tokens alone. They are not additional data, but labels that the
task does not provide, and a report says so.
"""

import numpy as np

from lra_jax.data.listops_language import CLOSE, DIGIT_0, MIN, PAD, apply


def operator_values(
    tokens: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The ``targets`` of a row: ``values(tokens)``. Nothing is drawn."""
    return {"targets": values(tokens)}


def running_values(
    tokens: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """The ``targets`` of a row: ``values(tokens, running=True)``. Nothing is drawn."""
    return {"targets": values(tokens, running=True)}


def values(tokens: np.ndarray, *, running: bool = False) -> np.ndarray:
    """The value of each operator, at both of its brackets.

    Args:
      tokens: ids of one expression or several in a row, `[length]`; padding is skipped,
        and an operator whose closing bracket was cut off has no value.
      running: also give, at each digit, the value of its operator applied to the
        arguments so far.

    Returns:
      `[length]` of the same dtype: the id of the value's digit at each bracket, and 0,
      the padding id, elsewhere.
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
            start, arguments = opened[-1]
            arguments.append(value)
            if running and token != CLOSE:
                found[position] = apply(int(tokens[start]), arguments) + DIGIT_0
    return found
