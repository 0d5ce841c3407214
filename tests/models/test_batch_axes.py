"""Models on a batch that is split over a mesh, and on one whose size is a symbol."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, fast_jit
from flax import nnx
from jax.flatten_util import ravel_pytree

from lra_jax import models
from lra_jax.models import decoding, product_keys

LENGTH = 8
SIZES: dict[str, Any] = {"num_layers": 1, "num_heads": 2, "embed_dim": 8, "mlp_dim": 8}
SIZES |= {"mechanism": "linear", "max_length": LENGTH, "vocab_size": 9}
CLASSES: dict[str, Any] = {"num_classes": 3}


def _score(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return model(tokens, lengths)


def _match(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return model(tokens, lengths, tokens, lengths)


def _pack(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Padded rows, and rows of two documents."""
    ids = jnp.where(jnp.arange(LENGTH)[None] < lengths[:, None], 1, 2)
    more = {"documents": 2} if isinstance(model, models.SequenceClassifier) else {}
    packed = model(tokens, segment_ids=ids.astype("int32"), **more)
    second = (lengths < LENGTH)[:, None]
    if more:
        packed = packed.at[:, 1].set(jnp.where(second, packed[:, 1], 0))
    return jnp.concatenate([model(tokens, lengths).ravel(), packed.ravel()])


def _train(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return model(tokens, lengths, rngs=nnx.Rngs(dropout=0))


def _encode(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    mask = jnp.arange(LENGTH)[None] >= LENGTH - lengths[:, None]
    return jnp.where(mask[:, :, None], model(tokens, mask), 0)


def _decode(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    mask = jnp.arange(4)[None] < lengths[:, None]
    _, state = decoding.prefill(model, tokens[:, :4], mask=mask)
    return decoding.step(model, state, tokens[:, 4])[0]


TOKENS = np.random.default_rng(0).integers(1, 9, (4, LENGTH), "int32")
ARRAYS = TOKENS, np.array([8, 5, 1, 3], "int32")

CASES = [
    (
        models.SequenceClassifier,
        CLASSES | {"pooling": "cls", "norm": "instance", "cutoffs": (3, 6)},
        _score,
    ),
    (
        models.SequenceClassifier,
        CLASSES | {"pooling": "attention+ends", "positions": "rotary", "remat": True},
        _pack,
    ),
    (
        models.SequenceClassifier,
        CLASSES | {"mlp": "product_key", "positions": "sinusoidal"},
        _pack,
    ),
    (
        models.SequenceClassifier,
        CLASSES | {"pooling": "last", "inputs": "linear", "grid": (2, 4), "patch": 2},
        _score,
    ),
    (
        models.SequenceClassifier,
        CLASSES
        | {"pooling": "first", "positions": "learned_2d", "grid": (2, 4)}
        | {"short_conv": 2, "conv_grid": True, "norm": "batch", "dropout": 0.1},
        _train,
    ),
    (
        models.SequenceClassifier,
        CLASSES
        | {
            "num_layers": 2,
            "stages": "1,1",
            "inputs": "linear",
            "grid": (2, 4),
            "head": "linear",
        }
        | {"drop_path": 0.5, "layer_scale": 0.1},
        _score,
    ),
    (
        models.SequenceClassifier,
        CLASSES | {"pooling": "flatten", "final_norm": True, "post_norm": True},
        _score,
    ),
    (models.MatchingClassifier, CLASSES, _match),
    (models.AutoEncoder, CLASSES, _score),
    (models.MaskedLM, {}, _pack),
    (models.TransformerEncoder, {}, _encode),
    (models.CausalLM, {"short_conv": 3}, _pack),
    (models.CausalLM, {"short_conv": 3, "positions": "rotary"}, _decode),
]


@pytest.mark.parametrize(("model", "settings", "call"), CASES)
def test_models(
    model: Any,
    settings: dict[str, Any],
    call: Callable[..., jax.Array],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Outputs and gradients; runs of the trainer have axes of the other kind."""
    monkeypatch.setattr(product_keys, "_TOGETHER", 5)
    graph, params, rest = nnx.split(
        model(**SIZES | settings, rngs=nnx.Rngs(0)), nnx.Param, ...
    )

    def loss(params, tokens, lengths):
        out = call(nnx.merge(graph, params, rest, copy=True), tokens, lengths)
        return jnp.sin(out).sum(), out

    def slope(*arrays):
        slopes, out = jax.grad(loss, has_aux=True)(params, *arrays)
        # Together, because some biases before a norm have no slope.
        return out, ravel_pytree(slopes)[0]

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, place) for x in ARRAYS]
        if call not in (_decode, _train) and "product_key" not in settings.values():
            # What cannot be split is refused when it is traced.
            jax.eval_shape(slope, *split)
            return
        got = fast_jit(slope)(*split)
    assert_close(got, fast_jit(slope)(*ARRAYS), 1e-4)


def _export(call: Callable[..., Any]) -> Any:
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype) for a in ARRAYS]
    return jax.export.export(jax.jit(call))(*shapes)


def _compare_export(call: Callable[..., Any]) -> None:
    """The exported call and the direct one; a batch of 2 stands for the symbol."""
    exported = _export(call)
    first = [a[:2] for a in ARRAYS]
    direct = fast_jit(call)(*first)
    assert_close(fast_jit(exported.call)(*first), direct, 1e-4)


@pytest.mark.parametrize(
    ("model", "settings", "call"),
    [(*x, _score if y is _pack else y) for *x, y in CASES if y is not _train],
)
def test_export(model: Any, settings: dict[str, Any], call: Any) -> None:
    """All can be exported; `test_export_of_a_gradient` compares numbers."""
    graph, state = nnx.split(model(**SIZES | settings, rngs=nnx.Rngs(0)))
    _export(lambda *arrays: call(nnx.merge(graph, state), *arrays))


def test_export_of_a_gradient() -> None:
    graph, state = nnx.split(models.CausalLM(**SIZES, rngs=nnx.Rngs(0)))

    def slope(tokens, lengths):
        def loss(state):
            return jnp.sin(nnx.merge(graph, state)(tokens, lengths)).sum()

        return jax.tree.leaves(jax.grad(loss)(state))

    _compare_export(slope)


def test_generation() -> None:
    model = models.CausalLM(**SIZES, short_conv=3, rngs=nnx.Rngs(0))
    prompts = [np.arange(1, 4), np.arange(2, 4)]
    direct = models.generate(model, prompts, num_tokens=3)
    with jax.set_mesh(jax.make_mesh((2,), ("data",))):
        np.testing.assert_array_equal(
            models.generate(model, prompts, num_tokens=3), direct
        )
