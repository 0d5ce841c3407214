"""Inputs, positions, padding and pairs: what goes into a classifier, and what does not.

Small models, compiled without optimisation; see ``helpers.call_model``.
"""

import math
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import (
    MatchingClassifier,
    ModelConfig,
    MultiHeadAttention,
    SequenceClassifier,
)
from lra_jax.models.inputs import embed_inputs, make_positions
from lra_jax.models.layers import rotate

SETTINGS = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 12, "max_length": 12}


def classifier(mechanism="softmax", **changes) -> SequenceClassifier:
    settings = SETTINGS | {"rngs": nnx.Rngs(0)} | changes
    model = SequenceClassifier(256, 4, mechanism=mechanism, **settings)
    if model.encoder.cls is not None:  # Zero at first: let it say something.
        model.encoder.cls[...] = jnp.linspace(-1, 1, 8)
    return model


def matcher(**changes) -> MatchingClassifier:
    settings = SETTINGS | {"rngs": nnx.Rngs(0), "mechanism": "softmax"} | changes
    return MatchingClassifier(256, 2, **settings)


def call(model, *args):
    return model(*args)


def out(model, *args) -> np.ndarray:
    return np.asarray(helpers.call_model(call, model, *args))


def pixels(*, black: bool = False) -> np.ndarray:
    drawn = np.random.default_rng(0).integers(1, 256, (2, 12)).astype(np.uint8)
    return (
        np.where(np.arange(12) % 3 == 1, 0, drawn).astype(np.uint8) if black else drawn
    )


def test_the_linear_input_is_a_projection_of_the_value():
    model = classifier(inputs="linear", positions="none")
    layer: Any = model.encoder.embed
    assert layer.kernel.shape == (1, 8) and layer.bias.shape == (8,)
    layer.bias[...] = jnp.linspace(0, 1, 8)

    def vectors(model, tokens):
        return embed_inputs(model.encoder.embed, tokens)

    got = helpers.call_model(vectors, model, pixels())
    kernel, bias = np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])
    expected = pixels()[:, :, None] / 255 * kernel[0] + bias
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_embeddings_are_scaled_before_positions_are_added():
    """By the root of their width, as in fairseq."""
    scaled = classifier(positions="sinusoidal", scale_embeddings=True)
    plain = classifier(positions="sinusoidal")
    embed: Any = plain.encoder.embed
    table = embed.embedding
    table[...] = table[...] * math.sqrt(table[...].shape[1])
    np.testing.assert_allclose(out(scaled, pixels()), out(plain, pixels()), atol=1e-5)


def test_positions_of_a_grid_are_a_row_and_a_column():
    config = ModelConfig(
        positions="learned_2d", embed_dim=8, grid=(3, 4), pooling="cls"
    )
    positions: Any = make_positions(config, nnx.Rngs(0))
    rows, columns = (np.asarray(x[...]) for x in (positions.rows, positions.columns))
    assert rows.shape == (3, 8) and columns.shape == (4, 8)
    got = np.asarray(positions(13))
    assert not got[0].any()
    for place in range(12):
        expected = rows[place // 4] + columns[place % 4]
        np.testing.assert_array_equal(got[1 + place], expected)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_grid_knows_both_directions(pooling):
    model = classifier(positions="learned_2d", grid=(3, 4), pooling=pooling)
    encoder: Any = model.encoder
    for name in ("rows", "columns"):
        getattr(encoder.positions, name)[...] *= 50
    image = pixels().reshape(2, 3, 4)
    plain = out(model, pixels())
    for turned in (image[:, ::-1], image[:, :, ::-1]):
        assert np.abs(out(model, turned.reshape(2, 12)) - plain).max() > 1e-3
    with pytest.raises(ValueError, match="expected T=12, an image of 3 x 4, got T=11"):
        jax.eval_shape(model, pixels()[:, :11])


def rotary_layer(mechanism: str, **options) -> MultiHeadAttention:
    return MultiHeadAttention(
        2, 8, mechanism=mechanism, rotary=True, max_length=16, rngs=nnx.Rngs(0)
    )


def test_rotations_are_as_wide_as_their_input():
    """Rounded to float32, they would lose what float64 is asked for."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(1, 300, 1, 2))
        got = rotate(jnp.asarray(x))
        angles = np.arange(300)[None, :, None]
        pairs = (x[..., 0] + 1j * x[..., 1]) * np.exp(1j * angles)
        expected_turned = np.stack([pairs.real, pairs.imag], -1)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, expected_turned, atol=1e-12)


def test_rotary_positions_are_those_of_one_sequence():
    """Of a context that does not begin where the inputs do, they would be others."""
    layer, x = rotary_layer("softmax"), jnp.ones((2, 3, 8))
    with pytest.raises(ValueError, match=r"^context: expected None with .* rotary"):
        layer(x, jnp.ones((2, 5, 8)))


def test_rotary_scores_depend_on_differences_of_positions():
    """A pattern that moves gives outputs that move with it, to the last row."""
    layer = rotary_layer("softmax")
    x = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)
    moved = np.concatenate([np.zeros((1, 3, 8), np.float32), x], 1)
    mask = np.arange(8)[None] >= 3

    def attend(layer, inputs, mask):
        return layer(inputs, mask=mask)

    alone = helpers.call_model(attend, layer, x, np.ones((1, 5), bool))
    later = helpers.call_model(attend, layer, moved, mask)
    np.testing.assert_allclose(later[:, 3:], alone, atol=1e-5)
    # And on nothing less: without rotation the order of the keys says nothing.
    swapped = x[:, [0, 2, 1, 3, 4]]
    other = helpers.call_model(attend, layer, swapped, np.ones((1, 5), bool))
    assert np.abs(np.asarray(other)[:, 0] - np.asarray(alone)[:, 0]).max() > 1e-3


def test_no_positions_at_all():
    model = classifier("linear", positions="none")
    reversed_ = np.ascontiguousarray(pixels()[:, ::-1])
    np.testing.assert_allclose(out(model, pixels()), out(model, reversed_), atol=1e-5)


def test_a_black_pixel_counts_unless_zeros_are_padding():
    lengths = np.array([12, 12], np.int32)
    image = pixels(black=True)
    exact, official = classifier(), classifier(padding="zeros")
    for model in (exact, official):  # Let the vector of black say a lot.
        layer: Any = model.encoder.embed
        layer.embedding[...] *= 20
    shown = out(exact, image, lengths)
    hidden = out(official, image, lengths)
    assert np.abs(shown - hidden).max() > 1e-4
    # No black pixel: no difference.
    np.testing.assert_array_equal(
        out(exact, pixels(), lengths), out(official, pixels(), lengths)
    )


@pytest.mark.parametrize("pooling", ["ends", "attention"])
def test_only_the_mean_counts_zeros(pooling: str):
    """Rows appended to a sequence, all zeros, change no other pooling."""
    model = classifier(padding="zeros", positions="none", pooling=pooling)
    tokens = np.array([[3, 0, 5, 7]])
    longer = np.pad(tokens, [(0, 0), (0, 3)])
    np.testing.assert_allclose(out(model, tokens), out(model, longer), atol=1e-5)


@pytest.mark.parametrize("pooling", ["ends", "attention+ends"])
def test_the_ends_are_real_tokens(pooling: str):
    """A black pixel in the corner is padding, and not the first token."""
    model = classifier(padding="zeros", positions="none", pooling=pooling)

    def parts(model, tokens):
        rows = model.encoder(tokens, tokens > 0)
        return model.pool(tokens)[:, -16:], rows[:, 1], rows[:, 3]

    tokens = np.array([[0, 3, 5, 7, 0], [0, 9, 1, 4, 0]])
    ends, first, last = helpers.call_model(parts, model, tokens)
    np.testing.assert_allclose(ends, np.concatenate([first, last], 1), atol=1e-6)


def test_zeros_hide_keys_and_not_the_mean():
    """LRA's rule: attention skips black pixels, the mean is over all positions."""
    model = classifier(padding="zeros", positions="none")
    image = pixels(black=True)

    def encoded(model, tokens):
        return model.encoder(tokens, tokens > 0)

    def head(model, pooled):
        return model.logits(jax.nn.relu(model.hidden(pooled)))

    rows = helpers.call_model(encoded, model, image)
    expected = helpers.call_model(head, model, np.asarray(rows).mean(1))
    np.testing.assert_allclose(out(model, image), expected, atol=1e-5)


def test_pooling_the_first_row():
    model = classifier(pooling="first")
    assert model.encoder.cls is None

    def first(model, tokens):
        pooled = model.encoder(tokens, None)[:, 0]
        return model.logits(jax.nn.relu(model.hidden(pooled)))

    expected = helpers.call_model(first, model, pixels())
    np.testing.assert_allclose(out(model, pixels()), expected, atol=1e-6)


@pytest.mark.parametrize("interaction", ["concat", "nli"])
def test_a_pair_is_its_two_documents_by_one_encoder(interaction):
    model = matcher(interaction=interaction)
    one, two = pixels(), pixels()[::-1, ::-1].copy()
    lengths_1, lengths_2 = np.array([12, 5], np.int32), np.array([3, 12], np.int32)
    got = out(model, one, lengths_1, two, lengths_2)
    assert got.shape == (2, 2) and got.dtype == np.float32

    def vector(model, tokens, lengths):
        return model.pool(tokens, lengths)

    a, b = (
        np.asarray(helpers.call_model(vector, model, *x))
        for x in ((one, lengths_1), (two, lengths_2))
    )
    parts = [a, b, a * b, a - b] if interaction == "nli" else [a, b]
    assert model.hidden.in_features == 8 * len(parts)

    def head(model, features):
        hidden = jax.nn.relu(model.hidden(features))
        return model.logits(jax.nn.relu(model.hidden_2(hidden)))

    expected = helpers.call_model(head, model, np.concatenate(parts, 1))
    np.testing.assert_allclose(got, expected, atol=1e-5)
    # Padding is exact in each document of its own length.
    alone = out(model, one[1:, :5], None, two[1:, :5], None)
    cut = out(model, one, np.array([12, 5], np.int32), two, np.array([3, 5], np.int32))
    np.testing.assert_allclose(alone[0], cut[1], atol=2e-5)
    # The order of the two documents counts.
    assert np.abs(out(model, two, lengths_2, one, lengths_1) - got).max() > 1e-4


def test_pairs_that_do_not_fit():
    lengths = np.ones(2, np.int32)
    with pytest.raises(ValueError, match=r"tokens_2: expected .*, got \(2, 3\)"):
        matcher()(pixels(), None, pixels()[:, :3], None)
    with pytest.raises(ValueError, match="both or none"):
        matcher()(pixels(), lengths, pixels(), None)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (np.full((1, 4), 256), "ids of the vocabulary, from 0 to 255, got from 256"),
        (np.full((1, 4), -1), "ids of the vocabulary, from 0 to 255, got from -1"),
        (np.ones((1, 4)), "an integer dtype, got float"),
    ],
)
def test_what_tokens_must_be(tokens: np.ndarray, words: str) -> None:
    with pytest.raises(ValueError, match=f"tokens: expected {words}"):
        classifier()(tokens)
