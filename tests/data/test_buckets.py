"""The lengths that batches are padded to."""

import itertools

import numpy as np
import pytest
from tree_batches import generate

from lra_jax.data import buckets as bucketing


def padded(lengths, buckets):
    assigned = bucketing.assign_buckets(lengths, buckets)
    return int(np.asarray(buckets)[assigned].sum())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_buckets", [1, 2, 3, 4])
def test_auto_leaves_the_fewest_padded_positions(seed, num_buckets):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 600, 200) ** 2 // 600 + 1
    longest = int(lengths.max())
    chosen = bucketing.choose_buckets(lengths, longest, 600, num_buckets)
    ends = [*range(64, chosen[-1], 64), chosen[-1]]
    best = min(
        padded(lengths, (*some, ends[-1]))
        for k in range(num_buckets)
        for some in itertools.combinations(ends[:-1], k)
    )
    assert padded(lengths, chosen) == best
    assert len(chosen) <= num_buckets


def test_auto_for_listops():
    lengths = generate(0, 1000, processes=1).lengths
    chosen = bucketing.choose_buckets(lengths, 1999, 2000)
    assert len(chosen) == bucketing.AUTO_BUCKETS == 8
    assert chosen[-1] == 2000
    assert padded(lengths, chosen) < 1.10 * lengths.sum()


@pytest.mark.parametrize(
    ("lengths", "max_length", "expected"),
    [
        ([1024] * 9, 1024, (1024,)),
        ([7], 2000, (64,)),
        ([7, 100], 100, (64, 100)),
        ([3], 20, (20,)),
        ([16_384] * 3, 16_384, (16_384,)),
    ],
)
def test_auto_takes_no_more_than_it_needs(lengths, max_length, expected):
    lengths = np.array(lengths)
    resolved = bucketing.resolve_buckets("auto", lengths, lengths.max(), max_length)
    assert resolved == expected


def test_a_longer_example_of_another_split_still_fits():
    assert bucketing.resolve_buckets("auto", np.array([10, 20]), 150, 300)[-1] == 192


@pytest.mark.parametrize(
    "spec", ["64,128,300", " 64, 128 ,300", (64, 128, 300), np.array([64, 128, 300])]
)
def test_given_lengths(spec):
    resolved = bucketing.resolve_buckets(spec, np.array([5]), 300, 400)
    assert resolved == (64, 128, 300)
    assert bucketing.resolve_buckets("none", np.array([5]), 300, 400) == (400,)
    assert bucketing.resolve_buckets("one", np.array([5]), 300, 400) == (320,)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("128,64,300", "increasing"),
        ((-5, 300), "increasing"),
        ("64,299", "reach the longest sequence, 300 tokens"),
        ("64,x", 'expected "auto", "one", "none" or'),
        ((64.0, 300.0), 'expected "auto"'),
    ],
)
def test_wrong_lengths(spec, message):
    with pytest.raises(ValueError, match=message):
        bucketing.resolve_buckets(spec, np.array([5]), 300, 400)


def test_assign():
    assigned = bucketing.assign_buckets(np.array([1, 64, 65, 128]), (64, 128))
    assert assigned.tolist() == [0, 0, 1, 1]
