"""Synthesizer, Sinkhorn and Reformer beyond the common tests."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.softmax.synthesizer import VARIANTS

from ..mechanisms import (
    LENGTH,
    assert_close,
    fast_jit,
    inputs,
    jitted,
    keywords,
    largest_array,
)
from . import grouping

MASK = np.array([[1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 0, 1, 1, 0], [0] * 7], bool)
SIZES = {"max_length": LENGTH, "num_heads": 2, "head_dim": 4}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_synthesizer_variants(variant: str, causal: bool) -> None:
    q, k, v = inputs(1, batch=3, key_heads=1, value_dim=3)
    arrays = attention.synthesizer_parameters(
        jax.random.key(0), variant=variant, rank=3, **SIZES
    )
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=x.shape).astype("float32") for n, x in arrays.items()}
    given: dict[str, Any] = {"variant": variant, "is_causal": causal, **arrays}

    @fast_jit
    def both(q, k, v):
        matrix = attention.synthesizer_weights(q, k, MASK, **given)
        out, pullback = jax.vjp(
            lambda *a: attention.synthesizer_attention(*a, MASK, **given), q, k, v
        )
        return matrix, out, pullback(jnp.ones_like(out))

    matrix, out, gradients = both(q, k, v)
    wanted = grouping.synthesizer(
        q, k, v, MASK, causal=causal, variant=variant, **arrays
    )
    assert_close(out, wanted)
    assert_close(np.einsum("bnts,bsnv->btnv", matrix, np.repeat(v, 2, 2)), out)
    reads_queries = bool(np.asarray(gradients[0]).any())
    assert reads_queries == ("dense" in variant)
    assert not np.asarray(gradients[1]).any(), "keys are not read"


def test_synthesizer_takes_a_mask_of_pairs() -> None:
    q, k, v = inputs(2)
    given = keywords("synthesizer", 2, 4)
    run = fast_jit(
        lambda *a, **more: attention.synthesizer_attention(*a, **given, **more),
        static_argnames="is_causal",
    )
    pairs = np.tri(7, dtype=bool)[None, None]
    assert_close(run(q, k, v, pairs), run(q, k, v, is_causal=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_synthesizer_parameters(variant: str) -> None:
    sizes = {"max_length": 10, "num_heads": 2, "head_dim": 3, "rank": 5}
    make = functools.partial(attention.synthesizer_parameters, variant=variant, **sizes)
    made = jax.eval_shape(make, jax.random.key(0))
    made = {name: array.shape for name, array in made.items()}
    assert (
        made
        == {
            "dense": {"first": (2, 3, 10), "first_bias": (2, 10)},
            "factorised_dense": {
                "first": (2, 3, 3),
                "first_bias": (2, 3),
                "second": (2, 3, 4),
                "second_bias": (2, 4),
            },
            "random": {"first": (2, 10, 10)},
            "factorised_random": {"first": (2, 10, 5), "second": (2, 10, 5)},
        }[variant]
    )


def test_sinkhorn_sorts_by_a_doubly_stochastic_matrix_and_learns_it() -> None:
    q, k, v = inputs(3, 1, query_length=12, length=12)
    given = keywords("sinkhorn", 2, 4)

    @fast_jit
    def slope(kernel, mask):
        def loss(kernel):
            more = given | {"sort_kernel": kernel, "iterations": 50}
            matrix = attention.sinkhorn_weights(q, k, mask=mask, **more)
            out = attention.sinkhorn_attention(q, k, v, mask=mask, **more)
            return jnp.sin(out).sum(), matrix

        return jax.grad(loss, has_aux=True)(kernel)

    kernel = given["sort_kernel"]
    gradient, matrix = slope(kernel, np.ones((1, 12), bool))
    assert_close(np.asarray(matrix).sum(-1), np.ones((1, 2, 12)), 1e-5)
    # As published the permutation cancels; here it has a gradient.
    assert np.abs(np.asarray(gradient)[..., :4]).min() > 0
    assert not np.asarray(gradient)[..., 4:].any()
    # Of two real blocks only those two can change places.
    gradient, matrix = slope(kernel, np.arange(12)[None] < 6)
    assert not np.asarray(matrix)[..., 6:].any()
    assert np.asarray(gradient)[..., :2].any()
    assert not np.asarray(gradient)[..., 2:].any()


@pytest.mark.parametrize(
    "more", [{"iterations": 0}, {"iterations": 3, "temperature": 0.2}]
)
def test_sinkhorn_options(more: dict) -> None:
    q, k, v = inputs(4, 3)
    given = keywords("sinkhorn", 2, 4) | more | {"block": 2}
    got = fast_jit(lambda *a: attention.sinkhorn_attention(*a, mask=MASK, **given))
    assert_close(got(q, k, v), grouping.sinkhorn(q, k, v, MASK, **given))


def test_sinkhorn_parameters() -> None:
    made = attention.sinkhorn_parameters(jax.random.key(0), block=5, **SIZES)
    assert made["sort_kernel"].shape == (2, 4, 4)
    assert made["sort_bias"].shape == (2, 4)


REFORMER = {"chunk": 4, "num_buckets": 6, "num_hashes": 3, "seed": 2}


def test_reformer_over_many_chunks_with_padding_anywhere() -> None:
    q, _, v = inputs(5, 3, query_length=50, length=50)
    mask = np.stack([np.arange(50) < 37, np.arange(50) >= 20, np.arange(50) % 3 > 0])
    run = functools.partial(attention.reformer_attention, **REFORMER)

    @fast_jit
    def both(q, v, garbage):
        hidden = ~mask[:, :, None, None]
        q, v = (jnp.where(hidden, garbage, x) for x in (q, v))
        out, pullback = jax.vjp(lambda q, v: run(q, q, v, mask), q, v)
        return out, pullback(jnp.cos(out))

    out, gradients = both(q, v, 0.0)
    assert_close(out, grouping.reformer(q, q, v, mask, **REFORMER))
    assert not np.asarray(out)[~mask].any()
    for garbage in (1e6, np.nan):
        jax.tree.map(
            np.testing.assert_array_equal, both(q, v, garbage), (out, gradients)
        )
    for gradient in gradients:
        assert not np.asarray(gradient)[~mask].any()
        assert np.asarray(gradient)[mask].any()


def test_reformer_gradients_match_finite_differences() -> None:
    run = functools.partial(attention.reformer_attention, **REFORMER)

    @fast_jit
    def slope(q, v):
        loss = lambda q, v: jnp.sin(run(q, q, v)).sum()  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(q, v)

    with jax.enable_x64(True):
        shape = {"batch": 1, "query_length": 23, "length": 23}
        (q, _, v), (dq, _, dv) = (
            [x.astype("float64") for x in inputs(seed, **shape)] for seed in (6, 7)
        )
        step = 1e-6
        ahead = slope(q + step * dq, v + step * dv)[0]
        behind = slope(q - step * dq, v - step * dv)[0]
        of_q, of_v = slope(q, v)[1]
        wanted = (of_q * dq).sum() + (of_v * dv).sum()
        assert abs((ahead - behind) / (2 * step) - wanted) < 1e-6 * abs(wanted) + 1e-8


def test_reformer_alone_attends_to_itself() -> None:
    """Of two opposite vectors each has a bucket of its own."""
    q, _, v = inputs(8, 1, query_length=2, length=2, heads=1)
    q[:, 1] = -q[:, 0]
    keywords = {"chunk": 2, "num_buckets": 2}
    run = fast_jit(lambda q, v: attention.reformer_attention(q, q, v, **keywords))
    assert_close(run(q, v), v)
    same = np.concatenate([q[:, :1], q[:, :1]], 1)
    assert_close(run(same, v), v[:, ::-1])


def test_reformer_takes_its_buckets_from_max_length() -> None:
    q, k, v = inputs(9, query_length=10, length=10)
    run = fast_jit(
        functools.partial(attention.reformer_attention, chunk=2),
        static_argnames=("max_length", "num_buckets"),
    )
    for more, count in (({}, 6), ({"max_length": 16}, 8), ({"max_length": 17}, 10)):
        assert_close(run(q, k, v, **more), run(q, k, v, num_buckets=count), 1e-6)


@pytest.mark.parametrize("name", ["sinkhorn", "reformer"])
def test_no_array_grows_with_the_square(name: str) -> None:
    def largest(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
        given = {"num_buckets": 16}
        if name == "sinkhorn":
            given = {"sort_kernel": np.ones((1, 4, 64), "float32")}
        function = getattr(attention, f"{name}_attention")
        loss = jax.grad(lambda x: function(x, x, x, **given).sum())
        return largest_array(loss, x)

    assert largest(4096) <= 4.01 * largest(1024)


Q, K, V = inputs(10, query_length=5)
KERNEL = np.ones((2, 4, LENGTH), "float32")


def _synthesizer(**more: Any) -> dict[str, Any]:
    return {"variant": "dense", "first": KERNEL} | more


@pytest.mark.parametrize(
    ("name", "given", "parts"),
    [
        ("synthesizer", {}, ("first: expected [N, L, k]", "got None", "_parameters")),
        ("synthesizer", _synthesizer(variant="mix"), ("variant: expected", "'mix'")),
        (
            "synthesizer",
            _synthesizer(first=KERNEL[:1]),
            ("first: expected [N, H, L]=(2, 4, L)", "(1, 4, 16)"),
        ),
        (
            "synthesizer",
            _synthesizer(first_bias=np.ones((2, 5))),
            ("first_bias: expected [N, L]", "(2, 5)"),
        ),
        (
            "synthesizer",
            _synthesizer(second=KERNEL),
            ("second: expected None", "'dense'", "(2, 4, 16)"),
        ),
        (
            "synthesizer",
            _synthesizer(first=KERNEL[..., :6]),
            ("first: expected room for 7 positions, got 6", "longer"),
        ),
        ("sinkhorn", {}, ("sort_kernel: expected [N, H, L]", "sinkhorn_parameters")),
        ("sinkhorn", {"sort_kernel": KERNEL[0]}, ("sort_kernel: expected [N, H, L]",)),
        (
            "sinkhorn",
            {"sort_kernel": KERNEL[..., :3], "block": 2},
            ("sort_kernel: expected at least 4 columns", "(2, 4, 3)", "longer"),
        ),
        (
            "sinkhorn",
            {"sort_kernel": KERNEL, "sort_bias": np.ones(16)},
            ("sort_bias: expected [N, L]=(2, 16)", "(16,)"),
        ),
        ("sinkhorn", {"block": 0}, ("block: expected a positive int", "got 0")),
        ("sinkhorn", {"iterations": -1}, ("iterations: expected an int of", "-1")),
        ("sinkhorn", {"temperature": 0.0}, ("temperature: expected", "got 0.0")),
        ("sinkhorn", {"is_causal": True}, ("is_causal: expected False", "sorting")),
        ("reformer", {"is_causal": True}, ("is_causal: expected False", "hashes")),
        ("reformer", {"chunk": 0}, ("chunk: expected a positive int", "got 0")),
        ("reformer", {"num_hashes": 0}, ("num_hashes: expected", "got 0")),
        ("reformer", {"num_buckets": 3}, ("num_buckets: expected an even", "got 3")),
        ("reformer", {"max_length": -2}, ("max_length: expected", "got -2")),
        ("reformer", {"seed": -1}, ("seed: expected an int of at least 0", "got -1")),
    ],
)
def test_options_that_do_not_fit(name: str, given: dict, parts: tuple) -> None:
    for call in (
        lambda: getattr(attention, f"{name}_attention")(K, K, V, **given),
        lambda: getattr(attention, f"{name}_weights")(K, K, **given),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        for part in parts:
            assert part in str(caught.value), str(caught.value)


@pytest.mark.parametrize("name", ["sinkhorn", "reformer"])
def test_only_self_attention(name: str) -> None:
    with pytest.raises(ValueError, match="key: expected the query's length T=5"):
        jitted(name)(Q, K, V)
    with pytest.raises(ValueError, match="by their positions"):
        jitted(name)(K, K, V, np.ones((2, 1, 7, 7), bool))
