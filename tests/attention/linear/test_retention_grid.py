"""Retention in two dimensions: its formula, its cost, and what a grid cannot be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.configs import get_preset
from lra_jax.tasks.encoder import encoder_config

from .. import dense
from ..mechanisms import assert_close, assert_rejects, fast_jit, inputs


def _formula(
    q: Any, k: Any, v: Any, grid: tuple[int, int], mask: Any = None, norm: Any = None
) -> np.ndarray:
    """Pixel by pixel, with the decay of the Manhattan distance; no rotation."""
    places = np.array(list(np.ndindex(grid)))
    apart = np.abs(places[:, None] - places[None]).sum(-1)
    slopes = -np.log(1 - 2.0 ** (-5 - np.arange(q.shape[2])))

    def head(slope, q, k, v, where):
        near = np.exp(-slope * apart)
        total = near.sum(1, keepdims=True)
        scores = q @ k.T / np.sqrt(q.shape[1]) * near[:, where] / np.sqrt(total)
        return scores @ v / np.maximum(np.abs(scores.sum(1, keepdims=True)), 1)

    out = dense.each_slope(q, k, v, mask, slopes, head)
    return dense.normed(out, norm, 3, 1e-6)


@pytest.mark.parametrize("grid", [(8, 3), (3, 8), (5, 2)])
def test_the_grid_is_its_formula(grid: tuple[int, int]) -> None:
    """Output, dense weights, padding, and gradients of both, in bands of 4, 3 and 1."""
    length = grid[0] * grid[1]
    q, k, v = (3 * x for x in inputs(1, length=length, query_length=length))
    mask = np.ones((2, length), bool)
    mask[0, [1, 4]] = mask[1, -2:] = False
    options = {"grid": grid, "rotate": False, "norm": None}

    @fast_jit
    def both(*arrays):
        def fast(*arrays):
            return attention.retention_attention(*arrays, mask, **options)

        def slow(q, k, v):
            weights = attention.retention_weights(q, k, mask, **options)
            return jnp.einsum("bnts,bsnv->btnv", weights, v, precision="highest")

        found = []
        for form in (fast, slow):
            out, pull = jax.vjp(form, *arrays)
            found.append((out, pull(jnp.cos(out))))
        return found

    fast, slow = both(q, k, v)
    wanted = _formula(q, k, v, grid, mask)
    assert_close(fast[0], wanted)
    assert_close(slow[0], wanted)
    assert_close(fast[1], slow[1], 1e-4)
    assert not np.asarray(fast[1][2])[~mask].any()


def test_gradients_are_those_of_the_matrix() -> None:
    """The derivative of a matrix that is written down, with slopes that are learned."""
    grid, apart = (4, 3), np.array(list(np.ndindex(4, 3)))
    apart = np.abs(apart[:, None] - apart[None]).sum(-1).astype("float32")
    arrays = [*inputs(2, length=12, query_length=12), np.array([0.1, 0.5], "float32")]

    def written(q, k, v, slopes):
        near = jnp.exp(-slopes[None, :, None, None] * apart[None, None])
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") / 2
        scores = scores * near / jnp.sqrt(near.sum(-1, keepdims=True))
        scores = scores / jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), 1)
        return jnp.einsum("bnts,bsnv->btnv", scores, v, precision="highest")

    def ours(q, k, v, slopes):
        return attention.retention_attention(
            q, k, v, slopes=slopes, grid=grid, rotate=False, norm=None
        )

    @fast_jit
    def slopes_of(*arrays):
        def loss(form):
            return jax.grad(lambda *x: jnp.sin(form(*x)).sum(), (0, 1, 2, 3))(*arrays)

        return loss(ours), loss(written)

    assert_close(*slopes_of(*arrays), 1e-4)


def test_one_row_is_one_dimension() -> None:
    q, k, v = inputs(3, length=8, query_length=8)
    call = attention.retention_attention
    assert_close(call(q, k, v, grid=(1, 8)), call(q, k, v))
    assert_close(call(q, k, v, grid=(8, 1)), call(q, k, v))


def test_no_matrix_is_made() -> None:
    arrays = [jax.ShapeDtypeStruct((1, 64 * 64, 1, 2), "float32")] * 3
    call = jax.jit(lambda *x: attention.retention_attention(*x, grid=(64, 64)))
    analysis = call.lower(*arrays).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4 * (64 * 64) ** 2 / 16


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grid": (2, 3)}, "grid: expected the length of query, 8, as rows"),
        ({"grid": (2, 4), "is_causal": True}, "is_causal: expected False with a grid"),
        (
            {"grid": (2, 4), "segment_ids": np.ones((2, 8), int)},
            "segment_ids: expected None with a grid",
        ),
    ],
)
def test_what_a_grid_cannot_be(options: dict[str, Any], words: str) -> None:
    q, k, v = inputs(4, length=8, query_length=8)
    assert_rejects(lambda: attention.retention_attention(q, k, v, **options), words)


def test_the_grid_of_a_task() -> None:
    """``--model.attention_options=grid=true`` is the task's own grid."""
    config = get_preset("image", "compact", "retention")
    config = config.replace(model={"attention_options": "grid=true"})
    encoder = encoder_config(config, (32, 32))
    assert encoder.attention(0).options == (("grid", (32, 32)),)
