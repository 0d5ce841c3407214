"""Reformer: its hashes and chunks, its gradients, and what it refuses."""

import functools

import chex
import numpy as np

from lra_jax import attention

from .. import dense
from ..mechanisms import (
    Case,
    assert_close,
    fast_jit,
    inputs,
    pulled_back,
)


def formula(
    q, k, v, mask=None, *, chunk, num_buckets, num_hashes=2, seed=0
) -> np.ndarray:
    """Position by position; hidden ones do not exist."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    rng = np.random.default_rng(seed)
    rotations = rng.normal(size=(num_hashes, q.shape[3], num_buckets // 2))
    for (b, n), queries, _, values, real in dense.samples(q, k, v, mask):
        where = np.flatnonzero(real)
        x, values = queries[where], values[where]
        met = np.zeros((len(x), len(x)), bool)
        for rotation in rotations:
            turned = x @ rotation
            bucket = np.concatenate([turned, -turned], -1).argmax(-1)
            places = sorted(range(len(x)), key=lambda i: (bucket[i], i))
            number = {i: place // chunk for place, i in enumerate(places)}
            for i in range(len(x)):
                for j in range(len(x)):
                    near = number[i] - number[j] in (0, 1)
                    met[i, j] |= bucket[i] == bucket[j] and near
        np.fill_diagonal(met, False)
        np.fill_diagonal(met, ~met.any(-1))
        keys = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
        out[b, where, n] = dense.masked_rows(
            x @ keys.T / np.sqrt(x.shape[1]), met, values
        )
    return out


CASE = Case(formula, {"chunk": 2, "num_buckets": 4}, mean=True)

REFORMER = {"chunk": 4, "num_buckets": 6, "num_hashes": 3, "seed": 2}


def test_there_can_be_as_many_chunks_as_buckets() -> None:
    """The arena's layer: of its 10 buckets, 10 chunks, however long the sequence is."""
    q, _, v = inputs(2, 1, query_length=23, length=23)
    run = functools.partial(attention.reformer_attention, q, q, v, num_buckets=6)
    np.testing.assert_array_equal(run(chunk=None), run(chunk=4))
    np.testing.assert_array_equal(run(chunk=None, max_length=42), run(chunk=7))


def test_reformer_over_many_chunks_with_padding_anywhere() -> None:
    q, _, v = inputs(5, 3, query_length=50, length=50)
    mask = np.stack([np.arange(50) < 37, np.arange(50) >= 20, np.arange(50) % 3 > 0])
    run = functools.partial(attention.reformer_attention, **REFORMER)
    both = pulled_back(lambda q, v: run(q, q, v, mask))
    out, gradients = both(q, v)
    assert_close(out, formula(q, q, v, mask, **REFORMER))
    assert not np.asarray(out)[~mask].any()
    for garbage in (np.float32(1e6), np.float32(np.nan)):
        dirty = (np.where(mask[:, :, None, None], x, garbage) for x in (q, v))
        chex.assert_trees_all_equal(both(*dirty), (out, gradients))
    for gradient in gradients:
        assert not np.asarray(gradient)[~mask].any()
        assert np.asarray(gradient)[mask].any()


def test_reformer_alone_attends_to_itself() -> None:
    """Of two opposite vectors each has a bucket of its own."""
    q, _, v = inputs(8, 1, query_length=2, length=2, heads=1)
    q[:, 1] = -q[:, 0]
    keywords = {"chunk": 2, "num_buckets": 2}
    run = fast_jit(lambda q, v: attention.reformer_attention(q, q, v, **keywords))
    assert_close(run(q, v), v)
    same = np.concatenate([q[:, :1], q[:, :1]], 1)
    assert_close(run(same, v), v[:, ::-1])


def test_reformer_takes_its_buckets_from_max_length() -> None:
    q, k, v = inputs(9, query_length=10, length=10)
    run = fast_jit(
        functools.partial(attention.reformer_attention, chunk=2),
        static_argnames=("max_length", "num_buckets"),
    )
    for more, count in (({}, 6), ({"max_length": 16}, 8), ({"max_length": 17}, 10)):
        assert_close(run(q, k, v, **more), run(q, k, v, num_buckets=count), 1e-6)


Q, K, V = inputs(10, query_length=5)
