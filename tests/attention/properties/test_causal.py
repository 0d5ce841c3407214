"""The causal forms: their cuts, and the future."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.causal.engine import Chunking

from ..mechanisms import (
    CAUSAL,
    FAMILY_STREAMS,
    ROWS,
    SMALL,
    STREAMS,
    assert_close,
    case,
    cuts,
    fast_jit,
    gradients,
    inputs,
    row_inputs,
    run,
)


@pytest.mark.parametrize("name", [x for x in FAMILY_STREAMS if cuts(x, SMALL)])
def test_the_cut_changes_nothing(name: str) -> None:
    """Output and gradients; other tests have them by `SMALL`."""
    arrays, upstream = row_inputs(2)
    other = gradients(name, "causal", chunking=Chunking(3, 6, "parallel"))
    expected = gradients(name, "causal")(*arrays, ROWS, upstream)
    assert_close(other(*arrays, ROWS, upstream), expected)


@pytest.mark.parametrize("name", [name for name in STREAMS if name != "softmax"])
def test_a_nan_in_a_value_reaches_no_earlier_chunk(name: str) -> None:
    q, k, v = inputs(4, 1, 200, 200, 1)
    v[:, 150] = np.nan
    more = {"max_length": 200} if name == "cosformer" else {}
    out = np.asarray(fast_jit(run(name, "causal", chunking=None, **more))(q, k, v))
    assert np.isfinite(out[:, :128]).all() and np.isnan(out[:, 150:]).all()


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_has_no_influence_and_no_gradient(name: str) -> None:
    arrays, upstream = row_inputs(5)
    early, call = np.s_[:, :9], gradients(name, "causal")
    upstream[:, 9:] = 0
    later = [x.copy() for x in arrays]
    for x in later:
        x[:, 9:] = 1e4
    every = np.ones_like(ROWS)
    out, slopes = call(*arrays, every, upstream)
    changed, _ = call(*later, every, upstream)
    np.testing.assert_array_equal(changed[early], out[early])
    read = {"value", *attention.MECHANISMS[name].projections}
    # The gates are made of the key here.
    read |= {"key"} if case(name).gates(arrays[1], np) else set()
    named = zip(("query", "key", "value"), slopes, strict=True)
    for argument, gradient in named:
        assert not np.asarray(gradient)[:, 9:].any()
        assert np.asarray(gradient)[early].any() == (argument in read)


@pytest.mark.parametrize("name", ["linear", "cosformer", "flow"])
def test_nothing_is_made_of_the_whole_sequence(name: str) -> None:
    x = jnp.zeros((1, 64, 1, 8))
    call = run(name, "causal", chunking=Chunking(4, 16))
    more = {"max_length": 64} if name == "cosformer" else {}
    text = str(jax.make_jaxpr(jax.grad(lambda x: call(x, x, x, **more).sum()))(x))
    assert "f32[1,1,16,8]" in text, "features, heads first, inside the loop"
    for whole in ("f32[1,1,64,8]", "f32[1,64,1,16]", "f32[1,1,64,16]"):
        assert whole not in text
