"""Retention: its formula, its rotation and its recurrent form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lra_jax import attention
from lra_jax.attention.linear import rotary

from .. import dense
from ..mechanisms import Case, assert_close, fast_jit, inputs


def formula(
    q, k, v, mask=None, causal=False, slopes=None, rotate=True, norm="layer", eps=1e-6
) -> np.ndarray:
    """The parallel form of the paper, with complex numbers for the rotation."""
    gammas = 1 - 2.0 ** (-5 - np.arange(q.shape[2]))
    slopes = -np.log(gammas) if slopes is None else slopes
    theta = 1 / 10000 ** np.linspace(0, 1, q.shape[3] // 2)

    def turned(x, places):
        if not rotate:
            return x
        numbers = x[:, 0::2] + 1j * x[:, 1::2]
        return numbers * np.exp(1j * places[:, None] * theta)

    def head(slope, q, k, v, where):
        rows = np.arange(len(q))
        scores = (turned(q, rows) @ turned(k, where).conj().T).real
        scores = scores / np.sqrt(q.shape[1])
        span = np.arange(where[0], where[-1] + 1)
        total = dense.fading(slope, len(q), span, causal)
        if causal:  # a query behind the last real position looks back from its own
            total = dense.fading(slope, len(q), np.arange(where[0], len(q)), causal)
        total = np.where(total.any(1), total.sum(1), 1)
        scores *= dense.fading(slope, len(q), where, causal) / np.sqrt(total)[:, None]
        bound = np.maximum(np.abs(scores.sum(-1, keepdims=True)), 1)
        return scores / bound @ v

    return dense.normed(dense.each_slope(q, k, v, mask, slopes, head), norm, 3, eps)


CASE = Case(
    formula,
    signed=True,
    normalised=True,
    paired=True,
    level={"norm": "rms", "rotate": False},
)


def test_rotations_are_exact_far_from_the_start() -> None:
    cos, sin = rotary.tables(1000, 6, jnp.float32)
    angles = np.arange(1001)[:, None] / 10000 ** np.linspace(0, 1, 3)
    assert np.abs(cos - np.cos(angles)).max() < 2e-7
    assert np.abs(sin - np.sin(angles)).max() < 2e-7
    assert cos.shape == sin.shape == (1001, 3)


def test_a_long_stream_keeps_its_angles() -> None:
    """A key's angle is turned once a step; after many they still agree."""
    q, k, v = inputs(7, batch=1, query_length=1, length=1, heads=1)
    state = attention.retention_prefill(q, k, v, slopes=[0.0])[1]
    nothing = jnp.zeros((1, 1, 4))
    step = functools.partial(attention.retention_step, slopes=[0.0], norm=None)

    @fast_jit
    def later(state):
        def turn(state, _):
            return step(state, nothing, nothing, nothing)[1], None

        state, _ = jax.lax.scan(turn, state, length=999)
        return step(state, q[:, 0], nothing, nothing)[0]

    one, two = ((x[0, 0, 0, 0::2] + 1j * x[0, 0, 0, 1::2]) for x in (q, k))
    turns = np.exp(1000j / np.array([1, 10000]))
    score = (one * turns * two.conj()).real.sum() / 2 / np.sqrt(1001)
    assert_close(later(state)[0, 0], score * v[0, 0, 0], 1e-4)


def test_retention_turns_pairs_of_columns() -> None:
    q, k, v = inputs(10, head_dim=5)
    for call in (
        lambda: attention.retention_attention(q, k, v),
        lambda: attention.retention_weights(q, k),
        lambda: attention.retention_prefill(q, k, v),
    ):
        with pytest.raises(ValueError, match=r"rotate: expected False.*H=5"):
            call()
