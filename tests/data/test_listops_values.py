"""The values of the operators of an expression."""

import numpy as np
import pytest
from tree_batches import generate

from lra_jax.data import listops_language as language
from lra_jax.data.listops_values import values


def test_by_hand():
    tokens = language.encode("[MAX 2 [MIN 3 4 ] [SM 9 9 [MED 1 2 4 ] ] ]")
    found = values(tokens)
    assert found.dtype == tokens.dtype
    digits = np.where(found > 0, found - language.DIGIT_0 + 0.0, np.nan)
    none = np.nan
    wanted = [3, none, 3, none, none, 3, 0, none, none, 2, none, none, none, 2, 0, 3]
    np.testing.assert_array_equal(digits, wanted)


def test_running_values_by_hand():
    tokens = language.encode("[MAX 2 [MIN 3 4 ] 1 [SM 9 9 [MED 1 2 4 ] 3 ] ]")
    found = values(tokens, running=True) - language.DIGIT_0
    wanted = [3, 2, 3, 3, 3, 3, 3, 3, 9, 8, 2, 1, 1, 2, 2, 3, 3, 3]
    np.testing.assert_array_equal(found, wanted)


def test_arguments_that_were_cut_off_do_not_count():
    tokens = language.encode("[MAX 2 [SM 9 9 9 ] 7 ]")
    found = values(tokens[:5], running=True)
    assert found.tolist() == [0, 2 + language.DIGIT_0, 0] + [
        language.DIGIT_0 + value for value in (9, 8)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_every_operator_is_worth_what_its_expression_is(seed: int):
    trees = generate(seed, 3, min_length=50, max_length=200, processes=1)
    for tokens, label in zip(trees.split(), trees.labels, strict=True):
        found = values(np.pad(tokens, (0, 4)))
        assert found[0] - language.DIGIT_0 == label
        assert not found[len(tokens) :].any()
        for start in np.flatnonzero((tokens >= language.MIN) & (tokens <= language.SM)):
            steps = np.where(tokens >= language.MIN, 1, 0)
            steps = np.where(tokens == language.CLOSE, -1, steps)[start:]
            end = start + int(np.flatnonzero(np.cumsum(steps) == 0)[0])
            value = language.evaluate(tokens[start : end + 1])
            assert found[start] == found[end] == value + language.DIGIT_0


def test_what_is_cut_off_has_no_value():
    tokens = language.encode("[MAX 2 [MIN 3 4 ] [SM 9 9 ] ]")
    found = values(tokens[:8])
    assert found.nonzero()[0].tolist() == [2, 5]


def test_rows_of_several_expressions():
    one, other = language.encode("[MAX 2 3 ]"), language.encode("[MIN 2 3 ]")
    both = np.concatenate([one, other])
    np.testing.assert_array_equal(
        values(both), np.concatenate([values(one), values(other)])
    )
