"""The uncertainty of an accuracy, and the scores of some tasks besides it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any


def own_scores(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of a task's own scores in all results, ``test_NAME_best``."""
    usual = ("test_accuracy_best", "test_loss_best")
    return [
        name
        for name in results[0]
        if re.fullmatch("test_.+_best", name)
        and name not in usual
        and all(isinstance(result.get(name), int | float) for result in results)
    ]


def standard_error(accuracy: float, examples: int) -> float:
    """Half of Wilson's 68 % interval, in percent.

    It is close to ``sqrt(p (1 - p) / n)`` with p = ``accuracy / 100``, and above 0 even
    if all examples were right, or none (Wilson 1927, "Probable Inference, the Law of
    Succession, and Statistical Inference", with z = 1).

    Args:
      accuracy: in percent.
      examples: how many it was measured on.
    """
    p, n = accuracy / 100, examples
    return 100 * (p * (1 - p) / n + 1 / (4 * n * n)) ** 0.5 / (1 + 1 / n)
