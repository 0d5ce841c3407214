"""Linformer: identities between its projections, and its parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from ..mechanisms import LENGTH, E, F, assert_close, fast_jit, inputs, jitted

MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7], bool)


def test_linformer_with_permuted_columns_ignores_the_order_of_keys() -> None:
    q, k, v = inputs(6)
    order = np.random.default_rng(1).permutation(7)
    got = attention.linformer_attention(
        q, k[:, order], v[:, order], E[:, order], F[:, order]
    )
    assert_close(got, attention.linformer_attention(q, k, v, E, F))


def test_mean_pooling_ignores_the_order_within_a_window() -> None:
    q, k, v = inputs(7, length=8)
    order = np.array([3, 1, 0, 2, 4, 7, 6, 5])
    call = fast_jit(
        lambda *a: attention.linformer_attention(*a, projection="mean", window=4)
    )
    assert_close(call(q, k[:, order], v[:, order]), call(q, k, v))


@pytest.mark.parametrize("projection", ["mean", "max", "convolution"])
def test_windowed_linformer_pads_exactly(projection: str) -> None:
    q, k, v = inputs(11, query_length=9, length=9)
    kernels = inputs(12, batch=1, query_length=4, length=4, heads=4)
    keywords = {
        "mean": {"window": 4},
        "max": {"window": 4},
        "convolution": {
            "key_projection": kernels[0][0],
            "value_projection": kernels[1][0],
            "key_bias": kernels[2][0, 0, 0],
            "value_bias": kernels[2][0, 0, 1],
        },
    }[projection]

    @fast_jit
    def call(q, k, v, mask=None):
        return attention.linformer_attention(
            q, k, v, mask=mask, projection=projection, **keywords
        )

    mask = np.arange(9)[None] < np.array([3, 9])[:, None]
    together = call(q, k, v, mask)
    assert_close(together[1:], call(q[1:], k[1:], v[1:]))
    assert_close(together[:1], call(q[:1], k[:1, :3], v[:1, :3]))


def test_linformer_with_identity_is_softmax() -> None:
    q, k, v = inputs(18)
    identity = np.eye(7, dtype="float32")
    got = fast_jit(attention.linformer_attention)(q, k, v, identity, identity)
    assert_close(got, jitted("softmax")(q, k, v))


def test_linformer_slices_what_zero_padding_would_do() -> None:
    q, k, v = inputs(19)
    room = [(0, 0), (0, LENGTH - 7), (0, 0), (0, 0)]
    padded = attention.linformer_attention(q, np.pad(k, room), np.pad(v, room), E, F)
    assert_close(attention.linformer_attention(q, k, v, E, F), padded)


def test_linformer_shares_one_matrix_for_keys_and_values() -> None:
    q, k, v = inputs(20)
    shared = attention.linformer_attention(q, k, v, E)
    assert_close(shared, attention.linformer_attention(q, k, v, E, E))


def test_a_convolution_can_be_mean_pooling() -> None:
    q, k, v = inputs(21, length=8)
    kernel = np.tile(np.eye(4, dtype="float32") / 4, (4, 1, 1))

    @fast_jit
    def both(*a):
        got = attention.linformer_attention(*a, kernel, projection="convolution")
        return got, attention.linformer_attention(*a, projection="mean", window=4)

    assert_close(*both(q, k, v))


def test_linformer_weights_of_mean_pooling() -> None:
    q, k, v = inputs(22, batch=3)
    keywords = {"mask": MASK, "projection": "mean", "window": 3}

    @fast_jit
    def both(q, k, v):
        matrix = attention.linformer_weights(q, k, **keywords)
        return matrix, attention.linformer_attention(q, k, v, **keywords)

    matrix, out = both(q, k, v)
    assert_close(np.einsum("bnts,bsnh->btnh", matrix, v), out)


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
    assert attention.linformer_parameters(key, projection="mean", **sizes) == {}
    wide = attention.linformer_parameters(key, **sizes | {"features": 256})
    assert wide["key_projection"].shape == (10, 10)
