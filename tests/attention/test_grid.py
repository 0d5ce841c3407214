"""Images as grids: cosFormer's formula, their cost, and what a grid cannot be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention, models
from lra_jax.configs import get_preset
from lra_jax.tasks.base import encoder_config

from . import dense
from .mechanisms import assert_close, assert_rejects, inputs, pulled_back, takes

GRID = (2, 4)
every = pytest.mark.parametrize("name", ["cosformer", "hgrn"])


def _formula(q: Any, k: Any, v: Any, mask: Any) -> np.ndarray:
    """Pixel by pixel, with the cosines of both distances."""
    places = np.array([(row, column) for row in range(2) for column in range(4)])

    def head(q, k, v, where):
        distance = places[:, None] - places[where][None]
        near = np.cos(np.pi / 2 * distance / GRID).prod(-1)
        scores = np.maximum(q, 0) @ np.maximum(k, 0).T * near
        return scores @ v / np.maximum(scores.sum(-1, keepdims=True), 1e-6)

    return dense.each_head(q, k, v, mask, head)


def test_cosformer_in_a_grid_is_its_formula() -> None:
    """Output, dense weights, padding, and gradients of both."""
    arrays = inputs(1, length=8, query_length=8)
    mask = np.array([[1, 1, 1, 1, 1, 0, 1, 1], [1] * 6 + [0] * 2], bool)

    def linear(*arrays):
        return attention.cosformer_attention(*arrays, mask, grid=GRID)

    def quadratic(q, k, v):
        weights = attention.cosformer_weights(q, k, mask, grid=GRID)
        return jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")

    (out, gradients), (dense_out, dense_gradients) = (
        pulled_back(form)(*arrays) for form in (linear, quadratic)
    )
    assert_close(out, _formula(*arrays, mask))
    assert_close(dense_out, out)
    assert_close(gradients, dense_gradients, 1e-4)
    assert not np.asarray(gradients[2])[~mask].any()


@pytest.mark.parametrize("max_length", [4, np.array([8, 3])])
def test_a_grid_ignores_the_length(max_length: Any) -> None:
    arrays = inputs(3, length=8, query_length=8)
    expected = attention.cosformer_attention(*arrays, grid=GRID)
    got = attention.cosformer_attention(*arrays, max_length=max_length, grid=GRID)
    np.testing.assert_array_equal(got, expected)


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
        ({"is_causal": True}, "is_causal: expected False with a grid"),
        ({"segment_ids": np.ones((2, 8), int)}, "segment_ids: expected None with a"),
        ({"implementation": "pallas"}, "implementation: expected"),
    ],
)
def test_what_a_grid_cannot_be(name: str, options: dict[str, Any], words: str) -> None:
    arrays = inputs(3, length=8, query_length=8)
    call = attention.resolve(name).attention
    if all(takes(name, option) for option in options):
        assert_rejects(lambda: call(*arrays, **{"grid": GRID} | options), words)


@every
def test_the_grid_of_a_task(name: str) -> None:
    """``--model.attention_options=grid=true`` is the task's own grid."""
    config = get_preset("image", "compact", name)
    config = config.replace(model={"attention_options": "grid=true,eps=1e-5"})
    encoder = encoder_config(config, (32, 32))
    assert encoder.block_options[0] == {"grid": (32, 32), "eps": 1e-5}
    with pytest.raises(ValueError, match=r"^grid: expected images, as in an image"):
        encoder_config(config, None)


def test_the_grid_of_a_model() -> None:
    options = {"attention_options": {"grid": True}, "grid": GRID, "max_length": 8}
    assert models.ModelConfig(**options).block_options[0] == {"grid": GRID}
    for more in ({"pooling": "cls"}, {"is_causal": True}):
        (name,) = more
        with pytest.raises(ValueError, match=f"{name}: expected .* with grid"):
            models.ModelConfig(**options, **more).check()
