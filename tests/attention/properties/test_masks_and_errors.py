"""Masks in all their shapes, and what every error message says."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import attention
from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal.sums import Chunking, causal_linear

from ..mechanisms import (
    CROSS,
    NAMES,
    STREAMS,
    WEIGHTED,
    E,
    F,
    assert_close,
    run,
    weights,
)
from ..mechanisms import (
    inputs as arrays,
)

PADDING = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)


@pytest.mark.parametrize(
    "mask",
    [
        PADDING,
        PADDING[:, None, None],
        PADDING.astype("int32"),
        PADDING[:, None, None].astype("float32"),
        nnx.make_attention_mask(np.ones((2, 1), bool), PADDING),
        list(map(list, PADDING.tolist())),
    ],
    ids=["BS", "B11S", "int", "float", "flax", "list"],
)
def test_one_mask_in_many_forms(mask) -> None:
    wanted = inputs.padding_mask(jnp.asarray(PADDING), 2, 5)
    assert wanted is not None
    got = inputs.padding_mask(mask, 2, 5)
    np.testing.assert_array_equal(got, wanted)
    pairs = inputs.pair_mask(mask, 2, 3, 4, 5)
    assert pairs is not None
    np.testing.assert_array_equal(pairs, PADDING[:, None, None])


@pytest.mark.parametrize(
    "shape", [(1,), (5,), (1, 5), (2, 1), (1, 1, 5), (1, 1, 1, 5), (2, 1, 1, 1)]
)
def test_masks_broadcast(shape: tuple[int, ...]) -> None:
    mask = jnp.zeros(shape, bool).at[..., 0].set(True)
    got = inputs.padding_mask(mask, 2, 5)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    wanted = np.broadcast_to(np.asarray(mask).reshape(aligned), (2, 1, 1, 5))
    np.testing.assert_array_equal(got, wanted[:, 0, 0])


def test_no_mask_is_no_mask() -> None:
    assert inputs.padding_mask(None, 2, 5) is None
    assert inputs.pair_mask(None, 2, 3, 4, 5) is None


def test_every_pair_of_softmax_may_be_masked_by_head() -> None:
    q, k, v = arrays(1, heads=2)
    mask = np.ones((1, 2, 1, 7), bool)
    mask[0, 0, 0, 3:] = False
    got = attention.softmax_attention(q, k, v, mask)
    short = attention.softmax_attention(q, k[:, :3], v[:, :3])
    assert_close(got[:, :, 0], short[:, :, 0])
    assert_close(got[:, :, 1], attention.softmax_attention(q, k, v)[:, :, 1])


def _rejects(call, *parts: str) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


Q, K, V = arrays(2, query_length=5)  # (2, 5, 2, 4), (2, 7, 2, 4), (2, 7, 2, 4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ((Q[0], K, V), ("query: expected [B, T, N, H]", "(5, 2, 4)")),
        ((Q, K[..., None], V), ("key: expected [B, S, N, H]", "(2, 7, 2, 4, 1)")),
        ((Q, K, V[0]), ("value: expected [B, S, N, Hv]", "(7, 2, 4)")),
        ((Q.astype("int32"), K, V), ("query: expected a floating dtype", "int32")),
        (
            (Q, K[:1], V),
            ("key: expected [B, S, N, H]=(2, S, 1|2, 4)", "got (1, 7, 2, 4)"),
        ),
        (
            (Q, K, V[:1]),
            ("value: expected [B, S, N, Hv]=(2, 7, 1|2, Hv)", "got (1, 7, 2, 4)"),
        ),
        (
            (Q[:, :, :1], K, V),
            ("key: expected [B, S, N, H]=(2, S, 1, 4)", "got (2, 7, 2, 4)"),
        ),
        (
            (Q, K, V[:, :, :0]),
            ("value: expected [B, S, N, Hv] without an empty", "(2, 7, 0, 4)"),
        ),
        (
            (Q, K[..., :3], V),
            ("key: expected [B, S, N, H]=(2, S, 1|2, 4)", "got (2, 7, 2, 3)"),
        ),
        (
            (Q, K, V[:, :6]),
            ("value: expected [B, S, N, Hv]=(2, 7, 1|2, Hv)", "got (2, 6, 2, 4)"),
        ),
        (
            (Q, K[:, :0], V[:, :0]),
            ("key: expected [B, S, N, H] without an empty", "(2, 0, 2, 4)"),
        ),
    ],
)
def test_arrays_that_do_not_fit(name: str, arrays: tuple, parts: tuple) -> None:
    _rejects(lambda: run(name)(*arrays), *parts)


@pytest.mark.parametrize("name", NAMES)
def test_masks_that_do_not_fit(name: str) -> None:
    for shape in [(2, 5), (7, 2), (3, 7), (3, 1, 7), (2, 1, 1, 1, 7), ()]:
        mask = np.ones(shape, bool)
        _rejects(lambda mask=mask: run(name)(K, K, V, mask), "mask: ", "[B, S]=(2, 7)")
    mask = np.ones((2, 7), "complex64")
    _rejects(lambda: run(name)(K, K, V, mask), "mask: expected a boolean", "complex64")


@pytest.mark.parametrize("name", sorted({*NAMES} - {"softmax", "synthesizer"}))
@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (1, 2, 1, 7)])
def test_a_query_or_head_axis_is_refused_with_the_reason(name: str, shape) -> None:
    mask = np.ones(shape, bool)
    query = Q if name in CROSS else K
    if name not in CROSS and shape[2] > 1:
        shape, mask = (2, 1, 7, 7), np.ones((2, 1, 7, 7), bool)
    parts = ["mask: expected", str(shape), "a query or head axis cannot be applied"]
    if name in STREAMS:
        parts.append("sums over the keys once for all queries and heads")
    _rejects(lambda: run(name)(query, K, V, mask), *parts)
    if name in WEIGHTED:
        _rejects(lambda: weights(name)(query, K, mask), *parts)


def test_flow_names_its_query_mask() -> None:
    mask = np.ones((2, 7), bool)
    _rejects(lambda: run("flow")(Q, K, V, query_mask=mask), "query_mask: ", "(2, 7)")


@pytest.mark.parametrize("name", NAMES)
def test_causal_needs_one_length(name: str) -> None:
    if not attention.resolve(name).causal:
        with pytest.raises(ValueError, match=r"no causal form|no cross form"):
            run(name)(Q, K, V, is_causal=True)
        return
    _rejects(
        lambda: run(name)(Q, K, V, is_causal=True), "is_causal: expected", "T=5", "S=7"
    )


def test_causal_flow_competes_among_sources_only() -> None:
    keywords = {"is_causal": True, "competition_axis": "heads"}
    parts = ("competition_axis: expected 'source'", "'heads'")
    _rejects(lambda: run("flow")(K, K, V, **keywords), *parts)
    _rejects(lambda: weights("flow")(K, K, **keywords), *parts)


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"chunk": 0}, ("chunk: expected a positive int", "got 0")),
        ({"block": -1}, ("block: expected a positive int", "got -1")),
        ({"implementation": "scan"}, ("'loop', 'parallel' or None", "'scan'")),
    ],
)
def test_chunkings_that_do_not_fit(keywords: dict, parts: tuple) -> None:
    _rejects(lambda: Chunking(**keywords), *parts)


def test_slopes_are_one_for_each_head() -> None:
    heads_first = [np.swapaxes(x, 1, 2) for x in (K, K, V)]
    slopes = np.ones(3, "float32")
    call = functools.partial(causal_linear, *heads_first, slopes=slopes)
    _rejects(call, "slopes: expected one for each head", "[N]=(2,)", "(3,)")


def test_linformer_refuses_causal_for_good() -> None:
    for call in (
        lambda: run("linformer")(K, K, V, is_causal=True),
        lambda: weights("linformer")(K, K, is_causal=True),
    ):
        _rejects(call, "is_causal: expected False, got True", "mixes all positions")


@pytest.mark.parametrize(
    ("name", "keywords", "parts"),
    [
        ("cosformer", {"max_length": 6}, ("at least max(T, S)=7", "got 6")),
        ("cosformer", {"max_length": np.ones(2)}, ("[B]=(2,)", "float")),
        ("cosformer", {"max_length": np.ones(3, int)}, ("[B]=(2,)", "(3,)")),
        ("cosformer", {"max_length": 7.5}, ("an int, None or", "float")),
        ("cosformer", {"denominator": "none"}, ("'clamp' or 'add'", "'none'")),
        ("linear", {"feature_map": "gelu"}, ("'elu', 'relu'", "'gelu'")),
        ("flow", {"clip": 0.0}, ("clip: expected a positive number", "got 0.0")),
        ("flow", {"competition_axis": "sink"}, ("one of source, heads", "'sink'")),
        ("performer", {"projection": None}, ("[M, H] with H=4", "None", "makes one")),
        ("performer", {"projection": E}, ("[M, H] with H=4", "(6, 16)")),
        ("performer", {"projection": E[0]}, ("[M, H] with H=4", "(16,)")),
        ("performer", {"projection": E[:0, :4]}, ("[M, H] with H=4", "(0, 4)")),
        ("performer", {"projection": np.eye(4, dtype=int)}, ("floating", "int")),
        ("performer", {"kernel": "gelu"}, ("'relu', 'sigmoid'", "'gelu'")),
        ("performer", {"dialect": "paper"}, ("('exact', 'google'", "'paper'")),
        ("performer", {"kernel": "relu", "hyperbolic": True}, ("False", "'relu'")),
        ("performer", {"feature_eps": 1e-4}, ("expected None", "0.0001")),
        ("performer", {"feature_eps": -1.0}, ("expected None", "-1.0")),
        ("performer", {"scale": 0.0}, ("expected a positive number", "0.0")),
    ],
)
def test_options_that_do_not_fit(name: str, keywords: dict, parts: tuple) -> None:
    _rejects(lambda: run(name)(Q, K, V, **keywords), *keywords, *parts)
    _rejects(lambda: weights(name)(Q, K, **keywords), *keywords, *parts)


KERNEL = np.ones((3, 4, 4), "float32")


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({}, ("key_projection: expected an array", "None")),
        ({"key_projection": E[:, :6]}, ("at least S=7 columns", "(6, 6)", "longer")),
        ({"key_projection": E[0]}, ("[K, L] or [N, K, L] with N=2", "(16,)")),
        ({"key_projection": np.stack([E] * 3)}, ("N=2", "(3, 6, 16)")),
        (
            {"key_projection": E, "value_projection": F[:5]},
            ("value_projection: expected 6 slots", "(5, 16)"),
        ),
        (
            {"key_projection": E, "value_projection": F[:, :4]},
            ("value_projection: expected at least S=7", "(6, 4)"),
        ),
        (
            {"key_projection": E, "key_bias": np.ones(5, "float32")},
            ("key_bias: expected [K]=(6,) or [N, K]=(2, 6)", "(5,)"),
        ),
        ({"key_projection": E, "window": 3}, ("window: expected None", "got 3")),
        ({"projection": "fft"}, ("projection: expected one of", "'fft'")),
        ({"projection": "mean"}, ("window: expected a positive int", "got None")),
        ({"projection": "max", "window": 0}, ("window: expected", "got 0")),
        (
            {"projection": "mean", "window": 3, "key_projection": E},
            ("key_projection: expected None", "no parameters"),
        ),
        (
            {"projection": "mean", "window": 3, "key_bias": np.ones(4)},
            ("key_bias", "expected None"),
        ),
        (
            {"projection": "convolution", "key_projection": E},
            ("key_projection: expected a convolution kernel", "H=4", "(6, 16)"),
        ),
        (
            {
                "projection": "convolution",
                "key_projection": KERNEL,
                "value_projection": KERNEL[:2],
            },
            ("value_projection: expected 3 positions a window", "(2, 4, 4)"),
        ),
        (
            {
                "projection": "convolution",
                "key_projection": KERNEL,
                "key_bias": np.ones(3),
            },
            ("key_bias: expected [H]=(4,)", "(3,)"),
        ),
    ],
)
def test_projections_that_do_not_fit(keywords: dict, parts: tuple) -> None:
    _rejects(lambda: attention.linformer_attention(Q, K, V, **keywords), *parts)


@pytest.mark.parametrize("projection", ["convolution", "max"])
def test_linformer_weights_need_sums_over_positions(projection: str) -> None:
    _rejects(
        lambda: attention.linformer_weights(Q, K, projection=projection),
        "projection: expected 'linear' or 'mean'",
        repr(projection),
    )


@pytest.mark.parametrize(
    ("keywords", "parts"),
    [
        ({"max_length": 0}, ("max_length: expected a positive int", "got 0")),
        ({"features": -1}, ("features: expected a positive int", "got -1")),
        ({"sharing": "blockwise"}, ("sharing: expected one of", "'blockwise'")),
        ({"projection": "fft"}, ("projection: expected one of", "'fft'")),
    ],
)
def test_parameters_that_do_not_fit(keywords: dict, parts: tuple) -> None:
    sizes = {"max_length": 8, "num_heads": 2, "head_dim": 4}
    key = np.zeros(2, "uint32")
    _rejects(lambda: attention.linformer_parameters(key, **sizes | keywords), *parts)


def test_feature_maps_may_be_functions() -> None:
    assert feature_maps.feature_map(np.tanh) is np.tanh
