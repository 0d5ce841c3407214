"""The Linear Transformer: its formula, and feature maps of one's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax.attention import linear_attention

from .. import dense
from ..mechanisms import Case, fast_jit, inputs


def formula(q, k, v, mask=None, eps=1e-6, causal=False) -> np.ndarray:
    def head(q, k, v, where):
        scores = dense.elu(q) @ dense.elu(k).T * dense.seen(len(q), where, causal)
        return scores @ v / (scores.sum(-1, keepdims=True) + eps)

    return dense.each_head(q, k, v, mask, head)


CASE = Case(formula, mean=True, unordered=("query", "key"))


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_function_of_padding_has_no_gradient(is_causal: bool) -> None:
    """A user's feature map sees zeros there: exp of what it holds may be infinite."""
    query, key, value = inputs(2, query_length=6, length=6)
    mask = np.arange(6) < 4
    key[:, 4:] = 1e4

    def total(key: jax.Array) -> jax.Array:
        options = {"feature_map": jnp.exp, "is_causal": is_causal}
        out = linear_attention(query, key, value, mask[None], **options)
        return jnp.sin(out[:, :4]).sum()

    slope = np.asarray(fast_jit(jax.grad(total))(key))
    assert np.isfinite(slope).all() and not slope[:, 4:].any()
