"""Normalisation over positions and over batches, alone and in a model."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close
from flax import nnx

from lra_jax.models import SequenceClassifier
from lra_jax.models.norms import BatchNorm, InstanceNorm, PositionNorm, RunningMean

RNG = np.random.default_rng(0)
SCALE, BIAS = np.array([1.0, 2.0, 3.0]), np.array([0.0, 1.0, -1.0])


Norm = TypeVar("Norm", bound=PositionNorm)


def _layer(kind: type[Norm]) -> Norm:
    layer = kind(3)
    layer.scale[...] = jnp.asarray(SCALE, jnp.float32)
    layer.bias[...] = jnp.asarray(BIAS, jnp.float32)
    return layer


def _reference(rows: np.ndarray, mean: np.ndarray, var: np.ndarray) -> np.ndarray:
    return (rows - mean) / np.sqrt(var + 1e-5) * SCALE + BIAS


def _of_itself(x: np.ndarray) -> np.ndarray:
    """With the mean and the variance of its own rows."""
    rows = x.reshape(-1, 3)
    return _reference(x, rows.mean(0), rows.var(0))


def _running(layer: BatchNorm) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(layer.mean[...]), np.asarray(layer.var[...])


def running(model: nnx.Module) -> list[np.ndarray]:
    """All running means and variances of a model."""
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, RunningMean))]


def _model(norm: str, **settings) -> SequenceClassifier:
    return SequenceClassifier(
        16,
        num_classes=2,
        mechanism="linear",
        embed_dim=8,
        mlp_dim=8,
        num_layers=1,
        max_length=16,
        norm=norm,
        rngs=nnx.Rngs(0),
        **settings,
    )


def test_training_takes_the_statistics_of_the_batch_and_keeps_running_ones():
    layer = _layer(BatchNorm)
    x = RNG.normal(3, 2, (2, 7, 3)).astype("float32")
    rows = x.reshape(-1, 3)
    assert_close(layer(x, training=True), _of_itself(x))
    mean, var = _running(layer)
    assert_close(mean, 0.1 * rows.mean(0))
    assert_close(var, 0.9 + 0.1 * rows.var(0, ddof=1))
    assert_close(layer(x), _reference(x, mean, var))
    assert_close(_running(layer)[0], mean)


def test_padding_of_a_batch_does_not_count_even_if_it_is_nan():
    x = RNG.normal(size=(2, 7, 3)).astype("float32")
    mask = np.arange(7) < np.array([[5], [7]])
    real = x[mask]
    x[~mask] = np.nan
    graph, state = nnx.split(_layer(BatchNorm))

    def total(x):
        layer = nnx.merge(graph, state, copy=True)
        out = layer(x, jnp.asarray(mask), training=True)
        loss = jnp.where(mask[:, :, None], jnp.sin(out), 0).sum()
        return loss, (out, layer.mean[...])

    grad, (out, mean) = jax.grad(total, has_aux=True)(x)
    assert_close(np.asarray(out)[mask], _of_itself(real))
    assert_close(mean, 0.1 * real.mean(0))
    assert np.isfinite(grad).all() and (np.asarray(grad)[~mask] == 0).all()


def test_the_padding_of_packed_rows_does_not_count():
    x = RNG.normal(size=(1, 6, 3)).astype("float32")
    ids = jnp.array([[1, 1, 2, 2, 2, 0]])
    out = _layer(BatchNorm)(x, segment_ids=ids, training=True)
    assert_close(out[:, :5], _layer(BatchNorm)(x[:, :5], training=True))


def test_gradients_are_those_of_finite_differences():
    graph, state = nnx.split(_layer(BatchNorm))

    def loss(x):
        return jnp.sin(nnx.merge(graph, state, copy=True)(x, training=True)).sum()

    with jax.enable_x64(True):
        x, way = RNG.normal(size=(2, 2, 4, 3))
        ahead, behind = (loss(x + step * way) for step in (1e-5, -1e-5))
        expected = (ahead - behind) / 2e-5
        np.testing.assert_allclose((jax.grad(loss)(x) * way).sum(), expected, rtol=1e-7)


@pytest.mark.parametrize("real", [0, 1])
def test_a_batch_without_a_variance_leaves_the_running_ones(real):
    layer = _layer(BatchNorm)
    ones = jnp.ones((1, 4, 3), jnp.bfloat16)
    out = layer(ones, jnp.arange(4)[None] < real, training=True)
    assert np.isfinite(out).all()
    mean, var = _running(layer)
    assert not mean.any() and (var == 1).all() and var.dtype == np.float32


def test_padding_of_a_sequence_does_not_count_even_if_it_is_nan():
    x = RNG.normal(size=(2, 7, 3)).astype("float32")
    mask = np.arange(7) < np.array([[5], [7]])
    x[~mask] = np.nan
    out, pull = jax.vjp(lambda x: _layer(InstanceNorm)(x, jnp.asarray(mask)), x)
    assert_close(out[0, :5], _of_itself(x[0, :5]))
    assert_close(out[1], _of_itself(x[1]))
    (grad,) = pull(jnp.where(mask[:, :, None], jnp.ones_like(out), 0))
    assert np.isfinite(grad).all() and (np.asarray(grad)[~mask] == 0).all()


def test_packed_documents_are_normalised_one_by_one():
    x = RNG.normal(size=(1, 9, 3)).astype("float32")
    weights = RNG.normal(size=x.shape).astype("float32")
    ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 1, 0]])
    layer = _layer(InstanceNorm)
    out, pull = jax.vjp(lambda x: layer(x, segment_ids=ids), x)
    (grad,) = pull(jnp.where(ids[:, :, None] > 0, weights, 0))
    for columns in (slice(0, 3), slice(3, 7), slice(7, 8)):
        alone, pull = jax.vjp(layer, x[:, columns])
        assert_close(out[:, columns], alone)
        assert_close(grad[:, columns], pull(weights[:, columns])[0])
    assert not jnp.isnan(layer(jnp.zeros((1, 4, 3)))).any()


@pytest.mark.parametrize("kind", [BatchNorm, InstanceNorm])
def test_statistics_are_wide_and_the_output_is_not(kind):
    x = (300 + RNG.normal(size=(1, 512, 3))).astype("float32")
    narrow = jnp.asarray(x, jnp.bfloat16)
    out = kind(3)(narrow, training=True)
    assert out.dtype == jnp.bfloat16
    expected = kind(3)(narrow.astype(jnp.float32), training=True)
    assert_close(out.astype(jnp.float32), expected, tolerance=1e-2)


@pytest.mark.parametrize(
    ("norm", "kind"), [("batch", BatchNorm), ("instance", InstanceNorm)]
)
def test_all_norms_of_the_encoder_are_of_one_kind(norm, kind):
    encoder = _model(norm, pooling="ends").encoder
    block = encoder.blocks[0]
    for one in (block.attention_norm, block.mlp_norm, encoder.norm):
        assert isinstance(one, kind)


def test_running_statistics_follow_training_alone():
    model = _model("batch")
    tokens = jnp.asarray(RNG.integers(1, 16, (2, 12)))
    before = running(model)
    alone = model(tokens[:1, :5])
    assert_close(model(tokens, jnp.array([5, 12]))[:1], alone)
    for old, new in zip(before, running(model), strict=True):
        np.testing.assert_array_equal(old, new)
    model(tokens, rngs=nnx.Rngs(dropout=0))
    for old, new in zip(before, running(model), strict=True):
        assert (old != new).all()
