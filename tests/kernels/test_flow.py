"""Flow-Attention's kernels: interpreted, refused, and lowered without a device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import golden
from attention.mechanisms import assert_close, fast_jit, inputs

from lra_jax import attention, kernels
from lra_jax.attention.causal.engine import Chunking
from lra_jax.kernels import selection

from .test_linear import check_golden, compare
from .test_selection import lowered

SMALL = Chunking(16, 16)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.INTERPRET, "tpu")


def flow(**more: Any) -> Any:
    given = {"implementation": "pallas", "chunking": SMALL} | more
    return functools.partial(attention.flow_attention, **given)


def masks(batch: int, length: int, seed: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).random((batch, length)) < 0.7


GOLDEN = (
    "flow_noncausal_dv12_s16",
    "flow_mask_truncated_self_s16",
    "flow_noncausal_noclamp_x7_16",
    "flow_noncausal_cv_s16",
    "flow_causal_s64",
    "flow_causal_clamp10_s16",
)


@pytest.mark.slow
@pytest.mark.skipif(not golden.AVAILABLE, reason=golden.REASON)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_golden(name, flow(), monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        # Several blocks with tails, of both lengths; heads in a group of 4.
        (
            {"query_length": 71, "heads": 4, "head_dim": 32, "value_dim": 24},
            {"chunking": Chunking(16, 32), "clip": 1.0},
        ),
        # A running maximum of the competition.
        ({"query_length": 40, "head_dim": 16}, {"clip": None}),
        # Whole sequences at once, their chunks in a loop; few queries.
        ({"query_length": 9, "length": 600, "heads": 1}, {"chunking": None}),
        # Causal: three blocks of two chunks, with a tail; four heads in a group.
        (
            {"query_length": 71, "heads": 4, "head_dim": 32, "value_dim": 24},
            {"is_causal": True, "chunking": Chunking(16, 32), "clip": 1.0},
        ),
        ({"query_length": 20}, {"is_causal": True}),
        ({"query_length": 20, "key_heads": 1}, {"feature_map": jnp.exp}),
        ({"query_length": 20}, {"eps": 0.1, "extra_eps": 0.2, "feature_map": "relu"}),
    ],
)
def test_like_the_xla_form(sizes: dict, more: dict) -> None:
    length = sizes["query_length"] if more.get("is_causal") else 50
    sizes = {"batch": 2, "length": length} | sizes
    arrays = inputs(3, **sizes)
    hidden = masks(2, sizes["length"]), masks(2, sizes["query_length"], 5)
    more = {"mask": hidden[0], "query_mask": hidden[1], "chunking": SMALL} | more
    compare("flow", arrays, **more)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_half_precision(is_causal: bool) -> None:
    arrays = [jnp.asarray(x, "bfloat16") for x in inputs(5, 1, 30, 30, 2, 64)]
    compare("flow", arrays, 1.5e-2, is_causal=is_causal)


@pytest.mark.slow
@pytest.mark.parametrize("is_causal", [False, True])
def test_padding(is_causal: bool) -> None:
    """The values in padding do not matter, and a sample means the same alone."""
    q, k, v = inputs(8, 2, 20, 20, 2, 8)
    mask = np.arange(20)[None] < np.array([[20], [13]])
    hidden = ~mask[:, :, None, None]

    @fast_jit
    def both(mask, *arrays):
        function = flow(mask=mask, query_mask=mask, is_causal=is_causal)
        out, pullback = jax.vjp(function, *arrays)
        return out, *pullback(jnp.ones_like(out))

    clean = both(mask, q, k, v)
    dirty = both(mask, *(np.where(hidden, np.float32("nan"), x) for x in (q, k, v)))
    for one, two in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one, two)
        assert not np.asarray(one)[1, 13:].any()
    alone = fast_jit(flow(is_causal=is_causal))(*(x[1:, :13] for x in (q, k, v)))
    assert_close(clean[0][1:, :13], alone, 1e-6)
    # Without a key or a query everything is zero.
    for array in both(np.zeros_like(mask), q, k, v):
        assert not np.asarray(array).any()


def test_large_logits() -> None:
    """Without a clip the competition stays finite, whichever key is strongest."""
    more = {"clip": None, "feature_map": "relu"}
    function = fast_jit(flow(**more))
    for strongest in (3, 30):
        q, k, v = inputs(6, 1, 40, 40, 1, 8)
        k[:, strongest] += 300
        q, k = np.abs(q), np.abs(k)
        wanted = attention.flow_attention(q, k, v, implementation="xla", **more)
        assert_close(function(q, k, v), wanted, 1e-5)


def test_under_vmap_and_checkpoint() -> None:
    pairs = [np.stack(x) for x in zip(inputs(9), inputs(10), strict=True)]
    mask = masks(2, 7)

    def slopes(**more: Any) -> Any:
        function = flow(mask=mask, query_mask=mask, **more)

        def loss(arrays):
            return jnp.sin(jax.vmap(jax.checkpoint(function))(*arrays)).sum()

        return fast_jit(jax.grad(loss))(pairs)

    xla = slopes(implementation="xla", chunking=None)
    jax.tree.map(assert_close, slopes(), xla)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs(0)

    def refused(match: str, **more: Any) -> None:
        with pytest.raises(ValueError, match=match):
            flow(**more)(*arrays)

    refused("'pallas' or 'native', got 'triton'", implementation="triton")
    heads = "competition_axis: expected 'source', got 'heads'"
    refused(heads, competition_axis="heads")
    refused("multiple of 16 positions, got 24", chunking=Chunking(24))
    refused("one of source, heads, got 'rows'", competition_axis="rows")
    refused("competition: expected True, got False", competition=False)
    refused("allocation: expected True, got False", allocation=False)
    for clip in (None, 31.0):
        refused(f"at most 30 if causal, got {clip}", clip=clip, is_causal=True)
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    for is_causal in (False, True):
        refused("bfloat16, got .'float32'.", is_causal=is_causal, chunking=None)
    arrays = [jnp.asarray(x, "bfloat16") for x in inputs(0, head_dim=65)]
    refused("at most 64, got .65, 65.", is_causal=True, chunking=None)
    monkeypatch.delenv(kernels.INTERPRET)
    refused(r"'auto' or 'xla' on this machine.*'cpu'")


def test_auto_takes_kernels_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = inputs(0)

    def kernels(**more: Any) -> int:
        function = flow(implementation="auto", chunking=None, **more)
        return str(jax.make_jaxpr(function)(*arrays)).count("pallas_call[")

    assert kernels() == 0
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(selection, "_own_target", lambda: "gpu")
    assert kernels() == 0
    monkeypatch.setattr(selection, "_own_target", lambda: "tpu")
    assert kernels() == 1
    # An option that they do not know is no error then.
    for more in ({"competition_axis": "heads"}, {"allocation": False}):
        assert kernels(**more) == 0
    assert kernels(is_causal=True, clip=None) == 0


@pytest.mark.parametrize("is_causal", [False, True])
def test_lowers_for_a_tpu(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.INTERPRET)
    monkeypatch.setattr(selection, "_own_target", lambda: "tpu")

    def loss(q, k, v):
        mask = np.arange(q.shape[1])[None] < 250
        more = {"is_causal": is_causal, "chunking": None, "query_mask": mask}
        return flow(mask=mask, **more)(q, k, v).astype("float32").sum()

    for length, heads, width, value_width, dtype in (
        (300, 4, 64, 64, "bfloat16"),
        (300, 2, 16, 40, "float32"),
        (9000, 1, 128, 256, "bfloat16"),
    ):
        x = jax.ShapeDtypeStruct((1, length, heads, width), dtype)
        v = jax.ShapeDtypeStruct((1, length, heads, value_width), dtype)
        text = lowered("tpu", jax.value_and_grad(loss, (0, 1, 2)), x, x, v)
        assert text.count("tpu_custom_call") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        # Three chunks with a tail, two samples and heads; widths that are padded.
        ({"batch": 2, "heads": 2, "head_dim": 64, "value_dim": 40}, {}),
        (
            {"batch": 1, "heads": 1, "head_dim": 24, "value_dim": 64},
            {"eps": 0.1, "extra_eps": 0.2, "feature_map": "relu"},
        ),
        # Not causal, with another number of keys and groups of heads.
        (
            {"batch": 2, "heads": 2, "key_heads": 1, "query_length": 70},
            {"is_causal": False},
        ),
        (
            {"batch": 1, "heads": 1, "head_dim": 24, "value_dim": 40},
            {"is_causal": False, "clip": None, "feature_map": jnp.exp},
        ),
        # Wide heads, of two panels of features and three of values.
        (
            {"batch": 1, "heads": 1, "head_dim": 72, "value_dim": 130},
            {"is_causal": False},
        ),
    ],
)
def test_hopper_kernels(
    sizes: dict, more: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(kernels.INTERPRET, "gpu")
    sizes = {"query_length": 140, "length": 140} | sizes
    batch, length = sizes["batch"], sizes["query_length"]
    arrays = inputs(3, **sizes)
    mask, query_mask = masks(batch, 140), masks(batch, length, 5)
    # The values at hidden positions do not matter.
    hidden = (~x[:, :, None, None] for x in (query_mask, mask, mask))
    arrays = [
        jnp.asarray(np.where(x, np.float32("nan"), y), "bfloat16")
        for x, y in zip(hidden, arrays, strict=True)
    ]
    more = {"mask": mask, "query_mask": query_mask} | more
    compare("flow", arrays, 1.5e-2, **({"is_causal": True, "chunking": None} | more))


@pytest.mark.parametrize(("is_causal", "count"), [(False, 5), (True, 2)])
def test_lowers_for_a_hopper_gpu(
    is_causal: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(kernels.INTERPRET)
    monkeypatch.setattr(selection, "_own_target", lambda: "gpu")
    mask = np.arange(600)[None] < 550

    def loss(q, k, v):
        more = {"is_causal": is_causal, "chunking": None}
        return flow(mask=mask, **more)(q, k, v).sum()

    x = jax.ShapeDtypeStruct((1, 600, 2, 64), "bfloat16")
    v = jax.ShapeDtypeStruct((1, 600, 2, 48), "bfloat16")
    text = lowered("gpu", jax.value_and_grad(loss, (0, 1, 2)), x, x, v)
    assert text.count("@mosaic_gpu") == count
