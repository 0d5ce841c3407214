"""Arrays of a wrong shape, refused at the call of a module."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import (
    EncoderBlock,
    MatchingClassifier,
    MultiHeadAttention,
    SequenceClassifier,
    TokenClassifier,
    TransformerEncoder,
)
from lra_jax.models.mlp import Mlp
from lra_jax.models.norms import BatchNorm, InstanceNorm

SIZES: dict[str, Any] = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 6}
X = jnp.ones((2, 6, 8))
TOKENS = jnp.ones((2, 6), jnp.int32)
MASK = jnp.ones((2, 6), bool)
LENGTHS = jnp.array([6, 4])
ROWS = jnp.array([[1, 1, 2, 2, 2, 0]] * 2)


def layer(mechanism: Any = "softmax") -> MultiHeadAttention:
    return MultiHeadAttention(2, 8, mechanism=mechanism, rngs=nnx.Rngs(0))


def block() -> EncoderBlock:
    return EncoderBlock(layer(), Mlp(8, 8, rngs=nnx.Rngs(0)), 8)


def encoder() -> TransformerEncoder:
    return TransformerEncoder(5, **SIZES, rngs=nnx.Rngs(0))


def classifier() -> SequenceClassifier:
    return SequenceClassifier(5, 3, **SIZES, rngs=nnx.Rngs(0))


def reader(**settings: Any) -> SequenceClassifier:
    settings |= {"reconstructs": True}
    return SequenceClassifier(5, 3, **SIZES, **settings, rngs=nnx.Rngs(0))


def zeros() -> SequenceClassifier:
    return reader(padding="zeros")


def tagger() -> TokenClassifier:
    return TokenClassifier(5, 3, **SIZES, rngs=nnx.Rngs(0))


def matcher() -> MatchingClassifier:
    return MatchingClassifier(5, 3, **SIZES, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: layer()(X[0]), r"inputs: .*\[B, T, D\]=\(B, T, 8\), got \(6, 8\)"),
        (lambda: layer()(X[..., :4]), "inputs"),
        (lambda: layer()(X, X[:1]), "context"),
        (lambda: layer()(X, mask=MASK[:, :5]), "mask"),
        (lambda: layer()(X, mask=MASK[None]), "mask"),
        (lambda: layer()(X, mask=MASK[:, None, :, None]), "mask"),
        (lambda: layer()(X, mask=[[[[True] * 6]]] * 2), "mask: .* got a list"),
        (lambda: layer()(X, X[:, :4], query_mask=MASK[:, :4]), "query_mask"),
        (lambda: layer("luna").attend(X, memory=X[..., :3]), "memory"),
        (lambda: block()(X[..., :4], None), "x"),
        (lambda: block()(X, MASK[:, :2]), "mask"),
        (lambda: encoder()(TOKENS[0]), "tokens"),
        (lambda: encoder()(TOKENS, MASK[:, :5]), "mask"),
        (lambda: classifier()(TOKENS, LENGTHS[:1]), "lengths"),
        (lambda: reader().reconstruct(TOKENS, LENGTHS[:1], MASK), "lengths"),
        (lambda: classifier()(TOKENS, LENGTHS / 2), "lengths: .* got float32"),
        (lambda: tagger()(TOKENS, LENGTHS / 2), "lengths: .* got float32"),
        (lambda: zeros().reconstruct(TOKENS, None, MASK, segment_ids=ROWS), "segm"),
        (lambda: classifier()(TOKENS, documents=2), "documents"),
        (lambda: classifier()(TOKENS, segment_ids=ROWS, documents=1), "documents"),
        (lambda: classifier()([[1, 2]]), "tokens: .* got a list"),
        (lambda: classifier()(TOKENS, [6, 4]), "lengths: .* got a list"),
        (lambda: classifier()(TOKENS, LENGTHS + 1), "lengths: .* from 5 to 7"),
        (lambda: classifier()(X), "tokens"),
        (lambda: layer()(X, mask=jnp.full((2, 6), 2.0), segment_ids=ROWS), "mask"),
        (lambda: matcher()(TOKENS, LENGTHS - 5, TOKENS, LENGTHS), "lengths_1"),
        (lambda: matcher()(TOKENS, LENGTHS, TOKENS, LENGTHS[:, None]), "lengths_2"),
        (lambda: matcher()(TOKENS[0], None, TOKENS, None), "tokens_1"),
        (lambda: InstanceNorm(4)(X), "inputs"),
        (lambda: InstanceNorm(8)(X, MASK[:, :5]), "mask"),
        (lambda: BatchNorm(4)(X), "inputs"),
        (lambda: BatchNorm(8)(X, MASK[:, :5]), "mask"),
        (lambda: BatchNorm(8)(X, segment_ids=ROWS[:, :5], training=True), "segm"),
    ],
)
def test_arrays_that_do_not_fit(call, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        call()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_masks_of_numbers(dtype: Any) -> None:
    """As Flax makes them; also where they meet the documents of packed rows."""
    mask = MASK.at[1, 4].set(False)
    integers = mask.astype(dtype)
    wide = integers[:, None, None]
    np.testing.assert_array_equal(layer()(X, mask=wide), layer()(X, mask=mask))
    for call in (
        lambda mask: layer()(X, mask=mask, segment_ids=ROWS),
        lambda mask: layer()(X, mask=mask, query_mask=mask, segment_ids=ROWS),
        lambda mask: encoder()(TOKENS, mask, segment_ids=ROWS),
        lambda mask: InstanceNorm(8)(X, mask, ROWS),
    ):
        np.testing.assert_array_equal(call(integers), call(mask))


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (lambda out: out[:, :1], r"\(2, 1, 2, 4\)"),  # Would be broadcast.
        (lambda out: out.reshape(2, 6, 8), r"\(2, 6, 8\)"),
        (lambda out: out[..., :2], r"\(2, 6, 2, 2\)"),
        (lambda out: (out, out), "a tuple"),
    ],
)
def test_a_function_from_outside_that_returns_another_shape(wrong, got):
    def ours(query, key, value):
        return wrong(value)

    name = "test_a_function_from_outside_that_returns_another_shape.<locals>.ours"
    message = rf"output of attention '{name}': .*=\(2, 6, 2, 4\), got {got}"
    with pytest.raises(ValueError, match=message):
        layer(ours)(X)
    with pytest.raises(ValueError, match=message):
        SequenceClassifier(5, 3, **SIZES, mechanism=ours, rngs=nnx.Rngs(0))(TOKENS)
