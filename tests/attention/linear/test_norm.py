"""NormAttention: its options; the common properties are tested with all mechanisms."""

import functools

import numpy as np

from lra_jax import attention

from .. import dense
from ..mechanisms import Case, assert_close, fast_jit, inputs


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


def test_relu_features() -> None:
    arrays = inputs(2)
    got = fast_jit(functools.partial(attention.norm_attention, feature_map="relu"))
    relu = functools.partial(np.maximum, 0)
    assert_close(got(*arrays), formula(*arrays, phi=relu))
