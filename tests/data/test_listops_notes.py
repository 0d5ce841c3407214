"""The notes of a reader of ListOps expressions."""

import itertools

import numpy as np
import pytest
from tree_batches import generate

from lra_jax.data import listops_language as language
from lra_jax.data import listops_notes
from lra_jax.data.listops_notes import notes
from lra_jax.data.listops_values import values


@pytest.fixture
def punctual(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator is late."""
    monkeypatch.setattr(listops_notes, "_LATE", 0.0)


def digits(ids: np.ndarray) -> str:
    shown = {0: ".", language.CLOSE: "]"}
    return " ".join(shown.get(i, str(i - language.DIGIT_0)) for i in ids.tolist())


def drawn(tokens: np.ndarray, seeds: int = 20) -> list[tuple[str, str]]:
    """The different pairs of notes before and after a reading."""
    found = [notes(tokens, np.random.default_rng(seed)) for seed in range(seeds)]
    return sorted({(digits(x["notes"]), digits(x["targets"])) for x in found})


@pytest.mark.usefixtures("punctual")
def test_by_hand():
    tokens = language.encode("[SM 4 [MAX 2 7 ] 5 ]")
    none, first, second = ". . . . . . . .", ". . 7 2 7 7 . .", "6 4 ] 2 7 1 6 6"
    assert drawn(tokens) == sorted([(none, first), (first, second)])


@pytest.mark.usefixtures("punctual")
def test_brackets_of_used_arguments_stay_closed():
    tokens = language.encode("[MIN [SM 4 [MAX 2 7 ] 5 ] 3 ]")
    second, third = ". 6 4 ] 2 7 1 6 6 . .", "3 ] 4 ] 2 7 1 6 6 3 3"
    assert (second, third) in drawn(tokens)


@pytest.mark.usefixtures("punctual")
def test_what_is_cut_off_gets_no_note():
    tokens = language.encode("[SM 4 [MAX 2 7 ] 5 [MIN 1 2 ] ]")[:8]
    assert drawn(tokens) == [(". . . . . . . .", ". . 7 2 7 7 . .")]


def test_an_expression_without_a_complete_operator():
    tokens = language.encode("[SM 4 [MAX 2 7 ] ]")[:4]
    assert drawn(tokens) == [(". . . .", ". . . .")]


def test_padding_and_rows_of_several_expressions():
    one = language.encode("[MAX 2 3 ]")
    row = np.concatenate([one, one, np.zeros(3, one.dtype)])
    found = notes(row, np.random.default_rng(0))
    assert all(array.dtype == row.dtype for array in found.values())
    assert digits(found["targets"]) == "3 2 3 3 3 2 3 3 . . ."


def arguments(tokens: np.ndarray) -> dict[int, list[int]]:
    """The operators by their opening brackets, and their arguments' first tokens."""
    found, opened = {}, []
    for position, token in enumerate(tokens.tolist()):
        if token == language.CLOSE:
            opened.pop()
            continue
        if opened:
            found[opened[-1]].append(position)
        if token >= language.MIN:
            found[position] = []
            opened.append(position)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_reading_evaluates_what_it_can(seed: int) -> None:
    """Operators are evaluated exactly if all arguments are digits or noted, and the
    notes suffice: what has a digit at its opening bracket is an argument."""
    trees = generate(seed, 4, min_length=50, max_length=300, processes=1).split()
    late = 0
    for tokens, draw in itertools.product(trees, range(20)):
        found = notes(tokens, np.random.default_rng((seed, draw)))
        before, after = found["notes"], found["targets"]
        wanted = values(tokens)
        for start, inner in arguments(tokens).items():
            nested = [i for i in inner if tokens[i] >= language.MIN]
            ready = all(before[i] > 0 for i in nested)
            assert (after[start] > 0) == ready
            used = before[start] > 0, after[start] > 0
            for array, closed in zip((before, after), used, strict=True):
                assert array[start] in (0, wanted[start], language.CLOSE)
                assert all((array[i] == language.CLOSE) == closed for i in nested)
            late += ready and not nested and before.any() and not before[start]
    assert late
