"""Gated attention units and FLASH beyond the common tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.call import Call
from lra_jax.attention.gated_units import gated

from ..mechanisms import inputs, keywords
from . import units

# And how many queries and keys they make of one projection.
UNITS = {"gau": 2, "flash": 4}


def function(name: str, **more: Any):
    options = keywords(name, 2, 4) | more
    return functools.partial(getattr(attention, f"{name}_attention"), **options)


def test_buckets_of_distances() -> None:
    for causal in (False, True):
        distances = np.arange(-300, 301)
        expected = [units.bucket(int(d), causal) for d in distances]
        assert gated._bucket(distances, causal).tolist() == expected
        table = jnp.arange(32.0)[:, None]
        x = jnp.ones((1, 40, 1, 4))
        call = Call.of(x, x, x, is_causal=causal)
        matrix = np.asarray(gated.bias(call, table, 40))[0]
        expected = [[units.bucket(j - i, causal) for j in range(40)] for i in range(40)]
        assert matrix.tolist() == expected


@pytest.mark.parametrize(("name", "count"), UNITS.items())
def test_parameters_and_widths(name: str, count: int) -> None:
    make = getattr(attention, f"{name}_parameters")
    made = jax.eval_shape(
        functools.partial(make, num_heads=2, head_dim=3), jax.random.key(0)
    )
    shapes = {k: x.shape for k, x in made.items()}
    expected = {
        "scale": (count, 2, 3),
        "offset": (count, 2, 3),
        "relative_bias": (32, 2),
    }
    assert shapes == expected
    layout = getattr(attention, f"{name}_layout")
    assert layout(64) == (1, 128, 128)
    assert layout(64, query_dim=5, expansion=1.5) == (1, 5, 96)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: function("flash")(q, q[:, :5], q[:, :5]), "no cross form, got S=5"),
        (lambda q: attention.flash_attention(q[..., :3], q[..., :3], q), "odd head"),
    ],
)
def test_errors(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(inputs(7)[0])
