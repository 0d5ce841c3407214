"""Tests of state tracking: trained on short sequences, tested on longer ones.

Source of parity and modular arithmetic: NX-AI/xlstm, experiments/data/formal_language,
whose code produced the published numbers (Grazzi et al. 2024, "Unlocking State-Tracking
in Linear RNNs Through Negative Eigenvalues", arXiv:2411.12537). As there, lengths
include the answer; what the model reads is one token shorter. All lengths from least to
most are equally likely, except that a length without sequences becomes the nearest one
that the task has, as in the original.
"""

import functools
from collections.abc import Callable
from typing import Any

from lra_jax.data import memory
from lra_jax.data.suites import brackets, groups, modular, parity

Draw = Callable[..., memory.Examples]

# Functions that generate examples: (rng, count, least, most) -> Examples.
GENERATORS: dict[str, Draw] = {
    "parity": parity.examples,
    "modular": modular.examples,
    "modular-brackets": brackets.examples,
    "s5": functools.partial(groups.examples, group="s5"),
    "a5": functools.partial(groups.examples, group="a5"),
}

SHORTEST = 3
"""Shortest length: one token, an end marker or another token, and the answer."""


def prepare(
    *,
    task: str,
    seed: int,
    num_train: int,
    num_valid: int,
    num_test: int,
    min_length: int,
    max_length: int,
    test_min: int,
    test_max: int,
    parts: str,
    vocab_size: int,
    num_classes: int,
) -> memory.MemoryDataset:
    """Draws the examples of a test.

    Args:
      task: its name.
      seed: fixes every example.
      num_train, num_valid, num_test: number of examples; a part has `num_test`.
      min_length, max_length: lengths of training sequences.
      test_min, test_max: lengths of validation and test sequences.
      parts: lengths that are tested separately, as in ``"64,256"``.
      vocab_size, num_classes: of the task.

    Raises:
      ValueError: lengths that are not in increasing order, or below `SHORTEST`.
    """
    memory.check_range("min_length", min_length, "max_length", max_length, SHORTEST)
    memory.check_range("test_min", test_min, "test_max", test_max, SHORTEST)
    draw = GENERATORS[task]

    def between(least: int, most: int) -> memory.Generator:
        return functools.partial(draw, least=least, most=most)

    tested: dict[str, tuple[int, Any]] = {
        str(length): (num_test, between(length, length))
        for length in memory.parse_lengths("--data.parts", parts, SHORTEST)
    }
    return memory.generate(
        task,
        seed,
        {
            "train": (num_train, between(min_length, max_length)),
            "valid": (num_valid, between(test_min, test_max)),
            "test": (num_test, between(test_min, test_max)),
            **tested,
        },
        vocab_size=vocab_size,
        num_classes=num_classes,
    )
