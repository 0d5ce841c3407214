"""The kernels in Pallas' interpreter: against golden data and against the XLA form."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import golden, golden_builders
from attention.mechanisms import assert_close, fast_jit, inputs

from lra_jax import attention, kernels
from lra_jax.attention.causal.engine import Chunking
from lra_jax.kernels import api
from lra_jax.models import MultiHeadAttention

SMALL = Chunking(16, 32)
NAMES = ("linear", "cosformer")


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.INTERPRET, "tpu")


def call(name: str, implementation: str = "pallas", **more: Any) -> Any:
    function = getattr(attention, f"{name}_attention")
    kernel = {"chunking": SMALL} if implementation == "pallas" else {}
    return functools.partial(function, implementation=implementation, **kernel | more)


def pulled_back(function: Any, arrays: Any, weights: Any) -> tuple:
    """The output and the gradients of its weighted sum."""

    @fast_jit
    def both(*arrays: jax.Array) -> tuple:
        out, pullback = jax.vjp(function, *arrays)
        return out, *pullback(jnp.asarray(weights, out.dtype))

    return both(*arrays)


def compare(name: str, arrays: Any, tolerance: float = 2e-6, **more: Any) -> None:
    """Output and gradients against the XLA form's, of the same numbers in float32."""
    shape = (*arrays[0].shape[:3], arrays[2].shape[3])
    weights = jnp.asarray(np.random.default_rng(1).normal(size=shape), "float32")
    got = pulled_back(call(name, **more), arrays, weights)
    for array, source in zip(got, (arrays[0], *arrays), strict=True):
        assert array.dtype == source.dtype
    exact = [jnp.asarray(x, "float32") for x in arrays]
    more.pop("chunking", None)
    expected = pulled_back(call(name, "xla", **more), exact, weights)
    for one, two in zip(got, expected, strict=True):
        assert_close(jnp.asarray(one, "float32"), two, tolerance)


GOLDEN = (
    "cosformer_causal_s64",
    "cosformer_mask_causal_scattered_s16",
    "cosformer_mask_truncM_causal_s16",
    "cosformer_noncausal_x7_16",
    "cosformer_edge_deadrows_s16",
    "linear_mask_causal_s64",
)


@pytest.mark.skipif(not golden.AVAILABLE, reason=golden.REASON)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function in its mechanism's place gives a stored case, with gradients."""
    family = name.split("_")[0]
    (case,) = (case for case in golden.select(family) if case["name"] == name)
    stored = golden.load(case)
    monkeypatch.setattr(attention, f"{family}_attention", call(family))
    run = golden_builders.BUILDERS[family](case, stored)
    arrays = [jnp.asarray(stored[x], "float32") for x in "qkv"]

    def of_three(q, k, v):
        return run({"q": q, "k": k, "v": v})

    assert "pallas_call" in str(jax.make_jaxpr(of_three)(*arrays))
    got = pulled_back(of_three, arrays, stored["cotangent"])
    for array, part in zip(got, ("out", "dq", "dk", "dv"), strict=True):
        assert_close(array, stored[part])


def _doubled(x: jax.Array) -> jax.Array:
    return jnp.exp(jnp.concatenate([x, -x], -1))


@pytest.mark.parametrize(
    ("is_causal", "name", "sizes", "options"),
    [
        # Three blocks, the last with a tail; heads in groups of 4 and of 2.
        (True, "linear", {"query_length": 71, "heads": 8, "head_dim": 32}, {}),
        (True, "cosformer", {"query_length": 71, "heads": 4, "head_dim": 64}, {}),
        # One head at a time; widths that fill no registers; heads come first.
        (
            True,
            "cosformer",
            {"query_length": 40, "head_dim": 16, "value_dim": 24},
            {"denominator": "add", "eps": 0.5},
        ),
        (
            True,
            "linear",
            {"query_length": 20, "heads": 1, "head_dim": 256},
            {"feature_map": "sigmoid", "eps": 0.1},
        ),
        (
            True,
            "cosformer",
            {"query_length": 25, "heads": 3, "head_dim": 96},
            {"max_length": np.array([25, 9]), "feature_map": "elu"},
        ),
        (True, "linear", {"query_length": 25}, {"feature_map": _doubled}),
        (False, "linear", {"query_length": 20, "heads": 4, "value_dim": 24}, {}),
        (False, "cosformer", {"query_length": 71, "heads": 4, "head_dim": 64}, {}),
    ],
)
def test_like_the_xla_form(
    is_causal: bool, name: str, sizes: dict, options: dict
) -> None:
    length = sizes["query_length"] if is_causal else 50
    arrays = inputs(3, **{"length": length, "batch": 2} | sizes)
    mask = np.random.default_rng(4).random((2, length)) < 0.7
    more = {} if name == "linear" else {"max_length": 80}
    compare(name, arrays, mask=mask, is_causal=is_causal, **more | options)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision(name: str) -> None:
    arrays = inputs(5, 1, 40, 40, 2, 64)
    arrays = [jnp.asarray(x, "bfloat16") for x in arrays]
    compare(name, arrays, 1e-2, is_causal=name == "cosformer")


def test_fewer_key_heads() -> None:
    compare("linear", inputs(7, 1, 20, 20, 4, 8, key_heads=2), is_causal=True)
    # A sum of copies in bfloat16 would stop at 256.
    one = jnp.ones((1, 1, 1, 1), "bfloat16")
    slope = jax.grad(lambda x: api._match_heads(x, 512).astype("float32").sum())(one)
    assert slope.item() == 512


@pytest.mark.parametrize(
    ("name", "is_causal"), [("linear", True), ("cosformer", False)]
)
def test_padding(name: str, is_causal: bool) -> None:
    """The values in padding do not matter, and a sample means the same alone."""
    q, k, v = inputs(8, 2, 40, 40, 2, 8)
    mask = np.arange(40)[None] < np.array([[40], [21]])
    more = {} if name == "linear" else {"max_length": 64}
    function = fast_jit(call(name, is_causal=is_causal, **more))
    clean = np.asarray(function(q, k, v, mask))
    hidden = ~mask[:, :, None, None]
    dirty = function(q, *(np.where(hidden, np.float32("nan"), x) for x in (k, v)), mask)
    np.testing.assert_array_equal(dirty, clean)
    alone = call(name, is_causal=is_causal, **more)
    alone = fast_jit(alone)(*(x[1:, :21] for x in (q, k, v)))
    assert_close(clean[1:, :21], alone, 1e-6)

    def loss(k, v):
        return (call(name, is_causal=is_causal, **more)(q, k, v, mask) ** 2).sum()

    for slope in fast_jit(jax.grad(loss, (0, 1)))(k, v):
        assert not np.asarray(slope)[hidden.repeat(2, 2).repeat(8, 3)].any()


def test_under_vmap_and_checkpoint() -> None:
    pairs = [np.stack(x) for x in zip(inputs(9), inputs(10), strict=True)]

    def slopes(implementation: str) -> Any:
        function = call("linear", implementation, is_causal=True)

        def loss(arrays):
            return jnp.sin(jax.vmap(jax.checkpoint(function))(*arrays)).sum()

        return fast_jit(jax.grad(loss))(pairs)

    jax.tree.map(assert_close, slopes("pallas"), slopes("xla"))


def test_in_a_model() -> None:
    check_in_a_model("pallas", "pallas_call")


def check_in_a_model(implementation: str, primitive: str) -> None:
    """A layer with this option makes the call, and equals that of the XLA form."""
    from flax import nnx

    x = jax.random.normal(jax.random.key(0), (2, 20, 16))
    made = [
        MultiHeadAttention(
            2, 16, max_length=32, options={"implementation": y}, rngs=nnx.Rngs(0)
        )
        for y in (implementation, "xla")
    ]
    assert primitive in str(jax.make_jaxpr(made[0])(x))
    assert_close(*(fast_jit(layer)(x) for layer in made), 1e-6)


# The full form of linear attention's is in Flow's product.
@pytest.mark.parametrize(
    ("name", "is_causal", "sizes"),
    [
        # Two segments of two chunks, the last with a tail; widths that are padded.
        ("cosformer", True, {"query_length": 140, "length": 140, "value_dim": 40}),
        (
            "cosformer",
            False,
            {"query_length": 60, "length": 130, "heads": 2, "head_dim": 40}
            | {"key_heads": 1, "value_dim": 64},
        ),
    ],
)
def test_hopper_kernels(
    name: str, is_causal: bool, sizes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    arrays = inputs(11, **{"batch": 1, "heads": 1, "head_dim": 64} | sizes)
    mask = np.random.default_rng(12).random((1, sizes["length"])) < 0.7
    # The values at hidden positions do not matter.
    hidden = np.where(mask[:, :, None, None], np.float32(0), np.float32("nan"))
    arrays = arrays[0], arrays[1] + hidden, arrays[2] + hidden
    arrays = [jnp.asarray(x, "bfloat16") for x in arrays]
    more = {"mask": mask, "is_causal": is_causal, "chunking": Chunking(64, 128)}
    compare(name, arrays, 1.5e-2, **more)


def test_queries_without_keys_leave_other_gradients_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their slopes are a million times larger, in an earlier segment."""
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    arrays = inputs(15, 1, 128, 128, 1, 64)
    arrays = [jnp.asarray(x, "bfloat16") for x in arrays]
    mask = np.arange(128)[None] >= 70
    more = {"mask": mask, "is_causal": True, "chunking": Chunking(64, 64)}
    compare("linear", arrays, 1.5e-2, **more)


def test_hopper_kernels_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pallas cannot batch a kernel of a GPU, so the calls are made in turn."""
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    pairs = [
        jnp.stack([jnp.asarray(x, "bfloat16") for x in pair])
        for pair in zip(*(inputs(x, 1, 64, 64, 1, 64) for x in (13, 14)), strict=True)
    ]

    def slopes(function: Any) -> Any:
        def loss(arrays: Any) -> Any:
            # The second pair's keys serve both calls.
            query, key, value = arrays
            out = jax.vmap(function, (0, None, 0))(query, key[1], value)
            return jnp.sin(out.astype("float32")).sum()

        return fast_jit(jax.grad(loss))(pairs)

    more = {"is_causal": True, "chunking": None}
    got = slopes(call("linear", **more))
    expected = slopes(call("linear", "xla", **more))
    assert not np.asarray(got[1][0], "float32").any()
    for one, two in zip(got, expected, strict=True):
        assert_close(one.astype("float32"), two.astype("float32"), 1.5e-2)
