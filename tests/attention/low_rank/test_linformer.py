"""Linformer: identities between its projections, and its parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from .. import dense
from ..mechanisms import (
    LENGTH,
    MASK,
    Case,
    assert_close,
    assert_rejects,
    fast_jit,
    inputs,
)

_rng = np.random.default_rng(5)
E = _rng.normal(size=(6, LENGTH)).astype("float32") / 2
F = _rng.normal(size=(6, LENGTH)).astype("float32") / 2


def formula(q, k, v, mask=None, *, key_projection, value_projection) -> np.ndarray:
    """The linear projection: slots are sums over the visible positions."""
    heads = q.shape[2]
    mask = np.ones(k.shape[:2], bool) if mask is None else np.asarray(mask)
    e, f = (np.asarray(x, np.float64) for x in (key_projection, value_projection))
    e, f = (np.broadcast_to(x, (heads, *x.shape[-2:])) for x in (e, f))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(q.shape[0]):
        where = np.flatnonzero(mask[b])
        for n in range(heads):
            kn, vn = n * k.shape[2] // heads, n * v.shape[2] // heads
            keys = e[n][:, where] @ np.asarray(k, np.float64)[b, where, kn]
            values = f[n][:, where] @ np.asarray(v, np.float64)[b, where, vn]
            logits = np.asarray(q, np.float64)[b, :, n] @ keys.T
            out[b, :, n] = dense.row_softmax(logits / np.sqrt(q.shape[-1])) @ values
    return out


def pooled(q, k, v, window, kind, mask=None) -> np.ndarray:
    """Mean or max over the visible positions of each window that has any."""
    reduce = {"mean": np.mean, "max": np.max}[kind]

    def head(q, k, v, where):
        groups = [where // window == slot for slot in np.unique(where // window)]
        keys = np.stack([reduce(k[group], axis=0) for group in groups])
        values = np.stack([reduce(v[group], axis=0) for group in groups])
        return dense.row_softmax(q @ keys.T / np.sqrt(q.shape[-1])) @ values

    return dense.each_head(q, k, v, mask, head)


CASE = Case(formula, {"key_projection": E, "value_projection": F}, unordered=("query",))


def test_a_convolution_pads_exactly() -> None:
    """As poolings do, whose formula has padding."""
    q, k, v = inputs(11, query_length=9, length=9)
    kernels = inputs(12, batch=1, query_length=4, length=4, heads=4)
    arrays = {
        "key_projection": kernels[0][0],
        "value_projection": kernels[1][0],
        "key_bias": kernels[2][0, 0, 0],
        "value_bias": kernels[2][0, 0, 1],
    }

    @fast_jit
    def call(q, k, v, mask=None):
        return attention.linformer_attention(
            q, k, v, mask=mask, projection="convolution", **arrays
        )

    mask = np.arange(9)[None] < np.array([3, 9])[:, None]
    together = call(q, k, v, mask)
    assert_close(together[1:], call(q[1:], k[1:], v[1:]))
    assert_close(together[:1], call(q[:1], k[:1, :3], v[:1, :3]))


def test_linformer_shares_one_matrix_for_keys_and_values() -> None:
    q, k, v = inputs(20)
    shared = attention.linformer_attention(q, k, v, E)
    assert_close(shared, attention.linformer_attention(q, k, v, E, E))


@pytest.mark.parametrize("sharing", ["headwise", "key_value", "none"])
def test_linformer_parameters_fit(sharing: str) -> None:
    q, k, v = inputs(25)
    sizes = {"max_length": LENGTH, "num_heads": 2, "head_dim": 4, "features": 5}
    arrays = attention.linformer_parameters(jax.random.key(0), sharing=sharing, **sizes)
    shape = (2, 5, LENGTH) if sharing == "none" else (5, LENGTH)
    expected = {"key_projection"} | (
        set() if sharing == "key_value" else {"value_projection"}
    )
    assert arrays.keys() == expected
    for array in arrays.values():
        assert array.shape == shape
        assert array.dtype == jnp.float32
        assert np.abs(np.asarray(array)).max() <= 5**-0.5
    call = functools.partial(attention.linformer_attention, q, k, v)
    assert jax.eval_shape(lambda: call(**arrays)).shape == v.shape


def test_linformer_parameters_of_the_other_projections() -> None:
    sizes = {"max_length": 10, "num_heads": 2, "head_dim": 4, "features": 4}
    key = jax.random.key(0)
    arrays = attention.linformer_parameters(key, projection="convolution", **sizes)
    assert {name: x.shape for name, x in arrays.items()} == {
        "key_projection": (3, 4, 4),
        "value_projection": (3, 4, 4),
    }
    del sizes["features"]
    wide = attention.linformer_parameters(key, **sizes)
    assert wide["key_projection"].shape == (10, 10)
    make = functools.partial(attention.linformer_parameters, key, **sizes)
    assert make(projection="mean") == {}


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_pooled_linformer_with_padding_and_a_short_last_window(kind: str) -> None:
    q, k, v = inputs(10, batch=3, query_length=5)
    options = {"mask": MASK, "projection": kind, "window": 3}
    call = functools.partial(attention.linformer_attention, **options)
    out = fast_jit(call)(q, k, v)
    assert_close(out, pooled(q, k, v, 3, kind, MASK))
    if kind == "mean":
        call = functools.partial(attention.linformer_weights, **options)
        assert_close(np.einsum("bnts,bsnh->btnh", fast_jit(call)(q, k), v), out)


Q, K, V = inputs(2, query_length=5)
KERNEL = np.ones((3, 4, 4), "float32")
CONVOLUTION = {"projection": "convolution", "key_projection": KERNEL}


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"key_projection": E[:, :6]}, ("at least S=7 columns", "(6, 6)", "longer")),
        ({"key_projection": E, "value_projection": F[:5]}, ("expected 6 slots", "(5,")),
        ({"key_projection": E, "value_projection": F[:, :4]}, ("at least S=7", "(6,")),
        (CONVOLUTION | {"key_projection": E}, ("a convolution kernel", "(6, 16)")),
        (CONVOLUTION | {"value_projection": KERNEL[:2]}, ("expected 3 positions",)),
        (CONVOLUTION | {"key_bias": np.ones(3)}, ("expected [H]=(4,)", "(3,)")),
    ],
)
def test_projections_that_do_not_fit(keywords: dict, parts: tuple) -> None:
    assert_rejects(lambda: attention.linformer_attention(Q, K, V, **keywords), *parts)


@pytest.mark.parametrize("projection", ["convolution", "max"])
def test_linformer_weights_need_sums_over_positions(projection: str) -> None:
    assert_rejects(
        lambda: attention.linformer_weights(Q, K, projection=projection),
        "projection: expected 'linear' or 'mean'",
        repr(projection),
    )
