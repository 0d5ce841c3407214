"""Against the dense formulas: masks, grouped heads, weights, dtypes, odd shapes.

Causal forms run in several chunks and segments (`mechanisms.SMALL`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    ALL_FORMS,
    CAUSAL,
    FAMILY,
    FAMILY_STREAMS,
    FORMS,
    FOUR_ROWS,
    NAMES,
    ROWS,
    STREAMS,
    assert_close,
    assert_rejects,
    case,
    fast_jit,
    formula,
    gradients,
    inputs,
    jitted,
    matrix,
    prefill,
    queries,
    row_inputs,
    run,
    unnormed,
    weights,
)


def _rows(name: str, form: str, count: int) -> int:
    """As many queries, if they may be another number than the 7 keys."""
    return 7 if form == "causal" else queries(name, count)


@pytest.mark.parametrize(("name", "form"), ALL_FORMS)
def test_masks_grouped_heads_and_another_value_width(name: str, form: str) -> None:
    sizes = {"batch": 4, "heads": 4, "key_heads": 2, "value_dim": 3}
    q, k, v = inputs(1, query_length=_rows(name, form, 9), **sizes)
    got = np.asarray(jitted(name, form)(q, k, v, FOUR_ROWS))
    assert_close(got, formula(name, form)(q, k, v, FOUR_ROWS))
    assert not got[3].any(), "a row without visible keys is exactly zero"
    if form == "causal":
        assert not got[2, :2].any()


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("norm", {"norm": "layer", "eps": 1e-2}),
    ("norm", {"norm": "layer", "per_head": True}),
    ("norm", {"norm": "rms", "per_head": True, "eps": 1e-2}),
    # No decay at all, and so much that a position sees itself alone.
    ("retention", {"slopes": (0.0, 120.0), "norm": None}),
    ("retention", {"rotate": False, "norm": "rms", "eps": 1e-3}),
    ("lightning", {"slopes": (0.0, 120.0), "norm": "rms"}),
    ("lightning", {"norm": "layer", "eps": 1e-3}),
    ("gau", {"activation": "laplace", "rotate": True, "length": 5}),
    ("flash", {"activation": "laplace", "rotate": False, "length": 5, "chunk": 2}),
    ("sinkhorn", {"block": 2, "iterations": 0}),
    ("sinkhorn", {"block": 2, "iterations": 3, "temperature": 0.2}),
]
OPTIONS_OF_FORMS = [
    (name, form, options)
    for name, options in OPTIONS
    for form in ("full", "causal")[: 1 + (name in CAUSAL)]
]


@pytest.mark.parametrize(("name", "form", "options"), OPTIONS_OF_FORMS)
def test_options(name: str, form: str, options: dict[str, Any]) -> None:
    q, k, v = inputs(4, batch=4, value_dim=3)
    got = fast_jit(run(name, form, **options))(q, k, v, FOUR_ROWS)
    assert_close(got, formula(name, form)(q, k, v, FOUR_ROWS, **options))


# One function derives nearly all of them; causal ones of each family.
WEIGHTED = [x for x in ALL_FORMS if x[1] == "full" or x[0] in FAMILY]


@pytest.mark.parametrize(("name", "form"), [x for x in WEIGHTED if case(x[0]).weighted])
def test_weights_are_those_of_the_formula_and_make_the_output(
    name: str, form: str
) -> None:
    rows = _rows(name, form, 5)
    q, k, v = inputs(3, batch=4, query_length=rows, heads=4, key_heads=1)

    @fast_jit
    def both(q, k, v):
        dense = weights(name, form)(q, k, FOUR_ROWS)
        product = jnp.einsum("bnts,bsnh->btnh", dense, jnp.repeat(v, 4, axis=2))
        return dense, product, run(name, form)(q, k, v, FOUR_ROWS, **unnormed(name))

    dense, product, out = both(q, k, v)
    expected = matrix(formula(name, form), q, k, FOUR_ROWS, **unnormed(name))
    assert_close(dense, expected)
    assert_close(product, out)
    dense = np.asarray(dense)
    assert not dense[~np.broadcast_to(FOUR_ROWS[:, None, None], dense.shape)].any()
    if form == "causal":
        assert (dense >= 0).all() == (not case(name).signed)
        assert not np.triu(dense, 1).any()


@pytest.mark.parametrize(
    ("name", "form"), [x for x in FORMS if x[1] == "full" or x[0] in FAMILY]
)
def test_half_precision(name: str, form: str) -> None:
    """Of so many positions that sums in bfloat16 itself would lose the small terms."""
    arrays, upstream = row_inputs(5)
    half = [jnp.asarray(x, "bfloat16") for x in (*arrays, upstream)]
    exact = [np.asarray(x, "float32") for x in half]
    every = np.ones_like(ROWS)

    def slopes(*arrays: Any) -> Any:
        return gradients(name, form)(*arrays[:3], every, arrays[3])

    (out, rounded), (_, expected) = slopes(*half), slopes(*exact)
    assert out.dtype == jnp.bfloat16
    assert_close(out, formula(name, form)(*exact[:3]), 2e-2)
    for got, exact_slope in zip(rounded, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        assert_close(got, exact_slope, 3e-2)


@pytest.mark.parametrize("name", NAMES)
def test_mixed_dtypes_follow_the_query(name: str) -> None:
    q, k, v = inputs(6)
    got = jitted(name)(jnp.asarray(q, "bfloat16"), k, jnp.asarray(v, "float16"))
    assert got.dtype == jnp.bfloat16
    assert_close(got, formula(name)(q, k, v), 2e-2)


SUMS = ["softmax", "linear", "cosformer", "flow", "performer", "nystrom"]


@pytest.mark.parametrize(
    ("name", "form"),
    [(name, "full") for name in SUMS] + [(name, "causal") for name in STREAMS],
)
def test_float16_sums_do_not_overflow(name: str, form: str) -> None:
    ones = jnp.full((1, 2048, 1, 64), 4, "float16")
    level = case(name).level
    chunking = {"chunking": None} if form == "causal" else {}
    query = ones if form == "causal" else ones[:, :2]
    out = fast_jit(run(name, form, **chunking, **level or {}))(query, ones, ones)
    assert np.isfinite(np.asarray(out, "float32")).all()
    if level is not None:
        expected = 1 if "norm" in level else 4
        assert_close(out, expected * np.ones(out.shape), 1e-2)


@pytest.mark.parametrize("name", ["softmax", "linear", "gla", "linformer"])
def test_numpy_arrays_of_64_bits_count_as_32(name: str) -> None:
    q, k, v = (x.astype("float64") for x in inputs(18))
    assert jax.eval_shape(lambda: run(name)(q, k, v)).dtype == jnp.float32


MILLION = 2**20


# Of softmax alone, the pairs of blocks are as many as a million.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "softmax"])
def test_a_million_positions_have_a_shape(name: str) -> None:
    """On shapes alone; here three mechanisms have arrays for LENGTH positions."""
    x = jax.ShapeDtypeStruct((1, MILLION, 1, 4), jnp.float32)
    more = {"max_length": MILLION} if name == "cosformer" else {}
    for is_causal in (False, True)[: 1 + (name in CAUSAL)]:
        attend = functools.partial(run(name), is_causal=is_causal, **more)
        if name in ("linformer", "sinkhorn", "synthesizer"):
            assert_rejects(
                lambda call=attend: jax.eval_shape(call, x, x, x), "input is longer"
            )
        else:
            assert jax.eval_shape(attend, x, x, x).shape == x.shape


@pytest.mark.parametrize("name", ["linear", "cosformer", "performer"])
def test_many_equal_positions_are_their_mean(name: str) -> None:
    more = {"max_length": MILLION} if name == "cosformer" else {}
    attend = functools.partial(run(name), is_causal=True, **more)
    ones = jnp.ones((1, MILLION // 4, 1, 4))
    assert_close(jax.jit(attend)(ones, ones, ones), np.ones(ones.shape), 1e-5)


# One query and one key are in `test_one_position_of_one_head_in_float16`.
ODD_SHAPES = [
    {"batch": 3, "query_length": 2, "length": 13, "head_dim": 1, "value_dim": 2}
    | {"heads": 3, "key_heads": 1},
    {"batch": 1, "query_length": 16, "length": 5, "head_dim": 5, "value_dim": 1}
    | {"heads": 3, "key_heads": 3},
]


def _odd_inputs(name: str, number: int, length: int | None = None) -> tuple:
    """Query, key and value of a shape, and a mask that hides half of the keys."""
    shape = ODD_SHAPES[number]
    if case(name).paired:
        shape = shape | {"head_dim": shape["head_dim"] + 1}
    keys = length or shape["length"]
    rows = length or queries(name, shape["query_length"], keys)
    arrays = inputs(1, **shape | {"query_length": rows, "length": keys})
    return *arrays, np.random.default_rng(number).random((shape["batch"], keys)) < 0.5


@pytest.mark.parametrize("name", NAMES)
def test_odd_shapes(name: str) -> None:
    arrays = _odd_inputs(name, NAMES.index(name) % 2)
    # Of one column, a norm leaves nothing but a sign.
    got = fast_jit(run(name, **unnormed(name)))(*arrays)
    assert_close(got, formula(name)(*arrays, **unnormed(name)))


# Chunks of one, that do not divide the length, and longer than it.
CUTS = [(1, Chunking(1, 6), 9), (0, Chunking(5, 512, "parallel"), 3)]


# Those with gates take one array more for each position.
@pytest.mark.parametrize(
    "name", [x for x in FAMILY_STREAMS if not attention.MECHANISMS[x].gates]
)
@pytest.mark.parametrize(("number", "chunking", "prompt"), CUTS)
def test_odd_shapes_of_causal_forms_and_streams(
    name: str, number: int, chunking: Chunking, prompt: int
) -> None:
    *arrays, mask = _odd_inputs(name, number, 13)
    start = functools.partial(prefill, name, chunking=chunking)

    @fast_jit
    def both(*arrays):
        masked = run(name, "causal", chunking=chunking)(*arrays, mask)
        # The prompt is real throughout: what follows stands right behind it.
        first, state = start(*(x[:, :prompt] for x in arrays))
        rest = [x[:, prompt:] for x in arrays]
        parts = [first, start(*rest, state=state)[0]]
        alone = run(name, "causal", chunking=Chunking())(*arrays)
        return masked, jnp.concatenate(parts, 1), alone

    masked, streamed, alone = both(*arrays)
    assert_close(masked, formula(name, "causal")(*arrays, mask))
    assert_close(streamed, alone)
