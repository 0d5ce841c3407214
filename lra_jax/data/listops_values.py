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
    own, so_far = evaluated(tokens)
    return np.where(own > 0, own, so_far) if running else own


def evaluated(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value of each operator, and the values on the way to it.

    Args:
      tokens: as in `values`.

    Returns:
      Two arrays as in `values`: the value of an operator at its brackets; and at the
      last token of each argument, a digit or a closing bracket, the value of the
      operator that it belongs to, applied to the arguments so far.
    """
    own, so_far = np.zeros_like(tokens), np.zeros_like(tokens)
    opened: list[tuple[int, list[int]]] = []
    for position, token in enumerate(tokens.tolist()):
        if MIN <= token < CLOSE:
            opened.append((position, []))
            continue
        if token == CLOSE:
            start, arguments = opened.pop()
            value = apply(int(tokens[start]), arguments)
            own[start] = own[position] = value + DIGIT_0
        elif token != PAD:
            value = token - DIGIT_0
        else:
            continue
        if opened:
            start, arguments = opened[-1]
            arguments.append(value)
            so_far[position] = apply(int(tokens[start]), arguments) + DIGIT_0
    return own, so_far
