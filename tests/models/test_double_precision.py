"""With jax's 64-bit types enabled, parameters and logits are still float32."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lra_jax import models
from lra_jax.attention.registry import MECHANISMS
from lra_jax.models.pretrained import PretrainedConfig, PretrainedEncoder

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "embed_dim": 8,
    "num_heads": 2,
    "mlp_dim": 8,
    "max_length": 16,
}
SMALL_MEMORY = {"keys": 4, "top": 2}
TOKENS = jax.ShapeDtypeStruct((2, 16), jnp.int32)


def assert_single(make: Any) -> None:
    """On shapes alone, so nothing is compiled."""
    with jax.enable_x64(True):
        model = nnx.eval_shape(make)
        state = nnx.state(model)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            assert leaf.dtype == jnp.float32, jax.tree_util.keystr(path)
        graph = nnx.graphdef(model)
        out = jax.eval_shape(lambda s, t: nnx.merge(graph, s)(t), state, TOKENS)
    assert out.dtype == jnp.float32


def classifier(**settings: Any) -> models.SequenceClassifier:
    return models.SequenceClassifier(9, 3, rngs=nnx.Rngs(0), **SIZES | settings)


# The others have the projections of these two alone.
KINDS = [x for x, one in MECHANISMS.items() if one.make_parameters or one.gates]


@pytest.mark.parametrize("mechanism", ["softmax", "cosformer", *KINDS])
def test_every_mechanism(mechanism: str) -> None:
    assert_single(lambda: classifier(mechanism=mechanism))


@pytest.mark.parametrize(
    "settings",
    [
        {"gate": True, "short_conv": 3, "pooling": "attention+ends"},
        {"pooling": "cls", "mlp": "product_key", "mlp_options": SMALL_MEMORY},
        {"reconstructs": True, "norm": "instance", "pooling": "ends"},
        {"grid": (4, 4), "positions": "learned_2d", "inputs": "linear", "patch": 2},
        {"positions": "sinusoidal", "cutoffs": (4, 7), "mlp": "glu"},
        {"norm": "batch", "post_norm": True, "activation": "relu", "pooling": "last"},
        {"mechanism": "hgrn", "attention_options": {"is_complex": True}},
        {"mechanism": "linformer", "attention_options": {"projection": "convolution"}},
        {"mechanism": "nystrom", "attention_options": {"conv_kernel": 3}},
        {"mechanism": "synthesizer", "attention_options": {"variant": "dense"}},
    ],
)
def test_every_part(settings: dict[str, Any]) -> None:
    assert_single(lambda: classifier(**settings))


@pytest.mark.parametrize(
    "kind", [models.CausalLM, models.MaskedLM, models.TokenClassifier]
)
def test_models_of_single_tokens(kind: Any) -> None:
    sizes = (9, 3) if kind is models.TokenClassifier else (9,)
    assert_single(lambda: kind(*sizes, mechanism="linear", rngs=nnx.Rngs(0), **SIZES))


def test_a_model_of_others() -> None:
    sizes = {"vocab_size": 9, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8}
    config = PretrainedConfig(
        **{"kind": "bert", "num_layers": 1, "max_length": 16, "token_types": 2},
        **{"activation": "gelu", "epsilon": 1e-5, **sizes},
    )
    assert_single(lambda: PretrainedEncoder(config, "softmax", rngs=nnx.Rngs(0)))
