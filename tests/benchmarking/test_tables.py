"""The numbers in a benchmark's tables."""

import math

import pytest

from lra_jax.benchmarking.tables import significant


@pytest.mark.parametrize(
    ("value", "digits", "words"),
    [
        (0.012345, 3, "0.0123"),
        (2.0, 3, "2"),
        (99.96, 2, "100"),
        (121.7, 2, "120"),
        (1_234.5, 3, "1,230"),
        (123_456.7, 2, "120,000"),
        (math.nan, 3, "nan"),
        (math.inf, 2, "inf"),
    ],
)
def test_numbers_are_rounded_and_written_in_full(
    value: float, digits: int, words: str
) -> None:
    assert significant(value, digits) == words
