"""Hierarchical models of images: stages, colours, LayerScale, stochastic depth."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.attention import MECHANISMS
from lra_jax.models import ModelConfig, SequenceClassifier
from lra_jax.models.encoder import make_block
from lra_jax.models.layers import Dropout
from lra_jax.models.patches import Merge

SIZES: dict[str, Any] = {
    **{"stages": "1,2", "num_layers": 3, "embed_dim": 8, "num_heads": 2, "mlp_dim": 16},
    **{"patch": 2, "grid": (8, 12), "channels": 3, "inputs": "linear"},
    **{"max_length": 96, "head": "linear", "layer_scale": 0.1, "dropout": 0.0},
}
PIXELS = jax.random.randint(jax.random.key(0), (3, 96, 3), 0, 256)


def make(**settings) -> SequenceClassifier:
    return SequenceClassifier(256, 5, rngs=nnx.Rngs(0), **SIZES | settings)


def convolved(x: jax.Array, kernel: jax.Array, side: int) -> np.ndarray:
    """`[B, rows, columns, C]` by a kernel `[side * side * C, D]`, without overlap."""
    kernel = kernel.reshape(side, side, x.shape[-1], -1)
    layout = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        x, kernel, (side, side), "VALID", dimension_numbers=layout
    )
    return np.asarray(out.reshape(len(x), -1, out.shape[-1]))


def test_patches_and_merges_are_convolutions():
    model = make(positions="none")
    layer: Any = model.encoder.embed
    image = PIXELS.reshape(3, 8, 12, 3) / 255
    expected = convolved(image, layer.kernel[...], 2) + np.asarray(layer.bias[...])
    embedded = model.encoder._embed(PIXELS, None, None, None)[0]
    np.testing.assert_allclose(embedded, expected, atol=1e-5)
    merge: Any = Merge(model.encoder.config, nnx.Rngs(1))
    mask = jnp.arange(24).reshape(1, 4, 6) == 7  # Row 1, column 1.
    merged, real = merge(embedded, mask.reshape(1, 24))
    expected = convolved(embedded.reshape(3, 4, 6, 8), merge.layer.kernel[...], 2)
    np.testing.assert_allclose(merged, expected, atol=1e-5)
    assert real.tolist() == [[True] + [False] * 5]


@pytest.mark.parametrize(
    ("mechanism", "options"),
    [
        ("softmax", ""),
        ("flow", ""),
        ("cosformer", "grid=True"),
        ("linformer", "features=4"),
        (lambda query, key, value, mask=None: value, ""),
    ],
)
def test_an_image_has_the_same_logits_in_any_batch(mechanism, options):
    model = make(mechanism=mechanism, attention_options=options)
    assert jax.eval_shape(model.encoder, PIXELS).shape == (3, 6, 16)
    run = nnx.jit(lambda model, x: model(x, jnp.full(len(x), 96)))
    logits = run(model, PIXELS)
    np.testing.assert_allclose(logits[1:2], run(model, PIXELS[1:2]), atol=1e-5)
    changed = run(model, PIXELS.at[1, 95, 2].add(40))
    assert np.abs(changed - logits).max(1)[1] > 1e-4


def test_a_mechanism_of_two_dimensions_gets_the_grid_of_its_stage():
    config = ModelConfig(mechanism="cosformer", attention_options="grid=True", **SIZES)
    assert [x["grid"] for x in config.block_options] == [(4, 6), (2, 3), (2, 3)]
    assert [config.at(index).length for index in range(3)] == [24, 6, 6]


def test_layer_scale_is_a_factor_of_the_mlp_alone():
    config = ModelConfig(mechanism="softmax", layer_scale=1e-5)
    block: Any = make_block(config, 0, nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (2, 6, 64))
    after: Any = x + block.attention(block.attention_norm(x))
    mlp = block.mlp(block.mlp_norm(after))
    np.testing.assert_allclose(block(x, None), after + 1e-5 * mlp, rtol=1e-5)
    block.scale[...] = jnp.arange(64.0)
    expected = after + np.arange(64) * np.asarray(mlp)
    np.testing.assert_allclose(block(x, None), expected, rtol=1e-4, atol=1e-4)
    plain: Any = make_block(ModelConfig(), 0, nnx.Rngs(0))
    assert plain.scale is None


def test_drop_path_leaves_out_whole_examples():
    drop, x = Dropout(0.25, by_example=True), jnp.ones((4000, 2, 3))
    assert drop(x) is x
    out = np.asarray(drop(x, nnx.Rngs(dropout=0))).reshape(4000, 6)
    assert (out == out[:, :1]).all()
    kept = out[:, 0] > 0
    np.testing.assert_allclose(out[kept], 4 / 3, rtol=1e-6)
    assert abs(kept.mean() - 0.75) < 0.03
    model = make(drop_path=0.4)
    rates = [block.drop_path.rate for block in model.encoder.blocks]
    assert rates == [0, 0.2, 0.4]
    assert (model(PIXELS, None, nnx.Rngs(dropout=0)) != model(PIXELS)).any()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"stages": "1,3"}, "num_layers: expected 4, the blocks of stages=1,3, got 3"),
        ({"stages": "3,x"}, "stages: expected numbers of blocks, as in 3,3,10,3"),
        ({"stages": "0,3"}, "stages: expected numbers of blocks, as in 3,3,10,3"),
        ({"grid": None, "patch": 1}, "stages: expected images, .* got sequences"),
        ({"patch": 4}, r"patch: expected a divisor .*, got 4 \(8 in the last stage"),
        ({"pooling": "cls"}, "pooling: expected another value with stages"),
        ({"drop_path": 1.0}, r"drop_path: expected a number in \[0, 1\)"),
    ],
)
def test_settings_that_do_not_fit(settings, problem):
    with pytest.raises(ValueError, match=problem):
        make(**settings)


def test_mechanisms_fit_between_stages():
    sizes = {"num_layers": 2, "stages": "1,1"}
    # The others have no array whose size depends on the stage.
    learned = [name for name, one in MECHANISMS.items() if one.make_parameters]
    for name in (*learned, "cosformer", "hgrn"):
        logits = jax.eval_shape(lambda name=name: make(mechanism=name, **sizes)(PIXELS))
        assert logits.shape == (3, 5), name
