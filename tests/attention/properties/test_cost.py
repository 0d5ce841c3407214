"""Memory that grows with the length and not with its square."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import largest_of_slope

WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("nystrom", {"conv_weight": np.ones((1, 5), "float32")}),
    ("sinkhorn", {"sort_kernel": np.ones((1, 4, 64), "float32")}),
    ("reformer", {"num_buckets": 16}),
    ("fnet", {}),
]
PATTERNS: list[tuple[str, dict[str, Any]]] = [
    ("local", {"window": 16}),
    ("local", {"block": 32}),
    ("longformer", {"window": 16}),
    ("bigbird", {"block": 8}),
    ("sparse", {}),
    ("sparse", {"pattern": "fixed"}),
]
CASES = [(*case, causal) for case in PATTERNS for causal in (False, True)]
CASES += [(*case, False) for case in WHOLE]


@pytest.mark.parametrize(("name", "options", "causal"), CASES)
def test_no_array_grows_with_the_square(
    name: str, options: dict[str, Any], causal: bool
) -> None:
    function = getattr(attention, f"{name}_attention")

    def attend(x):
        mask = jnp.ones(x.shape[:2], bool)
        return function(x, x, x, mask=mask, is_causal=causal, **options)

    short, long = (largest_of_slope(attend, length) for length in (1024, 4096))
    power = 1.5 if name == "sparse" else 1
    assert long <= 1.01 * 4**power * short
    assert long < 4096**2 / 4
