"""Which examples make up which batch: a pure function of (seed, step).

The stream of training examples is one permutation of the data after another, epoch by
epoch. Each example goes to its bucket, and a bucket that holds `batch_size` examples
yields a batch. So batches come in the order of their last examples, examples left over
from an epoch join the next one, and every example is seen once per epoch.

No state is kept between steps: an epoch's batches follow from its own permutation and
the few before it that left examples over. A resumed run asks for its step and gets it;
memory does not grow with the length of the run.
"""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lra_jax.data import buckets as bucketing


class Batch(NamedTuple):
    """Attributes: `length`, the length to pad to; `ids`, `int32 [batch_size]`."""

    length: int
    ids: np.ndarray


class _Order(NamedTuple):
    """One epoch's examples by bucket, each in the order of the stream."""

    ids: list[np.ndarray]
    positions: list[np.ndarray]


class BatchPlan:
    """The batches of a training run; element i is the batch of step i.

    Args:
      lengths: `[n]` length of each example.
      buckets: increasing lengths to pad to; every example fits into the last.
      batch_size: examples per batch.
      seed: fixes the order.
      num_steps: batches in the run. Batch i does not depend on it.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        *,
        buckets: Sequence[int],
        batch_size: int,
        seed: int,
        num_steps: int,
    ):
        self._buckets = tuple(buckets)
        self._batch_size = batch_size
        self._seed = seed
        self._num_steps = num_steps
        bucket_of = bucketing.assign_buckets(lengths, self._buckets)
        self._bucket_of = bucket_of.astype(np.uint16)
        self._counts = np.bincount(bucket_of, minlength=len(self._buckets))
        self._epoch = functools.lru_cache(maxsize=2)(self._plan_epoch)
        self._order = functools.lru_cache(maxsize=4)(self._draw_order)

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> Batch:
        if not 0 <= step < self._num_steps:
            raise IndexError(step)
        epoch = self.epoch(step)
        bucket, ids = self._epoch(epoch)
        index = step - self._steps_before(epoch)
        return Batch(self._buckets[bucket[index]], ids[index])

    def epoch(self, step: int) -> int:
        """The epoch in which the batch of this step is completed, from 0."""
        # Every bucket holds back less than one batch.
        withheld = self._batch_size * (step + 1 + len(self._buckets))
        epochs = range(withheld // len(self._bucket_of) + 2)
        return bisect.bisect_right(epochs, step, key=self._steps_before) - 1

    def _steps_before(self, epoch: int) -> int:
        return int((epoch * self._counts // self._batch_size).sum())

    def _plan_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The bucket index, `[steps]`, and ids, `[steps, batch_size]`, of an epoch."""
        order = self._order(epoch)
        parts = []
        for bucket, count in enumerate(self._counts.tolist()):
            left_over = epoch * count % self._batch_size
            stream = np.concatenate(
                [self._left_over(epoch, bucket, left_over), order.ids[bucket]]
            )
            full = len(stream) // self._batch_size
            ids = stream[: full * self._batch_size].reshape(full, self._batch_size)
            last = np.arange(1, full + 1) * self._batch_size - left_over - 1
            completed = order.positions[bucket][last]
            parts.append((completed, np.full(full, bucket), ids))
        completed, buckets, ids = (
            np.concatenate(part) for part in zip(*parts, strict=True)
        )
        ranked = np.argsort(completed)
        return buckets[ranked], ids[ranked]

    def _left_over(self, epoch: int, bucket: int, count: int) -> np.ndarray:
        """The last `count` examples of a bucket before an epoch, in order."""
        pieces = []
        while count > 0:
            epoch -= 1
            pieces.append(self._order(epoch).ids[bucket][-count:])
            count -= len(pieces[-1])
        return np.concatenate([np.zeros(0, np.int32), *reversed(pieces)])

    def _draw_order(self, epoch: int) -> _Order:
        entropy = np.random.SeedSequence((self._seed, epoch))
        rng = np.random.Generator(np.random.Philox(entropy))
        permuted = rng.permutation(len(self._bucket_of)).astype(np.int32)
        ranked = np.argsort(self._bucket_of[permuted], kind="stable")
        cuts = np.cumsum(self._counts)[:-1]
        return _Order(np.split(permuted[ranked], cuts), np.split(ranked, cuts))


def plan_evaluation(
    lengths: np.ndarray, *, buckets: Sequence[int], batch_size: int
) -> list[tuple[Batch, int]]:
    """Plans batches that hold every example once, short examples first.

    Args:
      lengths: `[n]` length of each example.
      buckets: increasing lengths to pad to; every example fits into the last.
      batch_size: examples per batch. Only the last batch of a bucket may hold fewer;
        its last example is repeated to give it the same shape.

    Returns:
      Batches, each with the number of its examples that count.
    """
    bucket_of = bucketing.assign_buckets(lengths, buckets)
    plan = []
    for bucket, length in enumerate(buckets):
        members = np.flatnonzero(bucket_of == bucket).astype(np.int32)
        for start in range(0, len(members), batch_size):
            ids = members[start : start + batch_size]
            filled = np.pad(ids, (0, batch_size - len(ids)), mode="edge")
            plan.append((Batch(length, filled), len(ids)))
    return plan
