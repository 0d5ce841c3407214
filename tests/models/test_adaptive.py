"""Adaptive inputs and softmax against Grave et al.'s formula in numpy."""

import helpers
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.special import log_softmax

from lra_jax import models
from lra_jax.models.adaptive import AdaptiveEmbed


def test_vectors_and_probabilities():
    layer = AdaptiveEmbed(30, 16, cutoffs=(5, 12), rngs=nnx.Rngs(0))
    tables = [np.asarray(t[...]) for t in layer.tables]
    matrices = [np.asarray(m[...]) for m in layer.matrices]
    assert [t.shape for t in tables] == [(5, 16), (7, 4), (18, 1)]
    every = np.concatenate([t @ m for t, m in zip(tables, matrices, strict=True)])
    tokens = jnp.array([[0, 4, 5, 11, 12, 29]], jnp.int32)
    np.testing.assert_allclose(
        layer(tokens)[0], every[np.asarray(tokens)[0]], atol=1e-6
    )
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32)
    clusters = x @ np.asarray(layer.clusters.kernel[...])
    first = log_softmax(np.concatenate([x @ every[:5].T, clusters], 1), 1)
    second = log_softmax(x @ every[5:12].T, 1) + first[:, 5:6]
    third = log_softmax(x @ every[12:].T, 1) + first[:, 6:7]
    expected = np.concatenate([first[:, :5], second, third], 1)
    got = layer.log_probabilities(jnp.asarray(x))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(np.exp(got).sum(1), 1, atol=1e-5)


def test_ids_beyond_the_vocabulary_give_nan():
    """Under jit, where they are not refused, as `nnx.Embed` does."""
    layer = AdaptiveEmbed(6, 4, cutoffs=(3,), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokens = jnp.array([[5, 6, -7]], jnp.int32)

    def loss(layer):
        out = layer(tokens)
        return jnp.where(jnp.isnan(out), 0, out).sum(), out

    (_, out), gradients = nnx.value_and_grad(loss, has_aux=True)(layer)
    assert jnp.isnan(out).all(-1).tolist() == [[False, True, True]]
    actual, expected = gradients["tables"][1], layer.matrices[1][...].sum(1)
    np.testing.assert_allclose(actual[...][:2], 0)
    np.testing.assert_allclose(actual[...][2], expected, rtol=0.02)


def test_a_language_model_with_rare_words():
    sizes = {"num_layers": 1, "embed_dim": 16, "mlp_dim": 8, "max_length": 16}
    model = models.CausalLM(
        30, mechanism="linear", cutoffs=(5, 12), **sizes, rngs=nnx.Rngs(0)
    )
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    logits = helpers.call_model(type(model).__call__, model, tokens)
    np.testing.assert_allclose(np.exp(logits).sum(-1), 1, atol=1e-5)
    small = AdaptiveEmbed(4, 16, cutoffs=(5, 12), rngs=nnx.Rngs(0))
    assert small.bounds == ((0, 4),) and small.clusters is None
