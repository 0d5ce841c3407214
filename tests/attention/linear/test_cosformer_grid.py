"""cosFormer in two dimensions: its formula, and what a grid cannot be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention, models
from lra_jax.configs import get_preset
from lra_jax.tasks.encoder import encoder_config

from .. import dense
from ..mechanisms import assert_close, assert_rejects, fast_jit, inputs

GRID = (2, 4)


def _formula(q: Any, k: Any, v: Any, mask: Any = None) -> np.ndarray:
    """Pixel by pixel, with the cosines of both distances."""
    places = np.array([(row, column) for row in range(2) for column in range(4)])

    def head(q, k, v, where):
        distance = places[:, None] - places[where][None]
        near = np.cos(np.pi / 2 * distance / GRID).prod(-1)
        scores = np.maximum(q, 0) @ np.maximum(k, 0).T * near
        return scores @ v / np.maximum(scores.sum(-1, keepdims=True), 1e-6)

    return dense.each_head(q, k, v, mask, head)


@pytest.mark.parametrize("max_length", [4, np.array([8, 3])])
def test_a_grid_ignores_the_length(max_length: Any) -> None:
    q, k, v = inputs(3, length=8, query_length=8)
    wanted = attention.cosformer_attention(q, k, v, grid=GRID)
    got = attention.cosformer_attention(q, k, v, max_length=max_length, grid=GRID)
    np.testing.assert_array_equal(got, wanted)


def test_the_grid_is_its_formula() -> None:
    """Output, dense weights, padding, and gradients of both."""
    q, k, v = inputs(1, length=8, query_length=8)
    mask = np.array([[1, 1, 1, 1, 1, 0, 1, 1], [1] * 6 + [0] * 2], bool)

    @fast_jit
    def both(mask, *arrays):
        def fast(*arrays):
            return attention.cosformer_attention(*arrays, mask, grid=GRID)

        def slow(q, k, v):
            weights = attention.cosformer_weights(q, k, mask, grid=GRID)
            return jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")

        found = []
        for form in (fast, slow):
            out, pull = jax.vjp(form, *arrays)
            found.append((out, pull(jnp.cos(out))))
        return found

    fast, slow = both(mask, q, k, v)
    assert_close(fast[0], _formula(q, k, v, mask))
    assert_close(slow[0], _formula(q, k, v, mask))
    assert_close(fast[1], slow[1], 1e-4)
    hidden = ~mask
    assert not np.asarray(fast[1][2])[hidden].any()


def test_one_row_is_one_dimension() -> None:
    q, k, v = inputs(2, length=8, query_length=8)
    call = attention.cosformer_attention
    assert_close(call(q, k, v, grid=(1, 8)), call(q, k, v))


def test_the_cost_is_linear() -> None:
    """No array of T x S is made."""
    arrays = [jax.ShapeDtypeStruct((1, 64 * 64, 1, 2), "float32")] * 3
    call = jax.jit(lambda *x: attention.cosformer_attention(*x, grid=(64, 64)))
    analysis = call.lower(*arrays).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4 * (64 * 64) ** 2 / 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": (2, 3)}, "grid: expected the length of query, 8, as rows"),
        ({"grid": 8}, r"grid: expected (rows, columns), got 8"),
        ({"grid": (2, 0)}, "grid: expected a positive int, got 0"),
        ({"grid": GRID, "is_causal": True}, "is_causal: expected False with a grid"),
        ({"grid": GRID, "reweight": False}, "reweight: expected True with a grid"),
        (
            {"grid": GRID, "segment_ids": np.ones((2, 8), int)},
            "segment_ids: expected None with a grid",
        ),
        ({"grid": GRID, "implementation": "pallas"}, "implementation: expected"),
    ],
)
def test_what_a_grid_cannot_be(options: dict[str, Any], words: str) -> None:
    q, k, v = inputs(3, length=8, query_length=8)
    assert_rejects(lambda: attention.cosformer_attention(q, k, v, **options), words)


def test_the_grid_of_a_task() -> None:
    """``--model.attention_options=grid=true`` is the task's own grid."""
    config = get_preset("image", "compact", "cosformer")
    config = config.replace(model={"attention_options": "grid=true,eps=1e-5"})
    encoder = encoder_config(config, (32, 32))
    wanted = (("grid", (32, 32)), ("eps", 1e-5))
    assert encoder.attention(0).options == wanted
    with pytest.raises(ValueError, match=r"--model.attention_options: grid: expected"):
        encoder_config(config, None)
    small = models.EncoderConfig(
        num_layers=1, embed_dim=4, max_length=8, options={"grid": True}, grid=GRID
    )
    assert small.attention(0).keywords["grid"] == GRID
    for more in ({"cls_token": True}, {"is_causal": True}):
        (name,) = more
        with pytest.raises(ValueError, match=f"{name}: expected False with the option"):
            models.EncoderConfig(
                max_length=8, options={"grid": True}, grid=GRID, **more
            )
