"""``jax.export`` of models with a batch whose size is a symbol."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, fast_jit
from flax import nnx

from lra_jax import models
from lra_jax.models import decoding

SIZES: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "mlp_dim": 8}
SIZES |= {"mechanism": "linear", "max_length": 16, "vocab_size": 9}
CLASSES: dict[str, Any] = {"num_classes": 3}


def _score(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return model(tokens, lengths)


def _match(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return model(tokens, lengths, tokens, lengths)


def _encode(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return model(tokens, _at_end(tokens, lengths)[:, ::-1])


def _decode(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    prompt = tokens[:, :4]
    _, state = decoding.prefill(model, prompt, mask=_at_end(prompt, lengths))
    return decoding.step(model, state, tokens[:, 4])[0]


def _at_end(tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return jnp.arange(tokens.shape[1])[None] < lengths[:, None]


def _compare(call: Callable[..., Any], rows: bool) -> None:
    """The exported call and the direct one, for batches of 2 and of 3."""
    tokens = np.random.default_rng(0).integers(1, 9, (3, 8), "int32")
    arrays = tokens, np.array([8, 5, 1], "int32")
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype) for a in arrays]
    exported = jax.export.export(jax.jit(call))(*shapes)
    direct = fast_jit(call)(*arrays)
    assert_close(fast_jit(exported.call)(*arrays), direct, 1e-4)
    first = [a[:2] for a in arrays]
    direct = direct[:2] if rows else fast_jit(call)(*first)
    assert_close(fast_jit(exported.call)(*first), direct, 1e-4)


@pytest.mark.parametrize(
    ("model", "settings", "call"),
    [
        (
            models.SequenceClassifier,
            CLASSES | {"pooling": "attention+ends", "cutoffs": (3, 6), "short_conv": 3},
            _score,
        ),
        (
            models.SequenceClassifier,
            CLASSES | {"pooling": "cls", "mlp": "product_key", "norm": "instance"},
            _score,
        ),
        (
            models.SequenceClassifier,
            CLASSES
            | {"pooling": "last", "inputs": "linear", "grid": (2, 4), "patch": 2},
            _score,
        ),
        (models.MatchingClassifier, CLASSES, _match),
        (models.TransformerEncoder, {}, _encode),
        (models.AutoEncoder, CLASSES, _score),
        (models.CausalLM, {"positions": "rotary"}, _decode),
    ],
)
def test_forward(model: Any, settings: dict[str, Any], call: Any) -> None:
    graph, state = nnx.split(model(**SIZES | settings, rngs=nnx.Rngs(0)))
    _compare(lambda *arrays: call(nnx.merge(graph, state), *arrays), rows=True)


def test_gradient() -> None:
    graph, state = nnx.split(models.CausalLM(**SIZES, rngs=nnx.Rngs(0)))

    def slope(tokens, lengths):
        def loss(state):
            return jnp.sin(nnx.merge(graph, state)(tokens, lengths)).sum()

        return jax.tree.leaves(jax.grad(loss)(state))

    _compare(slope, rows=False)
