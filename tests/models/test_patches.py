"""Images in square patches."""

from typing import Any

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_rejects
from flax import nnx

from lra_jax.models import SequenceClassifier, TokenClassifier, patches

GRID = (4, 6)


def _model(**settings) -> SequenceClassifier:
    sizes = {
        **{"mechanism": "linear", "num_layers": 1, "embed_dim": 8, "mlp_dim": 8},
        **{"num_heads": 1, "max_length": 24, "grid": GRID, "inputs": "linear"},
        **{"patch": 2, "rngs": nnx.Rngs(0)},
    }
    return SequenceClassifier(256, 3, **sizes | settings)


def _images(count: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(1, 256, (count, 24))


def test_patches_are_squares_in_reading_order():
    image = jnp.arange(24)[None]
    actual = patches.cut(image, GRID, 2)
    assert actual.shape == (1, 6, 4)
    np.testing.assert_array_equal(actual[0, 0], [0, 1, 6, 7])
    np.testing.assert_array_equal(actual[0, 1], [2, 3, 8, 9])
    np.testing.assert_array_equal(actual[0, 5], [16, 17, 22, 23])


def test_the_input_is_a_projection_of_all_pixels_of_a_patch():
    model = _model(positions="none")
    image = _images()

    def embedded(model, image):
        parts = patches.cut(image, GRID, 2)
        return model.encoder.embed(parts / 255), model.encoder(image)

    expected, encoded = helpers.call_model(embedded, model, image)
    layer: Any = model.encoder.embed
    kernel, bias = layer.kernel[...], layer.bias[...]
    first = image[0].reshape(4, 6)[:2, 2:4].reshape(-1) / 255
    np.testing.assert_allclose(expected[0, 1], first @ kernel + bias, rtol=1e-5)
    assert encoded.shape == (2, 6, 8)


@pytest.mark.parametrize("pooling", ["mean", "cls", "attention+ends"])
@pytest.mark.parametrize("positions", ["learned", "learned_2d", "rotary"])
def test_a_model_has_the_positions_of_the_patches(pooling, positions):
    model = _model(pooling=pooling, positions=positions)
    assert model.encoder.config.length == 6 + (pooling == "cls")
    if positions == "learned_2d":
        tables: Any = model.encoder.positions
        assert tables.rows.shape == (2, 8)
        assert tables.columns.shape == (3, 8)
    assert helpers.call_model(type(model).__call__, model, _images()).shape == (2, 3)


def test_squares_and_rows_are_those_of_the_patches():
    options = {"scale": "unit", "grid": True}
    model = _model(
        mechanism="hgrn", attention_options=options, short_conv=3, conv_grid=True
    )
    attention = model.encoder.blocks[0].attention
    assert attention.conv_grid == (2, 3) and attention.keywords["grid"] == (2, 3)
    assert helpers.call_model(type(model).__call__, model, _images()).shape == (2, 3)


def test_a_patch_is_hidden_if_all_its_pixels_are():
    """By LRA's rule, black pixels are padding."""
    model = _model(padding="zeros", positions="none", pooling="attention")
    image = _images(1)
    image.reshape(4, 6)[:2, :2] = 0
    other = image.copy()
    other.reshape(4, 6)[2, 2] = 0  # A single one of its patch.

    def weights(model, image):
        return model.encoder(image, image > 0), model.pool(image)

    rows, pooled = helpers.call_model(weights, model, image)
    queries: Any = model.queries
    queries = np.asarray(queries[...])
    scores = np.einsum("td,qd->qt", np.asarray(rows)[0, 1:], queries) / 8**0.5
    share = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    expected = (share @ np.asarray(rows)[0, 1:]).reshape(-1)
    np.testing.assert_allclose(pooled[0], expected, rtol=1e-4)
    assert bool(patches.any_real(jnp.asarray(other) > 0, GRID, 2)[0, 4])
    assert not bool(patches.any_real(jnp.asarray(other) > 0, GRID, 2)[0, 0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": 0}, "patch: expected"),
        ({"patch": 4}, "patch: expected a divisor of both sides of (4, 6) images"),
        ({"grid": None}, "patch: expected images"),
        ({"inputs": "embedding"}, "patch: expected 1 with inputs='embedding'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    assert_rejects(lambda: _model(**settings), message)


def test_arrays_that_do_not_fit():
    model = _model()
    assert_rejects(lambda: model(_images()[:, :20]), "tokens: expected")
    words = "reconstructs: expected False"
    assert_rejects(lambda: _model(reconstructs=True), words)
    ids = np.ones((2, 24), np.int32)
    words = "segment_ids: expected None with positions in a grid"
    assert_rejects(lambda: model(_images(), segment_ids=ids, documents=1), words)
    config = _model().encoder.config
    words = "patch: expected another value for a model of single positions"
    assert_rejects(
        lambda: TokenClassifier(256, 2, config=config, rngs=nnx.Rngs(0)), words
    )


def test_padding_after_an_image_is_not_seen():
    """As where sequences are rounded up to a number of devices."""
    model = _model(patch=1, positions="none", max_length=26)
    image = _images()
    padded = np.pad(image, ((0, 0), (0, 2)))
    lengths = np.full(2, 24, np.int32)
    alone = model(jnp.asarray(image), jnp.asarray(lengths))
    np.testing.assert_allclose(
        model(jnp.asarray(padded), jnp.asarray(lengths)), alone, atol=1e-5
    )
