"""NormAttention: its options; the common properties are tested with all mechanisms."""

import functools

import numpy as np
import pytest

from lra_jax import attention

from .. import dense
from ..mechanisms import SMALL, Case, assert_close, fast_jit, inputs


def formula(
    q,
    k,
    v,
    mask=None,
    causal=False,
    norm="rms",
    per_head=False,
    eps=1e-6,
    phi=dense.elu,
) -> np.ndarray:
    def head(q, k, v, where):
        return (phi(q) @ phi(k).T * dense.seen(len(q), where, causal)) @ v

    out = dense.each_head(q, k, v, mask, head)
    return dense.normed(out, norm, 3 if per_head else (2, 3), eps)


CASE = Case(formula, normalised=True, unordered=("query", "key"), level={"norm": "rms"})

MASK = np.array([[1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 1, 1]], bool)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_norms(norm: str, per_head: bool, is_causal: bool) -> None:
    arrays = inputs(1, value_dim=5)
    keywords = {"norm": norm, "per_head": per_head, "eps": 1e-2}
    call = functools.partial(attention.norm_attention, is_causal=is_causal, **keywords)
    got = fast_jit(functools.partial(call, chunking=SMALL))(*arrays, MASK)
    expected = formula(*arrays, MASK, causal=is_causal, **keywords)
    assert_close(got, expected)


def test_relu_features() -> None:
    arrays = inputs(2)
    got = fast_jit(functools.partial(attention.norm_attention, feature_map="relu"))
    relu = functools.partial(np.maximum, 0)
    assert_close(got(*arrays), formula(*arrays, phi=relu))


def test_options_reach_the_stream() -> None:
    q, k, v = inputs(4)
    keywords = {"norm": "layer", "per_head": True, "eps": 0.1, "feature_map": "relu"}

    @fast_jit
    def both(q, k, v):
        first = [x[:, :6] for x in (q, k, v)]
        _, state = attention.norm_prefill(*first, chunking=SMALL, **keywords)
        last, _ = attention.norm_step(state, q[:, 6], k[:, 6], v[:, 6], **keywords)
        whole = attention.norm_attention(q, k, v, is_causal=True, **keywords)
        return last, whole[:, 6]

    assert_close(*both(q, k, v))
