"""Arguments that the causal engine refuses."""

import pytest

from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import assert_rejects


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"chunk": 0}, ("chunk: expected a positive int", "got 0")),
        ({"segment": -1}, ("segment: expected a positive int", "got -1")),
        ({"implementation": "scan"}, ("'loop', 'parallel' or None", "'scan'")),
    ],
)
def test_chunkings_that_do_not_fit(keywords: dict, parts: tuple) -> None:
    assert_rejects(lambda: Chunking(**keywords), *parts)
