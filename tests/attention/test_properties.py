"""What must hold whatever the numbers: sums, symmetries, padding, gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention

from .mechanisms import (
    LENGTH,
    NAMES,
    E,
    F,
    assert_close,
    fast_jit,
    inputs,
    run,
    weights,
)

MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7], bool)


@pytest.mark.parametrize("name", ["softmax", "linear", "cosformer"])
def test_weights_are_positive_and_sum_to_one(name: str) -> None:
    q, k, _ = inputs(1, batch=3, query_length=5)
    q = np.abs(q)  # no dead rows
    matrix = np.asarray(fast_jit(weights(name))(q, k, MASK))
    assert (matrix >= 0).all()
    assert_close(matrix[:2].sum(-1), np.ones((2, 2, 5)), 1e-5)
    assert not matrix[2].any()


@pytest.mark.parametrize("name", ["softmax", "linear", "cosformer"])
def test_constant_values_come_out_constant(name: str) -> None:
    q, k, v = inputs(2)
    out = fast_jit(run(name))(np.abs(q), np.abs(k), np.full_like(v, 3))
    assert_close(out, np.full_like(v, 3), 1e-5)


def test_cosformer_sees_only_differences_of_positions() -> None:
    q, k, v = inputs(3)
    shift = LENGTH - 7

    def moved(x: np.ndarray) -> np.ndarray:
        return np.pad(x, [(0, 0), (shift, 0), (0, 0), (0, 0)])

    mask = np.arange(LENGTH)[None] >= shift
    call = fast_jit(run("cosformer"))
    later = call(moved(q), moved(k), moved(v), mask)
    assert_close(later[:, shift:], call(q, k, v))


def test_cosformer_with_a_long_max_length_is_linear_attention() -> None:
    q, k, v = inputs(4)

    @fast_jit
    def both(*a):
        distant = attention.cosformer_attention(*a, max_length=10**6)
        return distant, attention.linear_attention(*a, feature_map="relu")

    assert_close(*both(q, k, v), 1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_order_of_queries_and_of_keys(name: str) -> None:
    q, k, v = inputs(5, query_length=6)
    rows = np.array([3, 5, 0, 1, 2, 4])
    columns = np.array([6, 2, 0, 4, 1, 3, 5])
    call = fast_jit(run(name))
    plain = np.asarray(call(q, k, v))
    by_query = call(q[:, rows], k, v)
    by_key = np.asarray(call(q, k[:, columns], v[:, columns]))
    if name != "cosformer":
        assert_close(by_query, plain[:, rows])
    if name in ("softmax", "linear", "flow"):
        assert_close(by_key, plain)
    else:
        assert np.abs(by_key - plain).max() > 1e-3, "these know the positions"


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


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 12), (12, 5)])
def test_flow_is_conserved(queries: int, keys: int) -> None:
    q, k, _ = inputs(8, query_length=queries, length=keys)
    terms = fast_jit(lambda q, k: attention.flow_terms(q, k, clip=None))(q, k)
    a, b = (1 / (1 + np.exp(-x)) for x in (q, k))
    assert_close(terms.incoming, np.einsum("btnh,bsnh->btn", a, b), 1e-5)
    assert_close(terms.outgoing, np.einsum("bsnh,btnh->bsn", b, a), 1e-5)
    everywhere = np.ones((2, 2))
    assert_close(terms.conserved_source.sum(1), queries * everywhere, 1e-5)
    assert_close(terms.conserved_sink.sum(1), keys * everywhere, 1e-5)
    assert_close(terms.competition.sum(1), keys * everywhere, 1e-5)
    assert (np.asarray(terms.allocation) > 0.5).all()
    assert (np.asarray(terms.allocation) < 1).all()


def test_flow_with_equal_keys_has_no_competition() -> None:
    q, k, _ = inputs(9)
    same = np.tile(k[:, :1], (1, 7, 1, 1))
    terms = fast_jit(lambda q, k: attention.flow_terms(q, k, clip=None))(q, same)
    assert_close(terms.competition, np.ones((2, 7, 2)), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_padded_batch_equals_each_sample_alone(name: str) -> None:
    q, k, v = inputs(10, query_length=9, length=9)
    lengths = (6, 9)
    mask = np.arange(9)[None] < np.array(lengths)[:, None]
    keywords = {"query_mask": mask} if name == "flow" else {}
    together = np.asarray(fast_jit(run(name))(q, k, v, mask, **keywords))
    for row, length in enumerate(lengths):
        alone = fast_jit(run(name))(*(x[row : row + 1, :length] for x in (q, k, v)))
        assert_close(together[row : row + 1, :length], alone, 2e-6)


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


@pytest.mark.parametrize("name", NAMES)
def test_what_padding_holds_does_not_matter(name: str) -> None:
    q, k, v = inputs(13, batch=3)
    keywords = {}
    if name == "flow":  # its queries enter the sums as well
        keywords = {"query_mask": MASK}

    @fast_jit
    def both(*arrays):
        out, pullback = jax.vjp(lambda *a: run(name)(*a, MASK, **keywords), *arrays)
        return out, pullback(jnp.ones_like(out))

    def spoilt(x: np.ndarray, garbage: float) -> np.ndarray:
        return np.where(MASK[:, :, None, None], x, np.float32(garbage))

    clean = both(q, k, v)
    for garbage in (1e6, np.nan, np.inf):
        query = spoilt(q, garbage) if keywords else q
        dirty = both(query, spoilt(k, garbage), spoilt(v, garbage))
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("name", NAMES)
def test_companions_in_a_batch_do_not_matter(name: str) -> None:
    q, k, v = inputs(14, batch=3)
    call = fast_jit(run(name))
    assert_close(call(q, k, v)[:1], call(q[:1], k[:1], v[:1]), 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_linear_in_the_values(name: str) -> None:
    q, k, v = inputs(15)
    other = inputs(16)[2]
    call = fast_jit(run(name))
    combined = 2 * call(q, k, v) - 3 * call(q, k, other)
    assert_close(call(q, k, 2 * v - 3 * other), combined)


def test_relu_features_ignore_the_scale_of_queries() -> None:
    q, k, v = inputs(17)
    assert_close(run("cosformer")(9 * q, k, v), run("cosformer")(q, k, v))
    relu = {"feature_map": "relu"}
    assert_close(run("linear")(9 * q, k, v, **relu), run("linear")(q, k, v, **relu))


def test_linformer_with_identity_is_softmax() -> None:
    q, k, v = inputs(18)
    identity = np.eye(7, dtype="float32")
    got = attention.linformer_attention(q, k, v, identity, identity)
    assert_close(got, attention.softmax_attention(q, k, v))


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


@pytest.mark.parametrize("name", NAMES)
def test_gradients_match_finite_differences(name: str) -> None:
    sizes = {"batch": 1, "query_length": 4, "length": 5, "value_dim": 3}
    mask = np.array([[1, 1, 0, 1, 1]], bool)
    # Flow's clip bends the function where a step of differences may cross it.
    keywords = {"clip": None} if name == "flow" else {}

    @fast_jit
    def slope(arrays):
        def loss(arrays):
            return jnp.sin(run(name)(*arrays, mask, **keywords)).sum()

        return jax.value_and_grad(loss)(arrays)

    with jax.enable_x64(True):
        arrays, way = (
            [x.astype("float64") for x in inputs(seed, **sizes)] for seed in (23, 24)
        )
        step = 1e-5
        ahead, behind = (
            slope([x + sign * step * d for x, d in zip(arrays, way, strict=True)])[0]
            for sign in (1, -1)
        )
        gradients = slope(arrays)[1]
        wanted = sum((g * d).sum() for g, d in zip(gradients, way, strict=True))
        assert abs((ahead - behind) / (2 * step) - wanted) < 1e-7 * abs(wanted) + 1e-8


@pytest.mark.parametrize("name", NAMES)
def test_gradients_stay_finite(name: str) -> None:
    q, k, v = inputs(24, batch=3)

    @fast_jit
    def both(*arrays):
        out, pullback = jax.vjp(lambda *a: run(name)(*a, MASK), *arrays)
        return out, pullback(jnp.ones_like(out))

    changes = {"dead": lambda x: -np.abs(x), "large": lambda x: 100 * x}
    for kind, change in (changes | {"zero": np.zeros_like}).items():
        out, gradients = both(change(q), change(k), v)
        for array in (out, *gradients):
            assert np.isfinite(np.asarray(array)).all(), kind
            if name == "cosformer" and kind != "large":
                assert not np.asarray(array).any(), "dead rows are exactly zero"


def test_gradients_at_the_bounds_pass() -> None:
    # Where torch's clamp and relu are at their bound, so that trained models agree.
    from lra_jax.attention import kernels

    def slope(function, at: float) -> float:
        return float(jax.grad(function)(jnp.float32(at)))

    assert slope(lambda x: kernels.clamp(x, 1.0), 1.0) == 1
    assert slope(lambda x: kernels.clamp(x, 1.0), -1.0) == 1
    assert slope(lambda x: kernels.clamp(x, 1.0), 1.5) == 0
    assert slope(lambda x: kernels.at_least(x, 0.5), 0.5) == 1
    assert slope(lambda x: kernels.at_least(x, 0.5), 0.4) == 0
    assert slope(kernels.feature_map("relu"), 0.0) == 0


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
