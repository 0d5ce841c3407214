"""Labels as files have them: a class each, any number of classes, or a number."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from lra_jax.data.checks import shorten
from lra_jax.data.dataset import SequenceDataset
from lra_jax.errors import expected

Kind = Literal["classes", "multi", "numbers"]

# How a label lists several classes.
SEPARATORS = re.compile(r"[,;|]")


def parse_number(name: str, text: str) -> float:
    """The number of a label; ``name`` is that of the errors."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= np.finfo(np.float32).max:
        raise expected(name, "a finite float32 number", shorten(text))
    return number


def names_of(label: str, kind: Kind) -> list[str]:
    """The classes of a label; none of a number."""
    if kind == "multi":
        return [name for x in SEPARATORS.split(label) if (name := x.strip())]
    return [label] if kind == "classes" else []


def code_labels(
    dataset: SequenceDataset, kind: Kind, train: Sequence[Any]
) -> Callable[[Sequence[Any]], np.ndarray]:
    """Records in a dataset what its labels are, judging by its training split.

    Returns:
      ``(labels) -> array``: integers `[n]`, for ``multi`` 0 and 1 `[n, classes]`, for
      ``numbers`` float32 `[n]` without the mean and the deviation of training.

    Raises:
      ValueError: too few classes.
    """
    if kind == "numbers":
        numbers = np.array(train, np.float64)
        mean, deviation = float(numbers.mean()), float(numbers.std()) or 1.0
        dataset.num_classes, dataset.metric = 1, "r2"
        dataset.scale = mean, deviation
        return lambda labels: (
            (np.array(labels, np.float64) - mean) / deviation
        ).astype(np.float32)
    words = sorted({x for label in train for x in names_of(label, kind)}, key=_in_order)
    if len(words) < 2 - (kind == "multi"):
        raise expected("--data.path", "two classes or more", f"{words}")
    dataset.num_classes, dataset.classes = len(words), class_words(words)
    ids = {word: index for index, word in enumerate(words)}
    if kind == "classes":
        return lambda labels: np.array([ids[label] for label in labels], np.int32)
    dataset.metric, dataset.several = "f1", True

    def mark(labels: Sequence[str]) -> np.ndarray:
        marks = np.zeros((len(labels), len(words)), np.int32)
        for row, label in enumerate(labels):
            marks[row, [ids[name] for name in names_of(label, kind)]] = 1
        return marks

    return mark


def class_words(words: list[str]) -> list[str] | None:
    """The words of classes; None if they are the numbers from 0."""
    return None if words == [*map(str, range(len(words)))] else words


def _in_order(word: str) -> tuple[float, str]:
    """Numbers by their value, before other words, "nan" among them."""
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    return (math.inf if math.isnan(number) else number), word
