"""The causal forms: formulas and the future.

They run in several chunks and segments (`mechanisms.SMALL`) unless a test says
otherwise.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    CAUSAL,
    FOUR_ROWS,
    SMALL,
    STREAMS,
    assert_close,
    case,
    causal,
    causal_formula,
    cuts,
    fast_jit,
    having,
    inputs,
    jitted_causal,
    matrix,
    run,
    unnormed,
    weights,
)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_formula_with_masks_grouped_heads_and_another_value_width(name) -> None:
    q, k, v = inputs(1, batch=4, heads=4, key_heads=2, value_dim=3)
    got = np.asarray(jitted_causal(name)(q, k, v, FOUR_ROWS))
    assert_close(got, causal_formula(name)(q, k, v, FOUR_ROWS))
    assert not got[3].any(), "a row without visible keys is exactly zero"
    assert not got[2, :2].any()


@pytest.mark.parametrize("name", [name for name in STREAMS if cuts(name, SMALL)])
def test_the_cut_changes_nothing(name: str) -> None:
    @fast_jit
    def each(arrays):
        def loss(arrays, chunking):
            out = causal(name, chunking=chunking)(*arrays, FOUR_ROWS[1:3])
            return jnp.sin(out).sum(), out

        chunkings = Chunking(2, 4), Chunking(3, 6, "parallel")
        call = jax.value_and_grad(loss, has_aux=True)
        return [call(arrays, chunking) for chunking in chunkings]

    assert_close(*each(inputs(2)))


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "softmax"])
def test_a_nan_in_a_value_reaches_no_earlier_chunk(name: str) -> None:
    q, k, v = inputs(4, 1, 200, 200, 1)
    v[:, 150] = np.nan
    more = {"max_length": 200} if name == "cosformer" else {}
    out = np.asarray(fast_jit(causal(name, chunking=None, **more))(q, k, v))
    assert np.isfinite(out[:, :128]).all() and np.isnan(out[:, 150:]).all()


@pytest.mark.parametrize("name", CAUSAL)
def test_weights_are_those_of_the_formula_and_make_the_output(name: str) -> None:
    q, k, v = inputs(3, batch=4, heads=4, key_heads=1)

    @fast_jit
    def both(q, k, v):
        given = weights(name)(q, k, FOUR_ROWS, is_causal=True)
        product = jnp.einsum("bnts,bsnh->btnh", given, jnp.repeat(v, 4, axis=2))
        return given, product, causal(name, **unnormed(name))(q, k, v, FOUR_ROWS)

    given, product, out = both(q, k, v)
    assert_close(given, matrix(causal_formula(name), q, k, FOUR_ROWS, **unnormed(name)))
    assert_close(product, out)
    given = np.asarray(given)
    assert (given >= 0).all() == (not case(name).signed)
    assert not np.triu(given, 1).any()
    assert not given[~np.broadcast_to(FOUR_ROWS[:, None, None], given.shape)].any()


@pytest.mark.parametrize("name", CAUSAL)
def test_a_prefix_is_the_output_of_the_prefix(name: str) -> None:
    arrays = inputs(4)
    whole = np.asarray(jitted_causal(name)(*arrays))
    for length in (1, 5):
        alone = jitted_causal(name)(*(x[:, :length] for x in arrays))
        assert_close(whole[:, :length], alone, 1e-6)


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_has_no_influence_and_no_gradient(name: str) -> None:
    arrays = inputs(5)
    later = [np.where(np.arange(7)[None, :, None, None] < 4, x, 1e4) for x in arrays]
    call = jitted_causal(name)
    changed = call(*(x.astype("float32") for x in later))
    np.testing.assert_array_equal(changed[:, :4], call(*arrays)[:, :4])

    @fast_jit
    def slope(arrays):
        return jax.grad(lambda a: jnp.sin(causal(name)(*a)[:, :4]).sum())(arrays)

    read = {"value", *attention.MECHANISMS[name].projections}
    # The gates are made of the key here.
    read |= {"key"} if case(name).gates(arrays[1], np) else set()
    named = zip(("query", "key", "value"), slope(arrays), strict=True)
    for argument, gradient in named:
        assert not np.asarray(gradient)[:, 4:].any()
        assert np.asarray(gradient)[:, :4].any() == (argument in read)


@pytest.mark.parametrize("name", STREAMS)
def test_the_last_row_sees_everything(name: str) -> None:
    arrays = inputs(6)
    last = np.asarray(jitted_causal(name)(*arrays))[:, -1]
    whole = np.asarray(fast_jit(run(name))(*arrays))[:, -1]
    if case(name).causal_formula:
        assert np.abs(last - whole).max() > 1e-3, "a definition of its own"
    else:
        assert_close(last, whole)


@pytest.mark.parametrize("name", having("mean", STREAMS))
def test_rows_are_means_of_what_they_see(name: str) -> None:
    q, k, v = inputs(7)
    out = jitted_causal(name)(np.abs(q), np.abs(k), np.full_like(v, 3))
    assert_close(out, np.full_like(v, 3))


@pytest.mark.parametrize("name", ["linear", "cosformer", "flow"])
def test_nothing_is_made_of_the_whole_sequence(name: str) -> None:
    x = jnp.zeros((1, 64, 1, 8))
    call = causal(name, chunking=Chunking(4, 16))
    more = {"max_length": 64} if name == "cosformer" else {}
    text = str(jax.make_jaxpr(jax.grad(lambda x: call(x, x, x, **more).sum()))(x))
    assert "f32[1,1,16,8]" in text, "features, heads first, inside the loop"
    for whole in ("f32[1,1,64,8]", "f32[1,64,1,16]", "f32[1,1,64,16]"):
        assert whole not in text
