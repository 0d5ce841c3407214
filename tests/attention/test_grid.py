"""Images as grids: their cost, one row of them, and what a grid cannot be."""

from typing import Any

import jax
import numpy as np
import pytest

from lra_jax import attention, models
from lra_jax.configs import get_preset
from lra_jax.tasks.encoder import encoder_config

from .mechanisms import assert_close, assert_rejects, inputs

GRID = (2, 4)
every = pytest.mark.parametrize("name", ["cosformer", "hgrn"])


def test_one_row_is_one_dimension() -> None:
    q, k, v = inputs(2, length=8, query_length=8)
    call = attention.cosformer_attention
    assert_close(call(q, k, v, grid=(1, 8)), call(q, k, v))
    assert_close(call(q, k, v, grid=(8, 1)), call(q, k, v))


@every
def test_the_cost_is_linear(name: str) -> None:
    """No array of T x S is made."""
    arrays = [jax.ShapeDtypeStruct((1, 64 * 64, 1, 2), "float32")] * 3
    attend = attention.resolve(name).attention
    call = jax.jit(lambda *x: attend(*x, grid=(64, 64)))
    analysis = call.lower(*arrays).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4 * (64 * 64) ** 2 / 16


@every
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": (2, 3)}, "grid: expected the length of query, 8, as rows"),
        ({"grid": 8}, r"grid: expected (rows, columns), got 8"),
        ({"grid": (2, 0)}, "grid: expected a positive int, got 0"),
        ({"grid": GRID, "is_causal": True}, "is_causal: expected False with a grid"),
        (
            {"grid": GRID, "segment_ids": np.ones((2, 8), int)},
            "segment_ids: expected None with a grid",
        ),
    ],
)
def test_what_a_grid_cannot_be(name: str, options: dict[str, Any], words: str) -> None:
    arrays = inputs(3, length=8, query_length=8)
    assert_rejects(lambda: attention.resolve(name).attention(*arrays, **options), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reweight": False}, "reweight: expected True with a grid"),
        ({"implementation": "pallas"}, "implementation: expected"),
    ],
)
def test_what_cosformer_needs(options: dict[str, Any], words: str) -> None:
    arrays = inputs(3, length=8, query_length=8)
    call = attention.cosformer_attention
    assert_rejects(lambda: call(*arrays, grid=GRID, **options), words)


@every
def test_the_grid_of_a_task(name: str) -> None:
    """``--model.attention_options=grid=true`` is the task's own grid."""
    config = get_preset("image", "compact", name)
    config = config.replace(model={"attention_options": "grid=true,eps=1e-5"})
    encoder = encoder_config(config, (32, 32))
    wanted = (("grid", (32, 32)), ("eps", 1e-5))
    assert encoder.layers[0].options == wanted
    with pytest.raises(ValueError, match=r"^grid: expected an image task"):
        encoder_config(config, None)


def test_the_grid_of_a_model() -> None:
    small = models.EncoderConfig(
        num_layers=1, embed_dim=4, max_length=8, options={"grid": True}, grid=GRID
    )
    assert small.layers[0].keywords["grid"] == GRID
    for more in ({"cls_token": True}, {"is_causal": True}):
        (name,) = more
        with pytest.raises(ValueError, match=f"{name}: expected False with the option"):
            _ = models.EncoderConfig(
                max_length=8, options={"grid": True}, grid=GRID, **more
            ).layers
