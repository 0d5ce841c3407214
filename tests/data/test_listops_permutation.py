"""Expressions with the arguments of their operators in another order."""

import collections

import numpy as np
import pytest
from tree_batches import generate

from lra_jax.data import listops_language as language
from lra_jax.data import pipeline
from lra_jax.data.listops_permutation import permute


def _tree(tokens: np.ndarray):
    """Nested tuples whose arguments are in no order."""
    stack = [[]]
    for token in tokens.tolist():
        if token == language.CLOSE:
            node = stack.pop()
            stack[-1].append((node[0], tuple(sorted(map(repr, node[1:])))))
        elif token >= language.MIN:
            stack.append([token])
        else:
            stack[-1].append(token)
    return stack[0]


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_is_the_same_but_for_the_order(seed: int):
    rng = np.random.default_rng(seed)
    trees = generate(seed, 10, min_length=50, max_length=200, processes=1)
    for tokens, label in zip(trees.split(), trees.labels, strict=True):
        again = permute(tokens, rng)
        assert not np.array_equal(again, tokens)
        assert _tree(again) == _tree(tokens)
        assert language.evaluate(again) == label


def test_every_order_is_equally_likely():
    tokens = language.encode("[MAX 1 2 [MIN 3 4 ] ]")
    rng = np.random.default_rng(0)
    drawn = collections.Counter(
        language.decode(permute(tokens, rng)) for _ in range(2400)
    )
    assert len(drawn) == 6 * 2
    # 200 of each expected; a standard deviation is 13.5.
    assert 140 < min(drawn.values()) <= max(drawn.values()) < 260


def test_padding_stays_at_the_end_and_one_digit_alone():
    tokens = np.concatenate([language.encode("[SM 1 2 3 ]"), np.zeros(3, np.uint8)])
    again = permute(tokens, np.random.default_rng(1))
    assert again.dtype == np.uint8
    assert (again[5:] == 0).all()
    assert sorted(again[1:4].tolist()) == sorted(tokens[1:4].tolist())
    digit = language.encode("7")
    np.testing.assert_array_equal(permute(digit, np.random.default_rng(0)), digit)


def test_batches_are_permuted_by_seed_and_step_alone(dataset):
    settings = {"batch_size": 4, "num_steps": 6, "augment": permute}
    one, two, shard, plain = (
        list(pipeline.train_iterator(dataset, **{"seed": 0, **settings, **more}))
        for more in ({}, {}, {"shard": (1, 2)}, {"augment": None})
    )
    other = list(pipeline.train_iterator(dataset, seed=1, **settings))
    for a, b, part, whole in zip(one, two, shard, plain, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
        np.testing.assert_array_equal(a["tokens"][2:], part["tokens"])
        assert not np.array_equal(a["tokens"], whole["tokens"])
        np.testing.assert_array_equal(a["labels"], whole["labels"])
        rows = zip(a["tokens"], a["lengths"], a["labels"], strict=True)
        for row, length, label in rows:
            assert language.evaluate(row[:length]) == label
    assert not np.array_equal(one[0]["tokens"], other[0]["tokens"])
