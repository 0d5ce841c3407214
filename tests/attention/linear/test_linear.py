"""The Linear Transformer: its formula, and feature maps of one's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from .. import dense
from ..mechanisms import Case, assert_close, fast_jit, init, inputs, run, steps


def formula(q, k, v, mask=None, eps=1e-6, causal=False) -> np.ndarray:
    def head(q, k, v, where):
        scores = dense.elu(q) @ dense.elu(k).T * dense.seen(len(q), where, causal)
        return scores @ v / (scores.sum(-1, keepdims=True) + eps)

    return dense.each_head(q, k, v, mask, head)


CASE = Case(formula, mean=True, unordered=("query", "key"))


@pytest.mark.parametrize("name", ["linear", "flow"])
def test_features_of_another_width(name: str) -> None:
    def wide(x):
        return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], -1)

    arrays = inputs(9)
    options = {"feature_map": wide}
    state = init(name, 2, 2, 4, **options)
    assert state.sums.summary.shape == (2, 2, 8, 4)
    out = fast_jit(functools.partial(steps, name, **options))(state, *arrays)[0]
    assert_close(out, fast_jit(run(name, "causal", **options))(*arrays))
