"""The settings of a model: checked where they are made, given whole or by keyword."""

import dataclasses
from typing import Any

import helpers
import jax.numpy as jnp
import pytest
from flax import nnx

from lra_jax import attention
from lra_jax.models import (
    AutoEncoder,
    CausalLM,
    MatchingClassifier,
    ModelConfig,
    SequenceClassifier,
    TokenClassifier,
    TransformerEncoder,
)
from lra_jax.models.config import parse_options

RNGS = nnx.Rngs(0)

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 8,
    "mlp_dim": 12,
    "max_length": 16,
}
LINFORMER: dict[str, Any] = SIZES | {
    "mechanism": "linformer",
    "attention_options": {"features": (6, 3)},
}
GATED: dict[str, Any] = SIZES | {
    "mechanism": "gau",
    "attention_options": {"query_dim": 6},
    "dropout": 0.0,
}
MEMORY: dict[str, Any] = SIZES | {
    "mlp": "product_key",
    "mlp_options": {"keys": 8},
    "remat": True,
}
ZEROS: dict[str, Any] = {"norm": "instance", "padding": "zeros", "grid": (2, 2)}


def encoder(**arguments) -> TransformerEncoder:
    return TransformerEncoder(9, rngs=nnx.Rngs(0), **arguments)


def classifier(**arguments) -> SequenceClassifier:
    return SequenceClassifier(9, 3, pooling="cls", rngs=nnx.Rngs(0), **arguments)


def matcher(**arguments) -> MatchingClassifier:
    return MatchingClassifier(9, 3, padding="zeros", rngs=nnx.Rngs(0), **arguments)


@pytest.mark.parametrize("settings", [LINFORMER, GATED, MEMORY])
@pytest.mark.parametrize("make", [encoder, classifier, matcher])
def test_keywords_are_a_config(make, settings):
    by_keyword, whole = make(**settings), make(config=ModelConfig(**settings))
    (graph, state), (graph_2, state_2) = map(nnx.split, (by_keyword, whole))
    assert graph == graph_2 and hash(graph) == hash(graph_2)
    helpers.assert_equal_trees(state, state_2)


def test_options_are_text_or_a_dict():
    text = ModelConfig(attention_options="eps=0.1,clip=8/4", cutoffs="3,5")
    table = ModelConfig(
        attention_options={"eps": 0.1, "clip": (8, 4)}, cutoffs=(3, 5), hybrid="a, b"
    )
    assert text.options == table.options and text.clusters == table.clusters
    assert table.hybrid_names == ("a", "b")


def test_keywords_change_a_given_config():
    config = ModelConfig(**LINFORMER)
    changed = encoder(config=config, num_heads=4).config
    assert changed == dataclasses.replace(config, num_heads=4) != config
    assert classifier(config=config).encoder.config.cls_token


@pytest.mark.parametrize("make", [encoder, classifier, matcher])
def test_unknown_settings(make):
    with pytest.raises(TypeError, match="'num_layer'"):
        make(**SIZES, num_layer=3)


def test_a_decoder_without_a_config_is_causal():
    assert CausalLM(4, config=None, **SIZES, rngs=RNGS).encoder.config.is_causal


def test_a_config_does_not_follow_what_it_was_made_of():
    options = {"features": 3}
    config = ModelConfig(attention_options=options)
    options["features"] = 5
    assert config.options == {"features": 3}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_heads = 4  # pyright: ignore


def test_what_the_blocks_get():
    model = encoder(**LINFORMER, positions="rotary", pooling="cls")
    one, two = (block.attention for block in model.blocks)
    assert (one.max_length, one.rotary, one.in_features) == (17, True, 8)
    for layer, features in {one: 6, two: 3}.items():
        (shape,) = {x[...].shape for x in layer.parameters.values()}
        assert shape[-2:] == (features, 17)
    assert one.mechanism is attention.resolve("linformer")
    gated: Any = encoder(**GATED).blocks[0].attention
    assert (gated.num_heads, gated.head_dim, gated.value_dim) == (1, 6, 16)
    shared = {"mechanism": "linformer", "attention_options": "sharing=layerwise"}
    model = encoder(**SIZES, **shared)
    assert [x.attention.own_parameters for x in model.blocks] == [True, False]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"embed_dim": 8.0}, "embed_dim: expected an int, got 8.0"),
        ({"num_heads": 3}, "num_heads: expected a divisor of qkv_features=64, got 3"),
        ({"qkv_dim": 7}, "num_heads: expected a divisor of qkv_features=7, got 2"),
        ({"dropout": 1.0}, r"dropout: expected a number in \[0, 1\), got 1.0"),
        ({"activation": "silu"}, "activation: expected one of gelu, relu, got 'silu'"),
        ({"mlp": "dens"}, "mlp: expected one of auto, dense, .*did you mean 'dense'"),
        (
            {"attention_options": {"clip": 3}},
            "option of attention 'cosformer': .*got 'clip'",
        ),
        (
            {"attention_options": {"eps": (1, 2, 3)}},
            "eps: expected one value, .*got 3: 1/2/3",
        ),
        ({"positions": "learned_2d"}, "positions: expected images"),
        ({"positions": "rotary", "mechanism": "fnet"}, "rotary: .*got 'fnet'"),
        ({"positions": "rotary", "num_heads": 64}, "rotary: .*even .*got 1"),
        ({"positions": "sinusoidal", "embed_dim": 7, "num_heads": 1}, "embed_dim: "),
        ({"cutoffs": (2, 1)}, r"cutoffs: expected increasing positive ids"),
        ({"cutoffs": (2.5,)}, r"cutoffs: expected token ids, as in .*got \(2\.5,\)"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        encoder(**settings)


@pytest.mark.parametrize(
    ("kind", "sizes", "settings", "name"),
    [
        (SequenceClassifier, (0, 2), {}, "vocab_size"),
        (SequenceClassifier, (4, 0), {}, "num_classes"),
        (MatchingClassifier, (4, 2), {"interaction": "dot"}, "interaction"),
        (TokenClassifier, (4, 2), {"reconstructs": True}, "reconstructs"),
        (TokenClassifier, (4, 2), {"pooling": "cls"}, "pooling"),
        (TokenClassifier, (4, 2), {"padding": "zeros"}, "padding"),
        (MatchingClassifier, (4, 2), {"head": "linear"}, "head"),
        (SequenceClassifier, (4, 2), {"pooling": "max"}, "pooling"),
        (SequenceClassifier, (4, 2), {"pooling": "first", "is_causal": True}, "pool"),
        (SequenceClassifier, (4, 2), {"padding": "none"}, "padding"),
        (AutoEncoder, (4, 2), {"embed_dim": 7, "num_heads": 1}, "embed_dim"),
        (SequenceClassifier, (4, 2), {"norm": "group"}, "norm"),
        (SequenceClassifier, (4, 2), {"norm": "batch", "remat": True}, "remat"),
        (CausalLM, (4,), {"norm": "batch"}, "norm"),
        (CausalLM, (4,), {"norm": "instance"}, "norm"),
        # A mean of what has the mean zero; and its row of a class is at the front.
        (SequenceClassifier, (4, 2), {"norm": "instance"}, "pooling"),
        (SequenceClassifier, (4, 2), ZEROS | {"pooling": "first"}, "pooling"),
        (SequenceClassifier, (4, 2), ZEROS | {"pooling": "cls"}, "pooling"),
    ],
)
def test_settings_that_a_model_would_not_heed(kind, sizes, settings, name):
    with pytest.raises(ValueError, match=f"^{name}.*: expected "):
        kind(*sizes, **SIZES | settings, rngs=RNGS)


def test_one_dtype_for_all_layers():
    model = encoder(**SIZES, dtype=jnp.bfloat16)
    assert {block.attention.dtype for block in model.blocks} == {jnp.bfloat16}


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("clip=5", {"clip": 5}),
        (" clip = None , name=some ", {"clip": None, "name": "some"}),
        ("rate=0.1,flag=True,", {"rate": 0.1, "flag": True}),
        ("k=8/4,name=a / None", {"k": (8, 4), "name": ("a", None)}),
    ],
)
def test_options(text, options):
    assert parse_options(text) == options
