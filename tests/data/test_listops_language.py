"""The tokens, the evaluator and the file form of ListOps expressions."""

import numpy as np
import pytest

from lra_jax.data import listops_language as language


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 3 1 2 ]", 1),
        ("[MAX 3 1 2 ]", 3),
        ("[MED 9 1 4 ]", 4),
        ("[MED 3 2 ]", 2),  # 2.5, truncated
        ("[MED 8 1 4 7 ]", 5),  # 5.5, truncated
        ("[SM 9 8 7 ]", 4),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[SM [MED 1 2 3 ] [MAX 5 [SM 9 9 ] ] 1 ]", 1),
        ("( ( ( [SM 3 ) 4 ) ] )", 7),
        ("[SM 3 4 X", 7),
    ],
)
def test_evaluate(text, value):
    assert language.evaluate(language.encode(text)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected one expression, got 0"),
        ("1 2", "expected one expression, got 2"),
        ("[SM 1 2", "a `]` for each operator, got 1 fewer"),
        ("[SM 1 2 ] ]", "token 4: expected `]` after an operator, got nothing"),
        ("[SM ]", "without arguments"),
    ],
)
def test_evaluate_refuses_what_is_no_expression(text, message):
    with pytest.raises(ValueError, match=message):
        language.evaluate(language.encode(text))


def test_evaluate_refuses_padding_and_unknown_ids():
    with pytest.raises(ValueError, match="token 1: expected no padding, got 0"):
        language.evaluate([1, 0])
    with pytest.raises(ValueError, match=r"token: expected an id of 0\.\.15, got 16"):
        language.evaluate([16])


def test_the_table_is_fixed():
    """A checkpoint reads these ids in every process, for ever."""
    tokens = language.encode("0 1 2 3 4 5 6 7 8 9 [MIN [MAX [MED [SM ]")
    np.testing.assert_array_equal(tokens, np.arange(1, 16))
    assert tokens.dtype == np.uint8
    assert language.VOCAB_SIZE == 16


def test_decode_leaves_padding_out():
    text = "[MAX 2 [MIN 4 7 ] 0 ]"
    tokens = language.encode(text)
    assert language.decode(np.pad(tokens, (0, 3))) == text
    with pytest.raises(ValueError, match="got -1"):
        language.decode([-1])


@pytest.mark.parametrize("word", ["10", "[FIRST", "[sm", "[", "x", "[MIN3", "٣"])
def test_encode_refuses_unknown_words(word):
    with pytest.raises(ValueError, match=r"token 2: expected one of"):
        language.encode(f"[MAX 1 {word} 2 ]")


@pytest.mark.parametrize(
    ("text", "official"),
    [
        ("5", "5"),
        ("[MAX 2 9 ]", "( ( ( [MAX 2 ) 9 ) ] )"),
        ("[MIN [SM 1 2 ] 3 4 ]", "( ( ( ( [MIN ( ( ( [SM 1 ) 2 ) ] ) ) 3 ) 4 ) ] )"),
    ],
)
def test_nested_form(text, official):
    tokens = language.encode(text)
    assert language.to_nested(tokens) == official
    np.testing.assert_array_equal(language.encode(official), tokens)
