"""The lines of a run's metrics: which reports are missing."""

import pytest

from lra_jax.training.metrics import missing_reports


@pytest.mark.parametrize(
    ("kept", "steps", "words"),
    [
        ([5, 10, 15], 15, ""),
        ([5, 10], 14, ""),
        ([5, 15], 15, "1 fewer, the first of step 10"),
        ([5, 10], 15, "1 fewer, the first of step 15"),
        ([], 15, "3 fewer, the first of step 5"),
    ],
)
def test_reports_that_are_missing(kept: list[int], steps: int, words: str):
    lines = [{"split": "train", "step": step} for step in kept]
    lines += [{"split": "valid", "step": step} for step in range(1, 16)]
    wanted = f"expected a report every 5 steps, got {words}" if words else ""
    assert missing_reports(lines, steps, 5) == wanted


def test_reports_of_pretraining_count():
    lines = [{"split": "pretrain", "step": 5}, {"split": "train", "step": 10}]
    assert missing_reports(lines, 10, 5) == ""
