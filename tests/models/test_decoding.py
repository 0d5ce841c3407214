"""How much a decoder keeps."""

from typing import Any

import pytest
from flax import nnx

from lra_jax.models import TransformerEncoder
from lra_jax.models.decoding import state_size

# Two blocks of two heads of four columns.
SIZES = {"num_layers": 2, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "max_length": 6}


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"mechanism": "linear"}, 2 * 2 * (4 * 4 + 4)),
        ({"mechanism": "softmax"}, 2 * 2 * 6 * (4 + 4)),
        ({"mechanism": "hgrn"}, 2 * 16),
        ({"mechanism": "hgrn", "attention_options": {"rotates": True}}, 2 * 16),
        ({"mechanism": "luna"}, None),
        ({"mechanism": "linear", "is_causal": False}, None),
    ],
)
def test_the_numbers_kept(settings: dict[str, Any], count: int | None):
    settings = SIZES | {"is_causal": True} | settings
    assert state_size(TransformerEncoder(5, rngs=nnx.Rngs(0), **settings)) == count
