"""The causal forms of the linear mechanisms: formulas, the future, padding.

They run in several chunks and super-blocks (`mechanisms.SMALL`) unless a test says
otherwise.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.sums import Chunking

from .. import reference
from ..mechanisms import (
    SIGNED,
    STREAMS,
    assert_close,
    causal,
    causal_formula,
    fast_jit,
    inputs,
    jitted_causal,
    run,
    unnormed,
    weights,
)

pytestmark = pytest.mark.slow

# Right, scattered and left; nothing at all.
MASK = np.array(
    [
        [1, 1, 1, 1, 1, 0, 0],
        [0, 1, 0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1, 1, 1],
        [0] * 7,
    ],
    bool,
)


@pytest.mark.parametrize("name", STREAMS)
def test_the_formula_with_masks_grouped_heads_and_another_value_width(name) -> None:
    q, k, v = inputs(1, batch=4, heads=4, key_heads=2, value_dim=3)
    got = np.asarray(jitted_causal(name)(q, k, v, MASK))
    assert_close(got, causal_formula(name)(q, k, v, MASK))
    assert not got[3].any(), "a row without visible keys is exactly zero"
    assert not got[2, :2].any()


@pytest.mark.parametrize("name", STREAMS)
def test_the_cut_changes_nothing(name: str) -> None:
    @fast_jit
    def each(arrays):
        def loss(arrays, chunking):
            out = causal(name, chunking=chunking)(*arrays, MASK[1:3])
            return jnp.sin(out).sum(), out

        chunkings = Chunking(2, 4), Chunking(3, 6, "parallel")
        call = jax.value_and_grad(loss, has_aux=True)
        return [call(arrays, chunking) for chunking in chunkings]

    jax.tree.map(assert_close, *each(inputs(2)))


@pytest.mark.parametrize("name", STREAMS)
def test_weights_times_values_is_the_output(name: str) -> None:
    q, k, v = inputs(3, batch=4, heads=4, key_heads=1)

    @fast_jit
    def both(q, k, v):
        matrix = weights(name)(q, k, MASK, is_causal=True)
        values = jnp.repeat(v, 4, axis=2)
        product = jnp.einsum("bnts,bsnh->btnh", matrix, values)
        return matrix, product, causal(name, **unnormed(name))(q, k, v, MASK)

    matrix, product, out = both(q, k, v)
    assert_close(product, out)
    matrix = np.asarray(matrix)
    assert (matrix >= 0).all() == (name not in SIGNED)
    assert not np.triu(matrix, 1).any()
    assert not matrix[~np.broadcast_to(MASK[:, None, None], matrix.shape)].any()


@pytest.mark.parametrize("name", STREAMS)
def test_a_prefix_is_the_output_of_the_prefix(name: str) -> None:
    arrays = inputs(4)
    whole = np.asarray(jitted_causal(name)(*arrays))
    for length in (1, 5):
        alone = jitted_causal(name)(*(x[:, :length] for x in arrays))
        assert_close(whole[:, :length], alone, 1e-6)


@pytest.mark.parametrize("name", STREAMS)
def test_the_future_has_no_influence_and_no_gradient(name: str) -> None:
    arrays = inputs(5)
    later = [np.where(np.arange(7)[None, :, None, None] < 4, x, 1e4) for x in arrays]
    call = jitted_causal(name)
    changed = call(*(x.astype("float32") for x in later))
    np.testing.assert_array_equal(changed[:, :4], call(*arrays)[:, :4])

    @fast_jit
    def slope(arrays):
        return jax.grad(lambda a: jnp.sin(causal(name)(*a)[:, :4]).sum())(arrays)

    for gradient in slope(arrays):
        assert not np.asarray(gradient)[:, 4:].any()
        assert np.asarray(gradient)[:, :4].any()


@pytest.mark.parametrize("name", STREAMS)
def test_the_last_row_sees_everything(name: str) -> None:
    arrays = inputs(6)
    last = np.asarray(jitted_causal(name)(*arrays))[:, -1]
    whole = np.asarray(fast_jit(run(name))(*arrays))[:, -1]
    if name == "flow":
        assert np.abs(last - whole).max() > 1e-3, "a definition of its own"
    else:
        assert_close(last, whole)


@pytest.mark.parametrize("name", ["linear", "cosformer", "performer"])
def test_rows_are_means_of_what_they_see(name: str) -> None:
    q, k, v = inputs(7)
    out = jitted_causal(name)(np.abs(q), np.abs(k), np.full_like(v, 3))
    assert_close(out, np.full_like(v, 3))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_padded_batch_equals_each_sample_alone(name: str, side: str) -> None:
    arrays = inputs(8)
    lengths = (5, 7)
    mask = np.arange(7)[None] < np.array(lengths)[:, None]
    mask = mask if side == "right" else mask[:, ::-1]
    together = np.asarray(jitted_causal(name)(*arrays, mask))
    for row, length in enumerate(lengths):
        part = slice(0, length) if side == "right" else slice(7 - length, 7)
        alone = jitted_causal(name)(*(x[row : row + 1, part] for x in arrays))
        assert_close(together[row : row + 1, part], alone, 2e-6)


@functools.cache
def _pulled_back(name: str):
    """The output under MASK and its gradients; two tests share a compilation."""

    def both(*arrays):
        out, pullback = jax.vjp(lambda *a: causal(name)(*a, MASK), *arrays)
        return out, pullback(jnp.ones_like(out))

    return fast_jit(both)


@pytest.mark.parametrize("name", STREAMS)
def test_what_padding_holds_does_not_matter(name: str) -> None:
    q, k, v = inputs(9, batch=4)
    both = _pulled_back(name)

    def spoilt(x: np.ndarray, garbage: float) -> np.ndarray:
        return np.where(MASK[:, :, None, None], x, np.float32(garbage))

    clean = both(q, k, v)
    for garbage in (1e6, np.nan):
        query = spoilt(q, garbage) if name == "flow" else q
        dirty = both(query, spoilt(k, garbage), spoilt(v, garbage))
        jax.tree.map(np.testing.assert_array_equal, dirty, clean)


@pytest.mark.parametrize("name", STREAMS)
def test_gradients_match_finite_differences(name: str) -> None:
    sizes = {"batch": 1, "query_length": 7, "value_dim": 3}
    # Flow's clip bends the function where a step of differences may cross it.
    keywords = {"clip": None} if name == "flow" else {}

    @fast_jit
    def slope(arrays):
        def loss(arrays):
            return jnp.sin(causal(name, **keywords)(*arrays, MASK[1:2])).sum()

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


@pytest.mark.parametrize("name", STREAMS)
def test_gradients_stay_finite(name: str) -> None:
    q, k, v = inputs(10, batch=4)
    both = _pulled_back(name)
    changes = {"dead": lambda x: -np.abs(x), "large": lambda x: 100 * x}
    for kind, change in (changes | {"zero": np.zeros_like}).items():
        out, gradients = both(change(q), change(k), v)
        for array in (out, *gradients):
            assert np.isfinite(np.asarray(array)).all(), kind
            if name == "cosformer" and kind != "large":
                assert not np.asarray(array).any(), "dead rows are exactly zero"


def test_cosformer_with_one_length_a_sample() -> None:
    q, k, v = inputs(16, batch=3)
    lengths = np.array([7, 4, 0], "int32")
    got = np.asarray(jitted_causal("cosformer")(q, k, v, max_length=lengths))
    for row, length in enumerate(lengths[:2]):
        alone = [x[row : row + 1, :length] for x in (q, k, v)]
        wanted = np.zeros_like(got[row : row + 1])
        wanted[:, :length] = reference.cosformer(*alone, causal=True)
        assert_close(got[row : row + 1], wanted)
    assert not got[2].any()


@pytest.mark.parametrize("name", ["linear", "cosformer", "flow"])
def test_nothing_is_made_of_the_whole_sequence(name: str) -> None:
    x = jnp.zeros((1, 64, 1, 8))
    call = causal(name, chunking=Chunking(4, 16))
    more = {"max_length": 64} if name == "cosformer" else {}
    text = str(jax.make_jaxpr(jax.grad(lambda x: call(x, x, x, **more).sum()))(x))
    assert "f32[1,1,16,8]" in text, "features, heads first, inside the loop"
    for whole in ("f32[1,1,64,8]", "f32[1,64,1,16]", "f32[1,1,64,16]"):
        assert whole not in text
    assert "f32[1,1,4,4,16]" not in text, "nor are features put side by side"


@pytest.mark.parametrize("clip", [None, 10.0])
def test_flow_with_another_clip(clip: float | None) -> None:
    q, k, v = inputs(17)
    got = fast_jit(causal("flow", clip=clip))(q, k, v)
    assert_close(got, reference.flow_causal(q, k, v, clip=clip))


def test_flow_without_a_clip_survives_large_flows() -> None:
    # The features of two keys are huge: exp of their flows overflows without a maximum,
    # and a maximum over later positions would leave nothing of the earlier ones.
    q, k, v = inputs(18)
    k = np.where(np.isin(np.arange(7), (3, 5))[None, :, None, None], 1e4 + k, k)
    keywords = {"feature_map": "relu", "clip": None}
    arrays = (np.abs(q), np.abs(k).astype("float32"), v)

    @fast_jit
    def both(*arrays):
        call = causal("flow", **keywords)
        out, pullback = jax.vjp(call, *arrays)
        terms = attention.flow_terms(*arrays[:2], is_causal=True, **keywords)
        return out, terms, pullback(jnp.ones_like(out))

    out, terms, gradients = both(*arrays)
    for array in (out, *terms, *gradients):
        assert np.isfinite(np.asarray(array)).all()
    shares = np.asarray(terms.competition) / np.arange(1, 8)[None, :, None]
    assert shares[:, 0].min() == 1
    assert (shares <= 1).all() and (shares >= 0).all()
    assert np.abs(np.asarray(out)[:, :3]).min() > 0


def test_flow_queries_are_hidden_with_the_keys_unless_said_otherwise() -> None:
    q, k, v = inputs(19)
    mask = MASK[1:3]
    call = jitted_causal("flow")
    np.testing.assert_array_equal(
        call(q, k, v, mask), call(q, k, v, mask, query_mask=mask)
    )
    everyone = np.ones((2, 7), bool)
    own = np.asarray(call(q, k, v, mask, query_mask=everyone))
    assert own[0, 2].any() and not np.asarray(call(q, k, v, mask))[0, 2].any()
