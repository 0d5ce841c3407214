"""The kernels that are compiled for the CPU: against the XLA form in float64."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, fast_jit, inputs
from jax.sharding import AxisType, PartitionSpec

from lra_jax import attention, kernels
from lra_jax.attention import MECHANISMS
from lra_jax.attention.causal.engine import Chunking
from lra_jax.kernels.cpu import library
from lra_jax.kernels.cpu.programs import MAPS
from lra_jax.kernels.spec import MAPS as FORMULAS

from .test_linear import check_in_a_model, pulled_back

NAMES = tuple(x.name for x in MECHANISMS.values() if "cpu" in x.kernels)
# Those that multiply weights by a decay.
FADING = ("retention", "lightning")
# Recurrences with decays, and shares of the values, at each position.
GATED = ("gla", "delta", "gated_delta", "hgrn")
# DeltaNet is the gated delta rule without decays: see `test_options`.
FORMS = [
    (name, is_causal)
    for name in NAMES
    for is_causal in (True, False)
    if name != "delta"
]
# The others have the products of linear attention.
OWN = [
    (name, is_causal) for name, is_causal in FORMS if name not in ("norm", "performer")
]

if library.problem() is not None:
    pytest.skip(f"{library.problem()}", allow_module_level=True)


# Features of the inputs themselves; and no rotation, which needs an even width.
ALWAYS: dict[str, dict] = {
    "performer": {"kernel": "relu"},
    "retention": {"rotate": False},
    # Outputs of different size can be compared.
    **{name: {"norm": None} for name in GATED},
}


def call(name: str, implementation: str = "native", **more: Any) -> Any:
    function = getattr(attention, f"{name}_attention")
    more = ALWAYS.get(name, {}) | more
    if name == "gla" and implementation == "xla":
        # Each distance within a chunk is compiled separately.
        more = {"chunking": Chunking(4)} | more
    attend = functools.partial(function, implementation=implementation, **more)
    return functools.partial(gated, name, attend) if name in GATED else attend


def gated(name: str, function: Any, *arrays: jax.Array) -> jax.Array:
    """Attention whose gates come from the query, and so have gradients."""
    query = jnp.asarray(arrays[0])
    gates: dict[str, jax.Array] = {}
    if name == "gla":
        gates["log_decay"] = -jnp.exp(2 * jnp.tanh(query) - 2)
    if name in ("delta", "gated_delta"):
        gates["beta"] = jax.nn.sigmoid(query[..., 0])
    if name in ("gated_delta", "hgrn"):
        gates["log_decay"] = -jnp.exp(2 * jnp.tanh(query[..., -1]) - 2)
    return function(*arrays, **gates)


def drawn(seed: int, options: dict, *sizes: int) -> tuple:
    """Query, key and value; sums of features of both signs could cancel."""
    q, k, v = inputs(seed, *sizes)
    both_signs = options.get("feature_map") in ("silu", "leaky_relu", "identity")
    return (np.abs(q), np.abs(k), v) if both_signs else (q, k, v)


def compare(name: str, arrays: Any, tolerance: float = 5e-6, **more: Any) -> tuple:
    """Output and gradients against those of the XLA form in float64."""
    shape = (*arrays[0].shape[:3], arrays[2].shape[3])
    slopes = np.random.default_rng(1).normal(size=shape)
    got = pulled_back(call(name, **more), arrays, slopes)
    assert all(array.dtype == "float32" for array in got)
    with jax.enable_x64(True):
        exact = [np.asarray(x, "float64") for x in arrays]
        expected = pulled_back(call(name, "xla", **more), exact, slopes)
        assert_close(got, expected, tolerance)
    return got


# Lengths within and beyond a chunk of 64 and a block of 1,024 positions; widths that
# fill registers and that do not; more heads than a group of 4; heads that share keys.
SIZES = {
    "short": {"batch": 1, "heads": 1, "query_length": 5, "head_dim": 3},
    "odd": {"batch": 3, "heads": 5, "query_length": 65, "head_dim": 7, "value_dim": 18},
    "long": {"batch": 2, "heads": 6, "query_length": 1100, "head_dim": 64}
    | {"key_heads": 3, "value_dim": 33},
    "wide": {"batch": 1, "heads": 1, "query_length": 70, "head_dim": 256},
    "some": {"batch": 2, "heads": 6, "query_length": 130, "head_dim": 23}
    | {"key_heads": 3, "value_dim": 34},
    "few": {"batch": 2, "heads": 4, "query_length": 80, "head_dim": 8, "key_heads": 2},
}
PROJECTION = np.random.default_rng(2).normal(size=(11, 8)).astype("float32")
EXACT = {"kernel": "softmax", "projection": PROJECTION}
# All sizes of linear attention, whose loops the others share; of the gated ones, other
# tests have long rows.
CASES: list[tuple] = [("performer", False, "few", EXACT)]
CASES += [
    (name, is_causal, size, {})
    for names, sizes in (
        (("linear",), ("short", "odd", "long", "wide")),
        (("flow",), ("odd", "long")),
        (("cosformer", *FADING), ("long",)),
        (("gla", "gated_delta", "hgrn"), ("some",)),
        (("norm", "performer"), ("few",)),
    )
    for name in names
    for is_causal in (True, False)
    for size in sizes
]


@pytest.mark.parametrize(("name", "is_causal", "size", "more"), CASES)
def test_like_the_xla_form(name: str, is_causal: bool, size: str, more: dict) -> None:
    """With a mask, and in the last of several samples rows without keys."""
    sizes = SIZES[size]
    batch, length = sizes["batch"], sizes["query_length"]
    unseen = 30 if is_causal else length
    mask = np.random.default_rng(4).random((batch, length)) < 0.7
    mask[:, -1] = True
    if batch > 1:
        mask[-1, :unseen] = False
    arrays = inputs(3, **sizes, length=length)
    more = more | {"mask": None if size == "wide" else mask, "is_causal": is_causal}
    out, *_ = compare(name, arrays, 5e-6 if size == "few" else 2e-5, **more)
    if batch > 1:
        assert not np.asarray(out)[-1, :unseen].any()


# Documents within a chunk of 64, over its border and over several chunks; negative
# lengths are padding.
DOCUMENTS = ([30, 34, 64, -2, 1, 100, -69], [-3, 200, 7, 90], [300])
ONE_LONG_ROW = ([500, 40, -5, 1100, 1, 300],)


def ids_of(lengths: list[int]) -> np.ndarray:
    numbers = [0 if n < 0 else i for i, n in enumerate(lengths, 1)]
    return np.repeat(numbers, np.abs(lengths)).astype("int32")


# With options that reach the kernels; `test_options` has the others.
PACKED_OPTIONS: dict[str, dict] = {
    "linear": {},
    "cosformer": {"feature_map": "elu", "denominator": "add", "eps": 0.5},
    "flow": {"feature_map": "relu+1e-6", "eps": 0.1, "extra_eps": 0.2, "clip": 0.9},
    # No denominators.
    "norm": {"feature_map": "silu", "norm": None},
    "retention": {"rotate": True, "norm": None},
    "lightning": {"feature_map": "silu", "slopes": np.array([0.0, 3.0, 100.0])},
    "gla": {},
    "gated_delta": {"feature_map": lambda x: jnp.sin(x[..., :-1])},
    "hgrn": {"scale": "unit", "lower_bound": np.array([0.3, -1, 0.1], "float32")},
}
PACKED: list[tuple] = [
    (name, is_causal, DOCUMENTS, options)
    for name, options in PACKED_OPTIONS.items()
    for is_causal in (True, False)
]
PACKED += [
    (name, is_causal, ONE_LONG_ROW, {})
    for name in ("linear", "flow", "gla")
    for is_causal in (True, False)
]
# A maximum of the features for each document.
PACKED += [("performer", False, DOCUMENTS, EXACT | {"hyperbolic": True})]


@pytest.mark.parametrize(("name", "is_causal", "rows", "options"), PACKED)
def test_packed_rows(name: str, is_causal: bool, rows: Any, options: dict) -> None:
    """At the real positions; two threads share the long document of the long row."""
    ids = np.stack([ids_of(lengths) for lengths in rows])
    batch, length = ids.shape
    real = ids[:, :, None, None] > 0
    mask = np.random.default_rng(2).random(ids.shape) < 0.9
    more = {"is_causal": is_causal, "segment_ids": ids, "mask": mask} | options

    def at_real(implementation: str) -> Any:
        function = call(name, implementation, **more)
        return lambda *arrays: jnp.where(real, function(*arrays), 0)

    arrays = drawn(16, options, batch, length, length, 1 if batch == 1 else 3, 8)
    slopes = np.random.default_rng(1).normal(size=arrays[0].shape)
    got = pulled_back(at_real("native"), arrays, slopes)
    with jax.enable_x64(True):
        exact = [np.asarray(x, "float64") for x in arrays]
        assert_close(got, pulled_back(at_real("xla"), exact, slopes), 2e-5)


@pytest.mark.parametrize("name", ["linear", "cosformer", "flow"])
def test_queries_and_keys_of_different_lengths(name: str) -> None:
    compare(name, inputs(3, 2, 40, 150, 3, 9))
    compare(name, inputs(3, 2, 1100, 20, 3, 9))


CAUSAL, FULL = (True,), (False,)
BOTH = CAUSAL + FULL
# The causal forms refuse the others, see below; both forms have the same features, and
# norms come after them.
OPTIONS: list[tuple[str, dict, tuple]] = [
    ("linear", {"feature_map": "relu"}, CAUSAL),
    ("linear", {"feature_map": "leaky_relu"}, CAUSAL),
    ("linear", {"feature_map": "sigmoid", "eps": 0.5}, BOTH),
    ("linear", {"feature_map": "silu", "eps": 0}, BOTH),
    (
        "linear",
        {"feature_map": lambda x: jnp.exp(jnp.concatenate([x, -x], -1))},
        CAUSAL,
    ),
    (
        "cosformer",
        {"denominator": "clamp", "eps": 4.0, "max_length": np.array([90, 70])},
        BOTH,
    ),
    (
        "cosformer",
        {"feature_map": "identity", "denominator": "add", "eps": 300.0}
        | {"max_length": 200},
        BOTH,
    ),
    ("cosformer", {"feature_map": "leaky_relu", "eps": 1.0, "reweight": False}, BOTH),
    ("flow", {"feature_map": "relu", "eps": 0}, BOTH),
    ("flow", {"feature_map": "elu", "clip": None}, FULL),
    ("flow", {"feature_map": "relu", "clip": 40.0}, FULL),
    ("norm", {"norm": "layer", "per_head": True}, CAUSAL),
    ("retention", {"norm": "rms", "slopes": np.array([0.0, 3.0])}, BOTH),
    ("gla", {"norm": "layer"}, CAUSAL),
    ("gated_delta", {"norm": "rms"}, CAUSAL),
    ("delta", {"feature_map": "identity", "beta_range": 2.0}, BOTH),
    ("performer", {"kernel": "exp", "projection": PROJECTION}, CAUSAL),
    ("performer", {"kernel": "relu", "scale": 1.0, "feature_eps": 0.1}, CAUSAL),
]
OPTIONS_OF_FORMS = [
    (name, more, is_causal) for name, more, forms in OPTIONS for is_causal in forms
]


@pytest.mark.parametrize(("name", "more", "is_causal"), OPTIONS_OF_FORMS)
def test_options(name: str, more: dict, is_causal: bool) -> None:
    compare(name, drawn(6, more, 2, 90, 90, 2, 8), 2e-5, is_causal=is_causal, **more)


def test_feature_maps_have_the_numbers_of_the_library() -> None:
    assert sorted(MAPS) == sorted(FORMULAS) == sorted(kernels.FEATURE_MAPS)


@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_padding(name: str, is_causal: bool) -> None:
    """The values in padding do not matter, and a sample means the same alone."""
    q, k, v = inputs(8, 2, 100, 100, 2, 8)
    mask = np.arange(100)[None] < np.array([[100], [67]])
    more: dict[str, Any] = {"cosformer": {"max_length": 128}}.get(name, {})
    hidden = ~mask[:, :, None, None]
    slopes = np.where(hidden, 0, np.random.default_rng(1).normal(size=q.shape))
    rows = {"query_mask": mask} if name == "flow" else {}
    attend = call(name, mask=mask, is_causal=is_causal, **more, **rows)
    clean = pulled_back(attend, (q, k, v), slopes)
    spoilt = [np.where(hidden, np.float32("nan"), x) for x in (q, k, v)]
    if name != "flow":  # Only Flow's queries have a mask.
        spoilt[0] = q
    for one, two in zip(pulled_back(attend, spoilt, slopes), clean, strict=True):
        np.testing.assert_array_equal(one, two)
    for slope in clean[2:]:
        assert not np.asarray(slope)[hidden.repeat(2, 2).repeat(8, 3)].any()
    alone = call(name, is_causal=is_causal, **more)
    alone = pulled_back(alone, [x[1:, :67] for x in (q, k, v)], slopes[1:, :67])
    assert_close([x[1:, :67] for x in clean], list(alone), 2e-6)


# The squares of norms would overflow in either form.
@pytest.mark.parametrize(("name", "is_causal"), [x for x in FORMS if x[0] != "norm"])
def test_large_numbers(name: str, is_causal: bool) -> None:
    q, k, v = inputs(10, 1, 70, 70, 1, 8)
    arrays = *(np.float32(1e15) * np.abs(x) for x in (q, k)), v
    more: Any = {"is_causal": is_causal}
    more |= {"feature_map": "relu"} if name == "flow" else {}
    got = fast_jit(call(name, **more))(*arrays)
    with jax.enable_x64(True):
        exact = [np.asarray(x, "float64") for x in arrays]
        assert_close(got, fast_jit(call(name, "xla", **more))(*exact), 2e-5)


def test_features_that_are_all_zero() -> None:
    q, k, v = inputs(10, 1, 70, 70, 1, 8)
    for x in pulled_back(call("cosformer"), (-np.abs(q), k, v), np.ones_like(v))[:3]:
        assert not np.asarray(x).any()


def test_a_competition_that_one_key_wins() -> None:
    """Its gradient is the difference of equal numbers, times large features."""
    q, k, v = inputs(15, 3, 70, 90, 4, 12)
    arrays = np.abs(q), np.float32(1e9) * np.abs(k), v
    compare("flow", arrays, feature_map="relu", clip=None)


def test_a_competition_between_blocks_of_keys() -> None:
    """Three keys, one in each block of 1,024, have logits far above the others'."""
    query, key, value = inputs(3, 3, 2100, 2100, heads=1, head_dim=16)
    for place, factor in ((100, 40), (1500, 60), (2080, 40)):
        key[:, place] = factor * np.abs(key[:, place])
    mask = np.ones((3, 2100), bool)
    mask[0, :1030] = mask[1, 1024:] = mask[2] = False
    arrays = query, key, value
    compare("flow", arrays, feature_map="elu", clip=None)
    compare("flow", arrays, feature_map="elu", clip=None, mask=mask)


# The feature maps that a mechanism may have, if not all; HGRN has no features.
KNOWN = {
    "cosformer": ("identity", "elu", "relu", "leaky_relu"),
    "flow": ("sigmoid", "relu", "elu"),
    "performer": ("sigmoid", "relu", "elu"),
    "hgrn": (),
}
KEYWORD = {"performer": "kernel", "retention": None, "gla": None}


@pytest.mark.parametrize("feature_map", MAPS)
def test_nan_that_is_seen_is_not_lost(feature_map: str) -> None:
    """In a query of the first sample, and in a key of the second."""
    arrays = inputs(14, 2, 70, 70, 1, 4)
    for place in (0, 1):
        arrays[place][place, 3, 0, 1] = np.nan
    for name, is_causal in FORMS:
        keyword = KEYWORD.get(name, "feature_map")
        # All maps in linear attention, and in each mechanism the first that it has.
        known = KNOWN.get(name, MAPS)
        if feature_map in (known if name == "linear" else tuple(known)[:1]):
            more: dict[str, Any] = {keyword: feature_map} if keyword else {}
            out = fast_jit(call(name, is_causal=is_causal, **more))(*arrays)
            assert np.isnan(np.asarray(out)[:, 3]).all(), (name, is_causal)


CONSTANT = {"cosformer": {"max_length": 100_000}}


@pytest.mark.parametrize(("name", "is_causal"), OWN)
def test_equal_tokens_of_a_long_sequence(name: str, is_causal: bool) -> None:
    """Rounding in one direction must not add up: 65,536 times 0.7 is still right."""
    x = np.full((1, 65_536, 1, 2), 0.7, "float32")
    arrays = x, x, np.full_like(x, 0.9)
    more = {"is_causal": is_causal, **CONSTANT.get(name, {})}
    out = np.asarray(fast_jit(call(name, **more))(*arrays), "float64")
    with jax.enable_x64(True):
        exact = [np.asarray(x, "float64") for x in arrays]
        exact = np.asarray(fast_jit(call(name, "xla", **more))(*exact))
    np.testing.assert_allclose(out, exact, rtol=5e-5)


def _slopes_of_samples(name: str, implementation: str, **more: Any) -> Any:
    function = call(name, implementation, **more)

    def loss(arrays: Any) -> jax.Array:
        return jnp.sin(jax.vmap(jax.checkpoint(function))(*arrays)).sum()

    return jax.grad(loss)


# Calls are batched by one rule; these differ in what they take.
@pytest.mark.parametrize(
    ("name", "is_causal"),
    [("linear", True), ("flow", False), ("gla", True), ("gated_delta", True)],
)
def test_transformations(name: str, is_causal: bool) -> None:
    pairs = [np.stack(x) for x in zip(inputs(9), inputs(10), strict=True)]
    slopes = [
        fast_jit(_slopes_of_samples(name, x, is_causal=is_causal))(pairs)
        for x in ("native", "xla")
    ]
    jax.tree.map(assert_close, *slopes)
    # Every gradient of one output, so only the cotangents have a further axis.
    rows = [
        fast_jit(jax.jacrev(lambda *x, f=f: f(*x)[0, -1, 0], (0, 1, 2)))(*inputs(11))
        for f in (call(name, x, is_causal=is_causal) for x in ("native", "xla"))
    ]
    jax.tree.map(assert_close, *rows)


@pytest.mark.parametrize(("name", "is_causal"), [("linear", True), ("hgrn", False)])
def test_in_shard_map(name: str, is_causal: bool) -> None:
    """Samples on two devices; the types say along which axis results vary."""
    mesh = jax.make_mesh((2,), ("sample",), axis_types=(AxisType.Auto,))
    arrays = [jnp.asarray(x) for x in inputs(12)]

    def loss(implementation: str, *arrays: jax.Array) -> jax.Array:
        return jnp.sin(call(name, implementation, is_causal=is_causal)(*arrays)).sum()

    spec = PartitionSpec("sample")
    local = jax.grad(functools.partial(loss, "native"), (0, 1, 2))
    local = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    expected = jax.grad(functools.partial(loss, "xla"), (0, 1, 2))
    assert_close(fast_jit(local)(*arrays), fast_jit(expected)(*arrays))


# Those that `test_packed_rows` has no long row of.
@pytest.mark.parametrize(
    "name", ["cosformer", "retention", "lightning", "gated_delta", "hgrn"]
)
def test_few_heads_on_many_threads(name: str) -> None:
    """One head of a long sequence is cut into segments, if there are two threads."""
    compare(name, inputs(13, 1, 2000, 2000, 1, 8), is_causal=True)


@pytest.mark.parametrize("name", FADING)
def test_slopes_that_have_a_gradient(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels have none for them, so the XLA form runs."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    arrays = inputs(0, 2, 1024, 1024, 4, 8)
    slopes = np.linspace(0.1, 0.4, 4, dtype="float32")

    def loss(slopes: Any, implementation: str = "auto") -> jax.Array:
        return jnp.sin(call(name, implementation)(*arrays, slopes=slopes)).sum()

    assert "ffi_call" in str(jax.make_jaxpr(lambda: loss(slopes))())
    assert "ffi_call" not in str(jax.make_jaxpr(loss)(slopes))
    assert np.asarray(jax.grad(loss)(slopes)).all()
    with pytest.raises(ValueError, match=r"^slopes: expected known .*'native'"):
        jax.grad(functools.partial(loss, implementation="native"))(slopes)


@pytest.mark.parametrize("name", [*FADING, "norm"])
def test_weights_have_second_derivatives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    query, key, _ = inputs(0, 1, 70, 70, 64, 4)
    weights = getattr(attention, f"{name}_weights")

    def loss(scale: jax.Array) -> jax.Array:
        return jnp.sin(weights(scale * query, key)).sum()

    assert jnp.isfinite(fast_jit(jax.grad(jax.grad(loss)))(1.0))


def test_in_a_model() -> None:
    check_in_a_model("native", "ffi_call")


def test_what_is_refused() -> None:
    arrays = inputs(0)

    def refused(match: str, name: str = "linear", arrays: Any = arrays, **more: Any):
        with pytest.raises(ValueError, match=match):
            call(name, **more)(*arrays)

    half = [jnp.asarray(x, "bfloat16") for x in arrays]
    refused("float32, got .'bfloat16'. with implementation='native'", arrays=half)
    refused("at most 512, got .513, 513.", arrays=inputs(0, head_dim=513))
    refused("chunking: expected None, got", chunking=Chunking(64))
    refused("grid: expected None, got .7, 1.", "cosformer", grid=(7, 1))
    refused("at most 30 if causal, got None", "flow", is_causal=True, clip=None)
    refused("competition: expected True", "flow", competition=False)
    angle = np.ones(arrays[0].shape[2], "float32")
    pairs = inputs(0, value_dim=2)
    refused("angle: expected None, got an array", "hgrn", arrays=pairs, angle=angle)
    other = inputs(0, length=9)
    refused("key: expected the query's length T=7, got 9", "lightning", arrays=other)
    softmax = {"kernel": "softmax", "projection": PROJECTION[:, : arrays[0].shape[3]]}
    refused("is_causal: expected False", "performer", is_causal=True, **softmax)
    pallas = "'auto' or 'xla' on this machine, because Pallas.*'pallas' on 'cpu'"
    refused(pallas, implementation="pallas")
    only = "because its kernels are for CPUs .'native'., got 'pallas'"
    for mechanism in MECHANISMS.values():
        if mechanism.kernels == ("cpu",):
            refused(only, mechanism.name, implementation="pallas")
    refused("'native', got 'natve'", implementation="natve")

    def twice(x: jax.Array) -> jax.Array:
        function = call("linear", is_causal=True)
        return jax.grad(lambda y: function(y, *arrays[1:]).sum())(x).sum()

    with pytest.raises(ValueError, match="expected 'xla' for second derivatives"):
        jax.grad(twice)(arrays[0])


@pytest.mark.parametrize("name", NAMES)
def test_auto_takes_them_where_they_are_faster(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(shape: tuple, dtype: str = "float32", **more: Any) -> bool:
        x = jax.ShapeDtypeStruct(shape, dtype)
        keywords = {"implementation": "auto", "is_causal": True} | more
        return "ffi_call" in str(jax.make_jaxpr(call(name, **keywords))(x, x, x))

    large = 1, 1024, 4, 8
    assert not taken(large)  # There are two devices.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert taken(large)
    assert taken(large, is_causal=False) == (name != "flow")
    assert taken((1, 1024, 4, 16), is_causal=False)
    assert not taken((1, 1023, 4, 16), is_causal=False)
    assert not taken((1, 1023, 4, 8))
    assert not taken(large, "bfloat16")
    assert not taken(large, implementation="xla")
    if name != "hgrn":  # It has no chunks.
        assert not taken(large, chunking=Chunking(64))
    monkeypatch.setenv(library.SWITCH, "0")
    assert not taken(large)
    monkeypatch.setenv(library.SWITCH, "yes")
    with pytest.raises(ValueError, match="LRA_JAX_NATIVE: expected 0 or 1, got 'yes'"):
        taken(large)


PROGRAM = """
import warnings
import jax
from lra_jax.attention import linear_attention
x = jax.numpy.ones((1, 1024, 4, 8))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    linear_attention(x, x, x, is_causal=True)
    linear_attention(x, x, x)
print(*[warning.message for warning in caught], sep="\\n")
linear_attention(x, x, x, implementation="native")
"""


def test_flow_heads_alone_are_those_of_many() -> None:
    """One head for all threads, or many with one thread each and features in memory."""
    query, key, value, slope = np.asarray(
        jax.random.normal(jax.random.key(0), (4, 2, 1100, 8, 16))
    )
    together = pulled_back(call("flow", is_causal=False), (query, key, value), slope)
    for sample, head in ((0, 0), (0, 7), (1, 3)):
        at = np.s_[sample : sample + 1, :, head : head + 1]
        alone = pulled_back(
            call("flow", is_causal=False), (query[at], key[at], value[at]), slope[at]
        )
        for mine, all_of_them in zip(alone, together, strict=True):
            np.testing.assert_array_equal(mine, all_of_them[at])


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("CXX", library.SWITCH)}


def test_without_a_compiler(tmp_path: Path) -> None:
    """The XLA form runs, with one warning if there is a compiler that fails."""

    def run(**environment: str) -> subprocess.CompletedProcess:
        more = {"XDG_CACHE_HOME": str(tmp_path), "JAX_NUM_CPU_DEVICES": "1"}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**_environment(), **more, **environment},
            capture_output=True,
            text=True,
        )

    absent = run(PATH="", CXX="")
    assert not absent.stdout.strip()
    assert "there is no C++ compiler (CXX, c++, g++ or clang++)" in absent.stderr
    broken = run(CXX="false --really")
    (warning,) = broken.stdout.splitlines()
    assert warning.startswith("attention takes its slower form on this CPU")
    assert (
        "false" in warning and "--really" in warning and "LRA_JAX_NATIVE=0" in warning
    )
    assert "'native' on 'cpu'" in broken.stderr.splitlines()[-1]


def test_a_damaged_library_is_replaced(tmp_path: Path) -> None:
    """A crash of the machine can leave an empty file.

    The compiler is one that needs no ten seconds: it copies what was made before.
    """
    made = library._compile()
    compiler = tmp_path / "c++"
    compiler.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
echo made >> "{tmp_path}/calls"
for last in "$@"; do :; done
cp "{made}" "$last"
""")
    compiler.chmod(0o755)
    more = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    program = "from lra_jax.kernels.cpu import library; print(library.problem())"

    def load() -> str:
        end = subprocess.run(
            [sys.executable, "-W", "error", "-c", program],
            env={**_environment(), **more},
            capture_output=True,
            text=True,
            check=True,
        )
        assert end.stdout == "None\n"
        return end.stderr

    # Half a minute of silence would look like a hang.
    said = load()
    assert "compiling" in said and "LRA_JAX_NATIVE=0" in said
    (file,) = (tmp_path / "lra_jax" / "kernels").glob("*.so")
    file.write_bytes(b"")
    assert "compiling" in load()
    assert load() == ""
    assert file.read_bytes() == made.read_bytes()
    assert (tmp_path / "calls").read_text() == "made\nmade\n"
