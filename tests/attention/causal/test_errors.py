"""What the causal engine refuses."""

import functools

import numpy as np
import pytest

from lra_jax.attention.causal.sums import Chunking, causal_linear

from ..mechanisms import assert_rejects, inputs

K, _, V = inputs(2)


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"chunk": 0}, ("chunk: expected a positive int", "got 0")),
        ({"block": -1}, ("block: expected a positive int", "got -1")),
        ({"implementation": "scan"}, ("'loop', 'parallel' or None", "'scan'")),
    ],
)
def test_chunkings_that_do_not_fit(keywords: dict, parts: tuple) -> None:
    assert_rejects(lambda: Chunking(**keywords), *parts)


def test_slopes_are_one_for_each_head() -> None:
    heads_first = [np.swapaxes(x, 1, 2) for x in (K, K, V)]
    slopes = np.ones(3, "float32")
    call = functools.partial(causal_linear, *heads_first, slopes=slopes)
    assert_rejects(call, "slopes: expected one for each head", "[N]=(2,)", "(3,)")
