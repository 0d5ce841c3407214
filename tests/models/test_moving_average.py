"""The damped moving average: its recurrence in numpy, padding, packed rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, fast_jit
from flax import nnx

from lra_jax.models.moving_average import MovingAverage

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 3)).astype("float32")


def _average(is_causal: bool) -> MovingAverage:
    return MovingAverage(3, 4, is_causal=is_causal, rngs=nnx.Rngs(0))


def _formula(layer: MovingAverage, x: np.ndarray) -> np.ndarray:
    alpha, delta = (
        1 / (1 + np.exp(-np.asarray(p[...], np.float64)))
        for p in (layer.alpha, layer.delta)
    )
    beta, eta, omega = (
        np.asarray(p[...], np.float64) for p in (layer.beta, layer.eta, layer.omega)
    )
    out = x * omega
    for way in range(len(alpha)):
        states = np.zeros((x.shape[0], *alpha.shape[1:]))
        order = range(x.shape[1]) if way == 0 else reversed(range(x.shape[1]))
        for t in order:
            fresh = alpha[way] * beta[way] * x[:, t, None]
            if way == 1:  # From the other end x_t itself does not count again.
                out[:, t] += (eta[way] * states).sum(1)
            states = (1 - alpha[way] * delta[way]) * states + fresh
            if way == 0:
                out[:, t] += (eta[way] * states).sum(1)
    return out / (1 + np.exp(-out))


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_recurrence(is_causal: bool):
    layer = _average(is_causal)
    wanted = _formula(layer, X)
    assert_close(fast_jit(layer)(X), wanted)
    one = jnp.ones(X.shape[:2], jnp.int32)
    assert_close(fast_jit(lambda x: layer(x, segment_ids=one))(X), wanted)


@pytest.mark.parametrize("is_causal", [False, True])
def test_several_blocks_and_their_gradients(is_causal: bool):
    layer = _average(is_causal)
    graph, params = nnx.split(layer)
    x = RNG.normal(size=(2, 70, 3)).astype("float32")
    one = jnp.ones(x.shape[:2], jnp.int32)
    assert_close(fast_jit(layer)(x), _formula(layer, x))

    @fast_jit
    def gradients(ids):
        def loss(params, x):
            return jnp.sin(nnx.merge(graph, params)(x, segment_ids=ids)).sum()

        return jax.tree.leaves(jax.grad(loss, (0, 1))(params, x))

    # With documents it is a scan, position by position.
    for ours, wanted in zip(gradients(None), gradients(one), strict=True):
        assert_close(ours, wanted)


@pytest.mark.parametrize("length", [32, 64])
def test_whole_blocks_hidden_positions_and_saturated_decays(length: int):
    layer = _average(False)
    for parameter in (layer.alpha, layer.delta):
        parameter[...] = parameter[...].at[:, :2].set(100.0)
    x = RNG.normal(size=(2, length, 3)).astype("float32")
    mask = np.arange(length)[None, :] % 5 > 0
    made = fast_jit(layer)(x, np.broadcast_to(mask, x.shape[:2]))
    assert_close(made, _formula(layer, np.where(mask[:, :, None], x, 0)))
    graph, params = nnx.split(layer)
    slopes = jax.grad(lambda p: nnx.merge(graph, p)(x).sum())(params)
    assert all(np.isfinite(slope).all() for slope in jax.tree.leaves(slopes))


@pytest.mark.parametrize("shape", [(0, 40, 3), (2, 0, 3), (2, 1, 3)])
def test_empty_and_single(shape: tuple[int, ...]):
    x = np.ones(shape, "float32")
    assert_close(_average(False)(jnp.asarray(x)), _formula(_average(False), x))


def test_the_past_is_the_same_to_the_last_bit():
    layer = fast_jit(_average(True))
    x = RNG.normal(size=(2, 70, 3)).astype("float32")
    later = np.where(np.arange(70)[None, :, None] < 40, x, 1e6 * x)
    np.testing.assert_array_equal(layer(later)[:, :40], layer(x)[:, :40])


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_documents_and_their_gradients_are_those_alone(is_causal: bool):
    layer = _average(is_causal)
    ids = jnp.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0]] * 2)
    spans = ((0, 4), (4, 7))

    @fast_jit
    def both(x):
        def packed(x):
            return layer(x, ids > 0, ids)[:, :7]

        def alone(x):
            return jnp.concatenate([layer(x[:, a:b]) for a, b in spans], 1)

        made = []
        for f in (packed, alone):
            out, pull = jax.vjp(f, x)
            made.append((out, pull(jnp.sin(out))[0][:, :7]))
        return made

    assert_close(*both(X))


def test_hidden_positions_are_zeros_whatever_they_hold():
    layer = _average(False)
    mask = jnp.broadcast_to(jnp.arange(9)[None] < 6, (2, 9))
    broken = jnp.asarray(X).at[:, 6:].set(jnp.nan)
    assert_close(layer(broken, mask)[:, :6], layer(X[:, :6]))


@pytest.mark.parametrize("packed", [False, True])
def test_float64_inputs_are_computed_in_float64(packed: bool):
    with jax.enable_x64(True):
        layer, x = _average(False), X.astype("float64") + 1e-9
        ids = jnp.ones(x.shape[:2], jnp.int32) if packed else None
        out, pull = jax.vjp(lambda x: layer(x, segment_ids=ids), jnp.asarray(x))
        np.testing.assert_allclose(out, _formula(layer, x), rtol=1e-12, atol=1e-12)
        assert pull(out)[0].dtype == jnp.float64


def test_an_average_may_forget_everything_at_once():
    """Sigmoids that round to 1 leave a decay of 0, not of NaN."""
    layer = _average(False)
    layer.alpha[...] = layer.delta[...] = jnp.full_like(layer.alpha[...], 40.0)
    graph, params = nnx.split(layer)
    out = layer(X)
    assert_close(out, _formula(layer, X))
    slopes = jax.grad(lambda p: nnx.merge(graph, p)(X).sum())(params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slopes))
