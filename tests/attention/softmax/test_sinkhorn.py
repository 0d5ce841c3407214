"""Sinkhorn attention: its sorting, its options, and what it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import attention

from .. import dense
from ..mechanisms import (
    LENGTH,
    Case,
    assert_close,
    assert_rejects,
    fast_jit,
    inputs,
    keywords,
)

SIZES = {"max_length": LENGTH, "num_heads": 2, "head_dim": 4}


def formula(
    q,
    k,
    v,
    mask=None,
    *,
    sort_kernel,
    sort_bias=None,
    block,
    iterations=8,
    temperature=0.75,
) -> np.ndarray:
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for (b, n), queries, keys, values, real in dense.samples(q, k, v, mask):
        sizes = [real[s : s + block].sum() for s in range(0, len(keys), block)]
        live = np.flatnonzero(sizes)
        if live.size == 0:
            continue
        fill = [(0, -len(keys) % block), (0, 0)]
        keys_by_block = np.pad(keys, fill).reshape(-1, block, keys.shape[1])[live]
        values_by_block = np.pad(values, fill).reshape(-1, block, values.shape[1])[live]
        real_by_block = np.pad(real, fill[0]).reshape(-1, block)[live]
        means = keys_by_block.sum(1) / np.array(sizes)[live, None]
        scores = means @ np.asarray(sort_kernel, np.float64)[n][:, live]
        if sort_bias is not None:
            scores = scores + np.asarray(sort_bias, np.float64)[n, live]
        sorting = scores / temperature
        for axis in (1, 0) * iterations:
            sorting = sorting - np.logaddexp.reduce(sorting, axis, keepdims=True)
        sorting = np.exp(sorting)
        for number, kept in enumerate(live):
            rows = slice(kept * block, min((kept + 1) * block, len(queries)))
            both_keys = np.concatenate(
                [keys_by_block[number], np.tensordot(sorting[number], keys_by_block, 1)]
            )
            both_values = np.concatenate(
                [
                    values_by_block[number],
                    np.tensordot(sorting[number], values_by_block, 1),
                ]
            )
            seen = np.concatenate([real_by_block[number], real_by_block.any(0)])
            scores = queries[rows] @ both_keys.T / np.sqrt(queries.shape[1])
            seen = np.broadcast_to(seen, scores.shape)
            out[b, rows, n] = dense.masked_rows(scores, seen, both_values)
    return out


def arrays(heads: int, head_dim: int) -> dict[str, Any]:
    rng = np.random.default_rng(heads)
    kernel = rng.normal(size=(heads, head_dim, LENGTH)).astype("float32")
    bias = rng.normal(size=(heads, LENGTH)).astype("float32")
    return {"block": 3, "sort_kernel": kernel, "sort_bias": bias}


CASE = Case(formula, arrays)


def test_sinkhorn_sorts_by_a_doubly_stochastic_matrix_and_learns_it() -> None:
    q, k, v = inputs(3, 1, query_length=12, length=12)
    options = keywords("sinkhorn", 2, 4)

    @fast_jit
    def slope(kernel, mask):
        def loss(kernel):
            more = options | {"sort_kernel": kernel, "iterations": 50}
            matrix = attention.sinkhorn_weights(q, k, mask=mask, **more)
            out = attention.sinkhorn_attention(q, k, v, mask=mask, **more)
            return jnp.sin(out).sum(), matrix

        return jax.grad(loss, has_aux=True)(kernel)

    kernel = options["sort_kernel"]
    gradient, matrix = slope(kernel, np.ones((1, 12), bool))
    assert_close(np.asarray(matrix).sum(-1), np.ones((1, 2, 12)), 1e-5)
    # As published the permutation cancels; here it has a gradient.
    assert np.abs(np.asarray(gradient)[..., :4]).min() > 0
    assert not np.asarray(gradient)[..., 4:].any()
    # Of two real blocks only those two can change places.
    gradient, matrix = slope(kernel, np.arange(12)[None] < 6)
    assert not np.asarray(matrix)[..., 6:].any()
    assert np.asarray(gradient)[..., :2].any()
    assert not np.asarray(gradient)[..., 2:].any()


def test_sinkhorn_parameters() -> None:
    made = attention.sinkhorn_parameters(jax.random.key(0), block=5, **SIZES)
    assert made["sort_kernel"].shape == (2, 4, 4)
    assert made["sort_bias"].shape == (2, 4)


def test_a_sorting_of_too_few_blocks() -> None:
    options = {"sort_kernel": np.ones((2, 4, 3), "float32"), "block": 2}
    call = functools.partial(attention.sinkhorn_attention, *inputs(10), **options)
    assert_rejects(call, "sort_kernel: expected at least 4 columns", "longer")
