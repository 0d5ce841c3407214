"""Normalisation over positions, alone and in a model."""

import jax
import jax.numpy as jnp
import numpy as np
from attention.mechanisms import assert_close
from flax import nnx

from lra_jax.models import SequenceClassifier
from lra_jax.models.norms import InstanceNorm

RNG = np.random.default_rng(0)


def _layer() -> InstanceNorm:
    layer = InstanceNorm(3, epsilon=1e-5)
    layer.scale[...] = jnp.array([1.0, 2.0, 3.0])
    layer.bias[...] = jnp.array([0.0, 1.0, -1.0])
    return layer


def _reference(x: np.ndarray) -> np.ndarray:
    """Of one sequence `[T, 3]`."""
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    return normal * [1, 2, 3] + [0, 1, -1]


def _model(**settings) -> SequenceClassifier:
    return SequenceClassifier(
        16,
        num_classes=2,
        mechanism="linear",
        embed_dim=8,
        mlp_dim=8,
        max_length=16,
        norm="instance",
        rngs=nnx.Rngs(0),
        **settings,
    )


def test_padding_does_not_count_even_if_it_is_nan():
    x = RNG.normal(size=(2, 7, 3)).astype("float32")
    mask = np.arange(7) < np.array([[5], [7]])
    x[~mask] = np.nan
    out, pull = jax.vjp(lambda x: _layer()(x, jnp.asarray(mask)), x)
    assert_close(out[0, :5], _reference(x[0, :5]))
    assert_close(out[1], _reference(x[1]))
    (grad,) = pull(jnp.where(mask[:, :, None], jnp.ones_like(out), 0))
    assert np.isfinite(grad).all() and (np.asarray(grad)[~mask] == 0).all()


def test_a_packed_row_equals_its_documents():
    x = RNG.normal(size=(1, 9, 3)).astype("float32")
    weights = RNG.normal(size=x.shape).astype("float32")
    ids = jnp.array([[1, 1, 1, 2, 2, 2, 2, 1, 0]])
    layer = _layer()
    out, pull = jax.vjp(lambda x: layer(x, segment_ids=ids), x)
    (grad,) = pull(jnp.where(ids[:, :, None] > 0, weights, 0))
    for columns in (slice(0, 3), slice(3, 7), slice(7, 8)):
        alone, pull = jax.vjp(layer, x[:, columns])
        assert_close(out[:, columns], alone)
        assert_close(grad[:, columns], pull(weights[:, columns])[0])


def test_statistics_are_wide_and_the_output_is_not():
    layer = InstanceNorm(3)
    x = (300 + RNG.normal(size=(1, 512, 3))).astype("float32")
    narrow = jnp.asarray(x, jnp.bfloat16)
    out = layer(narrow)
    assert out.dtype == jnp.bfloat16
    expected = layer(narrow.astype(jnp.float32))
    assert_close(out.astype(jnp.float32), expected, tolerance=1e-2)
    assert not jnp.isnan(layer(jnp.zeros((1, 4, 3)))).any()


def test_all_norms_of_the_encoder_are_of_this_kind():
    encoder = _model(num_layers=1, pooling="ends").encoder
    block = encoder.blocks[0]
    for norm in (block.attention_norm, block.mlp_norm, encoder.norm):
        assert isinstance(norm, InstanceNorm)
