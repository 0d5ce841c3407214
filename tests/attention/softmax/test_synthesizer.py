"""Synthesizer: its variants, its parameters, and what it refuses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.softmax.synthesizer import VARIANTS

from .. import dense
from ..mechanisms import (
    LENGTH,
    MASK,
    Case,
    assert_close,
    assert_rejects,
    fast_jit,
    inputs,
    keywords,
    run,
)

SIZES = {"max_length": LENGTH, "num_heads": 2, "head_dim": 4}


def formula(
    q, k, v, mask=None, causal=False, *, variant, first, first_bias=None, **more
) -> np.ndarray:
    """The four variants; ``more`` holds ``second`` and ``second_bias``."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    second, second_bias = more.get("second"), more.get("second_bias")

    def layer(x, kernel, bias, n):
        scores = np.maximum(x, 0) @ np.asarray(kernel, np.float64)[n]
        return scores if bias is None else scores + np.asarray(bias, np.float64)[n]

    for (b, n), queries, _, values, real in dense.samples(q, k, v, mask):
        rows, columns = len(queries), len(values)
        if variant == "dense":
            scores = layer(queries, first, first_bias, n)[:, :columns]
        elif variant == "factorised_dense":
            x = layer(queries, first, first_bias, n)
            y = layer(queries, second, second_bias, n)
            width = y.shape[1]
            scores = np.stack(
                [x[:, j // width] * y[:, j % width] for j in range(columns)], 1
            )
        elif variant == "random":
            scores = np.asarray(first, np.float64)[n, :rows, :columns]
        else:
            scores = np.asarray(first, np.float64)[n, :rows]
            scores = scores @ np.asarray(second, np.float64)[n, :columns].T
        seen = np.broadcast_to(real, scores.shape)
        seen = seen & np.tri(rows, columns, dtype=bool) if causal else seen
        out[b, :, n] = dense.masked_rows(scores, seen, values)
    return out


def arrays(heads: int, head_dim: int) -> dict[str, Any]:
    rng = np.random.default_rng(heads)
    kernel = rng.normal(size=(heads, head_dim, LENGTH)).astype("float32")
    bias = rng.normal(size=(heads, LENGTH)).astype("float32")
    return {"variant": "dense", "first": kernel, "first_bias": bias}


CASE = Case(formula, arrays, mean=True, pair_masks=True, unordered=("query",))


def _rank(variant: str, rank: int) -> dict[str, int]:
    return {"rank": rank} if variant == "factorised_random" else {}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_synthesizer_variants(variant: str, causal: bool) -> None:
    q, k, v = inputs(1, batch=3, key_heads=1, value_dim=3)
    arrays = attention.synthesizer_parameters(
        jax.random.key(0), variant=variant, **_rank(variant, 3), **SIZES
    )
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=x.shape).astype("float32") for n, x in arrays.items()}
    options: dict[str, Any] = {"variant": variant, "is_causal": causal, **arrays}

    @fast_jit
    def both(q, k, v):
        matrix = attention.synthesizer_weights(q, k, MASK, **options)
        out, pullback = jax.vjp(
            lambda *a: attention.synthesizer_attention(*a, MASK, **options), q, k, v
        )
        return matrix, out, pullback(jnp.ones_like(out))

    matrix, out, gradients = both(q, k, v)
    expected = formula(q, k, v, MASK, causal=causal, variant=variant, **arrays)
    assert_close(out, expected)
    assert_close(np.einsum("bnts,bsnv->btnv", matrix, np.repeat(v, 2, 2)), out)
    reads_queries = bool(np.asarray(gradients[0]).any())
    assert reads_queries == ("dense" in variant)
    assert not np.asarray(gradients[1]).any(), "keys are not read"


def test_synthesizer_takes_a_mask_of_pairs() -> None:
    q, k, v = inputs(2)
    options = keywords("synthesizer", 2, 4)
    run = fast_jit(
        lambda *a, **more: attention.synthesizer_attention(*a, **options, **more),
        static_argnames="is_causal",
    )
    pairs = np.tri(7, dtype=bool)[None, None]
    assert_close(run(q, k, v, pairs), run(q, k, v, is_causal=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_synthesizer_parameters(variant: str) -> None:
    sizes = {"max_length": 10, "num_heads": 2, "head_dim": 3, **_rank(variant, 5)}
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


KERNEL = np.ones((2, 4, LENGTH), "float32")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"first": KERNEL[:1]}, ("expected [N, H, L]=(2, 4, L)", "(1, 4, 16)")),
        ({"first": KERNEL[..., :6]}, ("room for 7 positions, got 6", "longer")),
        ({"second": KERNEL}, ("second: expected None", "'dense'")),
    ],
)
def test_options_that_do_not_fit(options: dict, parts: tuple) -> None:
    options = {"first_bias": None} | options
    q, k, v = inputs(10)
    call = functools.partial(run("synthesizer"), **options)
    assert_rejects(lambda: call(q, k, v), *parts)
