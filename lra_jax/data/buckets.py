"""Lengths to pad to.

A jitted step needs few shapes, and padding costs as much as tokens. ListOps trees have
501..1999 tokens, 1035 on average: padding all to 2000 gives 1.93 positions per token,
the best eight lengths 1.09.
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from lra_jax.errors import expected

Buckets = str | Sequence[int]
"""`"auto"`, `"one"`, `"none"`, `"768,1024,2000"` or a sequence of increasing
lengths."""

AUTO_BUCKETS = 8
_MULTIPLE = 64
_MAX_CANDIDATES = 64


def resolve_buckets(
    buckets: Buckets, lengths: np.ndarray, longest: int, max_length: int
) -> tuple[int, ...]:
    """Returns the lengths to pad to, in increasing order.

    Args:
      buckets: `"auto"` chooses them by `choose_buckets`, and `"one"` a single one;
        `"none"` pads everything to `max_length`, as LRA does; otherwise the lengths
        themselves.
      lengths: `[n]` lengths to choose by, those of the training split.
      longest: the longest sequence that must fit, in any split.
      max_length: the longest that the task allows.

    Raises:
      ValueError: they are not increasing positive integers, or the last is too short.
    """
    resolved = parse_buckets(buckets)
    if not resolved:
        if buckets == "none":
            return (max_length,)
        most = 1 if buckets == "one" else AUTO_BUCKETS
        return choose_buckets(lengths, longest, max_length, most)
    if resolved[-1] < longest:
        needed = f"lengths that reach the longest sequence, {longest} tokens"
        raise expected("buckets", needed, repr(buckets))
    return resolved


def choose_buckets(
    lengths: np.ndarray,
    longest: int,
    max_length: int,
    num_buckets: int = AUTO_BUCKETS,
) -> tuple[int, ...]:
    """Returns at most `num_buckets` lengths that leave the fewest padded positions.

    The lengths are multiples of 64 (or of 128 and more beyond 4096 tokens), which suit
    accelerators; the last may be `max_length`. They are found by dynamic programming
    over all choices.

    Args:
      lengths: `[n]` lengths to choose by.
      longest: the last bucket is at least this long.
      max_length: no bucket is longer than this.
      num_buckets: each costs one compilation of the step.
    """
    multiple = _MULTIPLE * -(-max_length // (_MULTIPLE * _MAX_CANDIDATES))
    last = min(-(-longest // multiple) * multiple, max_length)
    ends = np.array([*range(multiple, last, multiple), last])
    below = np.searchsorted(np.sort(lengths), ends, side="right")
    # positions[i, j]: of a bucket that ends at i, with the previous one ending at j.
    positions = (below[:, None] - below[None, :]) * ends[:, None]
    earlier = np.tri(len(ends), k=-1, dtype=bool)
    cost = below * ends
    costs, choices = [cost], []
    for _ in range(num_buckets - 1):
        total = np.where(earlier, cost[None, :] + positions, np.iinfo(np.int64).max)
        choice = total.argmin(axis=1)
        cost = np.minimum(total.min(axis=1), costs[0])
        choices.append(choice)
        costs.append(cost)
    used = int(np.argmin([cost[-1] for cost in costs]))
    index, chosen = len(ends) - 1, [last]
    for choice in reversed(choices[:used]):
        index = int(choice[index])
        chosen.append(int(ends[index]))
    return tuple(chosen[::-1])


def assign_buckets(lengths: np.ndarray, buckets: Sequence[int]) -> np.ndarray:
    """Returns the index of the smallest bucket that holds each length, `[n]`."""
    return np.searchsorted(np.asarray(buckets), lengths, side="left")


def parse_buckets(buckets: Buckets) -> tuple[int, ...]:
    """Returns the lengths in a text; none for "auto", "one" and "none".

    Raises:
      ValueError: they are not increasing positive integers.
    """
    if isinstance(buckets, str) and buckets in ("auto", "one", "none"):
        return ()
    is_text = isinstance(buckets, str)
    parts: Any = buckets.split(",") if is_text else buckets
    try:
        resolved = tuple(map(int if is_text else operator.index, parts))
    except (TypeError, ValueError):
        resolved = ()
    if not resolved or [0, *resolved] != sorted({0, *resolved}):
        needed = '"auto", "one", "none" or increasing lengths, as in "768,1024,2000"'
        raise expected("buckets", needed, repr(buckets))
    return resolved
