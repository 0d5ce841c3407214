"""The causal forms and their streams over odd shapes, masks and cuts."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    LENGTH,
    STREAMS,
    assert_close,
    causal,
    causal_formula,
    fast_jit,
    inputs,
    prefill,
)


@st.composite
def _cases(draw) -> dict[str, Any]:
    heads, length = draw(st.sampled_from([1, 3])), draw(st.integers(2, LENGTH))
    shape = {
        "batch": draw(st.integers(1, 3)),
        "query_length": length,
        "length": length,
        "heads": heads,
        "head_dim": draw(st.sampled_from([2, 6])),
        "value_dim": draw(st.sampled_from([1, 3])),
        "key_heads": draw(st.sampled_from([1, heads])),
    }
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    return {
        "shape": shape,
        "mask": rng.random((shape["batch"], length)) < draw(st.sampled_from([0.5, 1])),
        "chunking": Chunking(
            draw(st.sampled_from([1, 2, 5, 64])),
            draw(st.sampled_from([1, 6, 512])),
            draw(st.sampled_from(["loop", "parallel"])),
        ),
        "prompt": draw(st.integers(1, length - 1)),
    }


# Those with gates take one array more for each position.
@pytest.mark.parametrize(
    "name", [x for x in STREAMS if not attention.MECHANISMS[x].gates]
)
@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(case=_cases())
def test_odd_shapes(name: str, case: dict[str, Any]) -> None:
    q, k, v = inputs(1, **case["shape"])
    mask, prompt = case["mask"], case["prompt"]
    start = functools.partial(prefill, name, chunking=case["chunking"])

    @fast_jit
    def both(*arrays):
        whole = causal(name, chunking=case["chunking"])(*arrays, mask)
        # The prompt is real throughout: what follows stands right behind it.
        first, state = start(*(x[:, :prompt] for x in arrays))
        rest = [x[:, prompt:] for x in arrays]
        parts = [first, start(*rest, state=state)[0]]
        alone = causal(name, chunking=Chunking())(*arrays)
        return whole, jnp.concatenate(parts, 1), alone

    whole, streamed, alone = both(q, k, v)
    assert_close(whole, causal_formula(name)(q, k, v, mask))
    assert_close(streamed, alone)
