"""Padded batches: their content, their order, and resuming."""

import json

import numpy as np
import pytest

from lra_jax.data import batches, listops, pipeline


def train(dataset, **changes):
    arguments = {"batch_size": 16, "seed": 0, "num_steps": 100, "buckets": "64,128,300"}
    return pipeline.train_iterator(dataset, **arguments | changes)


def assert_batches_equal(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype
        np.testing.assert_array_equal(one[name], two[name])


def test_elements(dataset):
    for batch in train(dataset, num_steps=40):
        assert list(batch) == ["tokens", "lengths", "labels"]
        tokens, lengths, labels = batch.values()
        assert tokens.dtype == np.uint8
        assert lengths.dtype == labels.dtype == np.int32
        assert tokens.shape[0] == len(lengths) == len(labels) == 16
        assert tokens.shape[1] in (64, 128, 300)
        for row, length, label in zip(tokens, lengths, labels, strict=True):
            assert np.all(row[:length] > 0)
            assert not row[length:].any()
            assert listops.evaluate(row[:length]) == label


def test_content_is_that_of_the_plan(dataset):
    planned = batches.BatchPlan(
        dataset.lengths("train"),
        buckets=(64, 128, 300),
        batch_size=16,
        seed=0,
        num_steps=100,
    )
    source = dataset.source("train")
    for step, batch in enumerate(train(dataset, num_steps=30)):
        length, ids = planned[step]
        assert batch["tokens"].shape == (16, length)
        for row, size, i in zip(batch["tokens"], batch["lengths"], ids, strict=True):
            np.testing.assert_array_equal(row[:size], source[int(i)]["tokens"])


def test_ends_after_num_steps(dataset):
    assert len(list(train(dataset, num_steps=7))) == 7


@pytest.mark.parametrize("num_threads", [0, 3])
def test_resume(dataset, num_threads):
    whole = list(train(dataset))
    first = train(dataset, num_threads=num_threads)
    for _ in range(41):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    assert state == {"next_index": 41}
    # A longer run of the same seed goes on where the shorter one would have.
    second = train(dataset, num_threads=num_threads, num_steps=150)
    second.set_state(state)
    for expected, got in zip(whole[41:], second, strict=False):
        assert_batches_equal(expected, got)


def test_orbax_takes_the_iterator(dataset, tmp_path):
    from orbax.checkpoint import v1 as ocp

    iterator = train(dataset)
    for _ in range(5):
        next(iterator)
    ocp.save_checkpointables(tmp_path / "checkpoint", {"data": iterator})
    expected = next(iterator)
    restored = train(dataset)
    ocp.load_checkpointables(tmp_path / "checkpoint", {"data": restored})
    assert_batches_equal(next(restored), expected)


def test_shards_make_up_the_global_batch(dataset):
    shards = [train(dataset, shard=(i, 4), num_steps=20) for i in range(4)]
    for batch, *parts in zip(train(dataset, num_steps=20), *shards, strict=True):
        joined = {k: np.concatenate([part[k] for part in parts]) for k in batch}
        assert_batches_equal(joined, batch)
    for name in ("valid", "test"):
        shards = [
            pipeline.EvalBatches(dataset, name, "auto", 16, shard=(i, 2))
            for i in (0, 1)
        ]
        whole = pipeline.EvalBatches(dataset, name, "auto", 16)
        for batch, *parts in zip(whole, *shards, strict=True):
            joined = {k: np.concatenate([part[k] for part in parts]) for k in batch}
            assert_batches_equal(joined, batch)


@pytest.mark.parametrize(
    ("buckets", "batch_size"), [("auto", 16), ("none", 64), ((100, 300), 7)]
)
def test_evaluation_counts_every_example_once(dataset, buckets, batch_size):
    for split in dataset.splits:
        batches = pipeline.EvalBatches(dataset, split, buckets, batch_size)
        total, labels = 0.0, []
        for batch in batches:
            assert batch["weights"].dtype == np.float32
            assert batch["weights"].shape == (batch_size,)
            assert batch["tokens"].shape[0] == batch_size
            assert batch["lengths"].min() > 0
            total += batch["weights"].sum()
            labels += batch["labels"][batch["weights"] > 0].tolist()
        assert total == dataset.num_examples(split)
        assert sorted(labels) == sorted(dataset.labels(split))
        assert len(list(batches)) == len(batches)  # a second pass


def test_evaluation_has_the_shapes_of_training(dataset):
    lengths = pipeline.bucket_lengths(dataset, "auto")
    assert lengths[-1] <= dataset.max_length
    seen = {b["tokens"].shape[1] for b in train(dataset, buckets="auto")}
    assert seen <= set(lengths)
    for split in dataset.splits:
        batches = pipeline.EvalBatches(dataset, split, "auto", 16)
        assert {b["tokens"].shape[1] for b in batches} <= set(lengths)


def test_no_buckets_is_the_fixed_length(dataset):
    batch = next(train(dataset, buckets="none"))
    assert batch["tokens"].shape == (16, 300)
    assert pipeline.bucket_lengths(dataset, "none") == (300,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buckets": "64,100"}, "reach the longest"),
        ({"shard": (2, 2)}, "index < count"),
        ({"shard": (0, 3)}, "multiple of the 3 shards, got 16"),
    ],
)
def test_wrong_arguments(dataset, changes, message):
    with pytest.raises(ValueError, match=message):
        train(dataset, **changes)


def test_no_two_random_streams_are_one(dataset):
    """Those of augmentation, and of the order of examples."""
    drawn = []

    def augment(tokens, generator):
        drawn.append(int(generator.integers(2**63)))
        return tokens

    settings = {"batch_size": 4, "num_steps": 8, "num_threads": 0}
    assert len(list(train(dataset, augment=augment, **settings))) == 8
    assert len(drawn) == 8 * 4
    for epoch in range(8):
        entropy = np.random.SeedSequence((0, epoch))
        order = np.random.Generator(np.random.Philox(entropy))
        drawn.append(int(order.integers(2**63)))
    assert len(set(drawn)) == len(drawn)
