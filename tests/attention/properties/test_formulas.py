"""Against the dense formulas: cross attention, masks, grouped heads, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..mechanisms import (
    CAUSAL,
    LENGTH,
    MASK,
    NAMES,
    STREAMS,
    assert_close,
    assert_rejects,
    case,
    fast_jit,
    formula,
    having,
    inputs,
    jitted,
    matrix,
    queries,
    run,
    unnormed,
    weights,
)


@pytest.mark.parametrize("name", NAMES)
def test_cross_attention_with_a_mask_and_another_value_width(name: str) -> None:
    q, k, v = inputs(1, batch=3, query_length=queries(name, 5), value_dim=3)
    got = jitted(name)(q, k, v, MASK)
    assert_close(got, formula(name)(q, k, v, MASK))
    assert not np.asarray(got[2]).any(), "a row without visible keys is exactly zero"
    assert_close(jitted(name)(q, k, v, MASK[:, None, None]), got, 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_more_queries_than_keys_and_grouped_heads(name: str) -> None:
    q, k, v = inputs(2, query_length=queries(name, 9), heads=4, key_heads=2)
    assert_close(jitted(name)(q, k, v), formula(name)(q, k, v))


@pytest.mark.parametrize("name", having("weighted"))
def test_weights_are_those_of_the_formula_and_make_the_output(name: str) -> None:
    rows = queries(name, 5)
    q, k, v = inputs(3, batch=3, query_length=rows, heads=4, key_heads=1)

    @fast_jit
    def both(q, k, v):
        given = weights(name)(q, k, MASK)
        product = jnp.einsum("bnts,bsnh->btnh", given, jnp.repeat(v, 4, axis=2))
        return given, product, run(name)(q, k, v, MASK, **unnormed(name))

    given, product, out = both(q, k, v)
    assert_close(given, matrix(formula(name), q, k, MASK, **unnormed(name)))
    assert_close(product, out)
    hidden = np.broadcast_to(~MASK[:, None, None], given.shape)
    assert not np.asarray(given)[hidden].any()


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_keeps_its_dtype_and_two_percent(name: str) -> None:
    exact = inputs(4, query_length=queries(name, 7, LENGTH), length=LENGTH)
    q, k, v = (jnp.asarray(x, "bfloat16") for x in exact)
    got = jitted(name)(q, k, v)
    assert got.dtype == jnp.bfloat16
    assert_close(got, formula(name)(q, k, v), 2e-2)


@pytest.mark.parametrize(
    ("name", "is_causal"),
    [(name, False) for name in NAMES] + [(name, True) for name in STREAMS],
)
def test_half_precision_gradients(name: str, is_causal: bool) -> None:
    # Longer, where sums in bfloat16 itself would lose the small terms.
    exact = inputs(5, batch=1, query_length=LENGTH, length=LENGTH, heads=1)
    exact = [np.asarray(jnp.asarray(x, "bfloat16"), "float32") for x in exact]

    @fast_jit
    def gradients(*arrays):
        def loss(*arrays):
            out = run(name)(*arrays, **more).astype("float32")
            return (out * jnp.cos(out)).sum()

        return jax.grad(loss, (0, 1, 2))(*arrays)

    more = {"is_causal": True} if is_causal else {}
    rounded = gradients(*(jnp.asarray(x, "bfloat16") for x in exact))
    for got, wanted in zip(rounded, gradients(*exact), strict=True):
        assert got.dtype == jnp.bfloat16
        assert_close(got, wanted, 3e-2)


@pytest.mark.parametrize(
    "name", ["softmax", "linear", "cosformer", "flow", "performer", "nystrom"]
)
def test_float16_sums_do_not_overflow(name: str) -> None:
    ones = jnp.full((1, 2048, 1, 64), 4, "float16")
    keywords = {"max_length": 2048} if name == "cosformer" else {}
    out = fast_jit(lambda x: run(name)(x[:, :2], x, x, **keywords))(ones)
    assert np.isfinite(np.asarray(out, "float32")).all()
    if name != "flow":
        assert_close(out, 4 * np.ones(out.shape), 1e-2)


@pytest.mark.parametrize("name", NAMES)
def test_numpy_arrays_of_64_bits_count_as_32(name: str) -> None:
    q, k, v = (x.astype("float64") for x in inputs(18))
    out = jax.eval_shape(lambda: run(name)(q, k, v))
    assert out.dtype == jnp.float32


MILLION = 2**20


# Of softmax alone, the pairs of blocks are as many as a million.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "softmax"])
def test_a_million_positions_have_a_shape(name: str) -> None:
    """On shapes alone; here three mechanisms have arrays for LENGTH positions."""
    x = jax.ShapeDtypeStruct((1, MILLION, 1, 4), jnp.float32)
    more = {"max_length": MILLION} if name == "cosformer" else {}
    for form in [{}, {"is_causal": True}][: 1 + (name in CAUSAL)]:
        attend = functools.partial(run(name), **form, **more)
        if name in ("linformer", "sinkhorn", "synthesizer"):
            assert_rejects(
                lambda call=attend: jax.eval_shape(call, x, x, x), "input is longer"
            )
        else:
            assert jax.eval_shape(attend, x, x, x).shape == x.shape


@pytest.mark.parametrize("name", ["linear", "cosformer", "performer"])
def test_a_million_equal_positions_are_their_mean(name: str) -> None:
    more = {"max_length": MILLION} if name == "cosformer" else {}
    attend = functools.partial(run(name), is_causal=True, **more)
    ones = jnp.ones((1, MILLION, 1, 4))
    assert_close(jax.jit(attend)(ones, ones, ones), np.ones(ones.shape), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_mixed_dtypes_follow_the_query(name: str) -> None:
    q, k, v = inputs(6)
    got = jitted(name)(jnp.asarray(q, "bfloat16"), k, jnp.asarray(v, "float16"))
    assert got.dtype == jnp.bfloat16
    assert_close(got, formula(name)(q, k, v), 2e-2)


@st.composite
def _odd_shapes(draw):
    heads = draw(st.sampled_from([1, 3]))
    shape = {
        "batch": draw(st.integers(1, 3)),
        "query_length": draw(st.integers(1, LENGTH)),
        "length": draw(st.integers(1, LENGTH)),
        "heads": heads,
        "head_dim": draw(st.sampled_from([1, 5])),
        "value_dim": draw(st.sampled_from([1, 2])),
        "key_heads": draw(st.sampled_from([1, heads])),
    }
    mask = np.array(
        draw(
            st.lists(
                st.booleans(),
                min_size=shape["batch"] * shape["length"],
                max_size=shape["batch"] * shape["length"],
            )
        )
    ).reshape(shape["batch"], shape["length"])
    return shape, mask, draw(st.integers(0, 99))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4, deadline=None, derandomize=True, database=None)
@given(drawn=_odd_shapes())
def test_odd_shapes(name: str, drawn) -> None:
    shape, mask, seed = drawn
    if case(name).paired:
        shape = shape | {"head_dim": shape["head_dim"] + 1}
    shape["query_length"] = queries(name, shape["query_length"], shape["length"])
    q, k, v = inputs(seed, **shape)
    # Of one column, a norm leaves nothing but a sign.
    given = unnormed(name)
    got = _unnormed(name)(q, k, v, mask)
    assert_close(got, formula(name)(q, k, v, mask, **given))


@functools.cache
def _unnormed(name: str):
    return fast_jit(functools.partial(run(name), **unnormed(name)))
