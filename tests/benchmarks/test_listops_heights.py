"""The heights of ListOps' operators."""

import numpy as np
from listops_heights import operators

from lra_jax.data.listops_language import MAX, MED, MIN, SM, encode


def test_heights_of_operators() -> None:
    tokens = encode("[MAX 2 [MIN 3 4 ] [SM 9 9 [MED 1 2 4 ] ] ]")
    found = operators(np.pad(tokens, (0, 3)))
    assert [tuple(operator) for operator in found] == [
        (MIN, 2, 5, 1),
        (MED, 9, 13, 1),
        (SM, 6, 14, 2),
        (MAX, 0, 15, 3),
    ]
