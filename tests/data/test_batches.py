"""The plan of which example is in which batch."""

import collections

import numpy as np
import pytest

from lra_jax.data import batches
from lra_jax.data import buckets as bucketing

BUCKETS = (10, 20, 50)


@pytest.fixture
def lengths():
    """One example alone in the last bucket: its batches span many epochs."""
    return np.append(np.random.default_rng(0).integers(1, 21, 100), 50)


def plan(lengths, num_steps=400, seed=0, batch_size=8, buckets=BUCKETS):
    return batches.BatchPlan(
        lengths, buckets=buckets, batch_size=batch_size, seed=seed, num_steps=num_steps
    )


def streamed(lengths, epochs, seed, batch_size, buckets=BUCKETS):
    """The definition: walk the stream, fill the buckets, emit what is full."""
    waiting = collections.defaultdict(list)
    assigned = bucketing.assign_buckets(lengths, buckets)
    for epoch in range(epochs):
        rng = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((seed, epoch)))
        )
        for example in rng.permutation(len(lengths)).tolist():
            bucket = waiting[assigned[example]]
            bucket.append(example)
            if len(bucket) == batch_size:
                yield epoch, buckets[assigned[example]], list(bucket)
                bucket.clear()


@pytest.mark.parametrize("batch_size", [1, 3, 8, 64, 250])
def test_follows_the_definition(lengths, batch_size):
    expected = list(streamed(lengths, 40, 5, batch_size))
    planned = plan(lengths, len(expected), seed=5, batch_size=batch_size)
    assert len(planned) == len(expected)
    for step, (epoch, length, ids) in enumerate(expected):
        assert planned[step].length == length
        assert planned[step].ids.tolist() == ids
        assert planned.epoch(step) == epoch


def test_a_step_does_not_depend_on_what_was_asked_before(lengths):
    in_order = plan(lengths)
    expected = [in_order[step] for step in range(400)]
    backwards = plan(lengths, num_steps=10**7)
    for step in reversed(range(400)):
        np.testing.assert_array_equal(backwards[step].ids, expected[step].ids)
    far = 9_999_999
    np.testing.assert_array_equal(
        backwards[far].ids, plan(lengths, num_steps=10**7)[far].ids
    )


def test_the_seed_decides(lengths):
    ids = [
        np.concatenate([plan(lengths, seed=s)[i].ids for i in range(9)]) for s in (0, 1)
    ]
    assert not np.array_equal(*ids)


def test_range(lengths):
    planned = plan(lengths, num_steps=3)
    for step in (-1, 3):
        with pytest.raises(IndexError):
            planned[step]
    assert len(list(planned)) == 3


@pytest.mark.parametrize("batch_size", [1, 7, 8, 300])
def test_evaluation_holds_every_example_once(lengths, batch_size):
    planned = batches.plan_evaluation(lengths, buckets=BUCKETS, batch_size=batch_size)
    counted = np.concatenate([batch.ids[:count] for batch, count in planned])
    assert sorted(counted) == list(range(len(lengths)))
    partial = [batch.length for batch, count in planned if count < batch_size]
    assert len(partial) == len(set(partial))
    for batch, count in planned:
        assert batch.ids.shape == (batch_size,)
        assert count > 0
        assert np.all(lengths[batch.ids] <= batch.length)
