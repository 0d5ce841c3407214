"""Gradients of parameters that many positions share, in half precision.

A sum in bfloat16 stops growing at 256 times its terms, so each of these gradients must
be summed in float32, whatever the dtype of the activations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import SequenceClassifier
from lra_jax.models.layers import Dense
from lra_jax.models.short_conv import ShortConv

ROWS, LENGTH, DOCUMENTS = 64, 64, 4
IDS = np.tile(np.repeat(np.arange(1, DOCUMENTS + 1), LENGTH // DOCUMENTS), (ROWS, 1))
SIZES = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "mlp_dim": 8, "dropout": 0.0}
# Rounding of single terms: those of one parameter add up to less than this.
TOLERANCE = 0.05


def assert_gradients_agree(make: Any, loss: Any, *names: str) -> None:
    """Each parameter's gradient in bfloat16 against the one in float32, those of the
    encoder's parameters that are named among them."""

    def gradients(dtype: Any) -> dict[str, np.ndarray]:
        graph, params, rest = nnx.split(make(dtype), nnx.Param, ...)
        slopes = jax.jit(jax.grad(lambda p: loss(nnx.merge(graph, p, rest))))(params)
        leaves, _ = jax.tree_util.tree_flatten_with_path(slopes)
        return {jax.tree_util.keystr(k): np.asarray(leaf) for k, leaf in leaves}

    exact, half = gradients(None), gradients(jnp.bfloat16)
    largest = max(np.linalg.norm(g) for g in exact.values())
    errors = {
        name: float(np.linalg.norm(half[name] - g) / np.linalg.norm(g))
        for name, g in exact.items()
        # Others are zero in exact arithmetic, as that of the keys' bias.
        if np.linalg.norm(g) > 1e-3 * largest
    }
    assert all(any(f"'{name}'" in path for path in errors) for name in names), errors
    assert all(error < TOLERANCE for error in errors.values()), errors


@pytest.mark.parametrize(
    ("packed", "changes"),
    [
        (False, {}),
        (True, {}),
        (True, {"short_conv": 3, "gate": True, "mlp": "glu"}),
        (False, {"norm": "instance", "pooling": "attention"}),
        (True, {"norm": "instance", "pooling": "attention"}),
        (False, {"norm": "batch", "post_norm": True, "pooling": "last"}),
    ],
)
def test_a_classifier(packed: bool, changes: dict[str, Any]) -> None:
    changes = {"positions": "learned"} | changes
    tokens = np.random.default_rng(0).integers(1, 5, (ROWS, LENGTH))
    documents = {"segment_ids": jnp.asarray(IDS), "documents": DOCUMENTS}

    def make(dtype: Any) -> SequenceClassifier:
        settings = {"mechanism": "linear", "max_length": LENGTH} | SIZES | changes
        return SequenceClassifier(8, 2, dtype=dtype, **settings, rngs=nnx.Rngs(0))

    def loss(model: SequenceClassifier) -> jax.Array:
        scores = model(jnp.asarray(tokens), **documents if packed else {})
        return -jax.nn.log_softmax(scores)[..., 0].mean()

    names = ["embed", "positions"]
    names += ["convs"] * ("short_conv" in changes)
    assert_gradients_agree(make, loss, *names)


def test_a_class_vector_and_masked_tokens() -> None:
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(1, 5, (ROWS, LENGTH)))
    hidden = jnp.asarray(random.random((ROWS, LENGTH)) < 0.5)
    # Masked tokens come without a class vector.
    for pooling in ("cls", "mean"):
        reads = {"reconstructs": True} if pooling == "mean" else {}

        def make(dtype: Any, pooling: str = pooling, reads: Any = reads) -> Any:
            settings = {"max_length": LENGTH, "pooling": pooling} | SIZES | reads
            model = SequenceClassifier(
                8, 2, mechanism="linear", dtype=dtype, **settings, rngs=nnx.Rngs(0)
            )
            return model.encoder

        def loss(encoder: Any, reads: Any = reads) -> jax.Array:
            options = {"hidden": hidden} if reads else {}
            out = encoder(tokens, **options).astype(jnp.float32)
            return (out * jnp.arange(1.0, 9.0)[None, None]).sum()

        names = ("hidden", "positions") if reads else ("cls", "embed")
        assert_gradients_agree(make, loss, *names)


def test_a_projection() -> None:
    """Its bias is shared by 64,000 positions."""
    slope = jnp.asarray([1.0, 0.5, -2.0, 4.0])  # Without rounding.

    def gradient(dtype: Any) -> np.ndarray:
        graph, params = nnx.split(Dense(2, 4, dtype=dtype, rngs=nnx.Rngs(0)))

        def loss(params: Any) -> jax.Array:
            out = nnx.merge(graph, params)(jnp.ones((64, 1000, 2)))
            return (out.astype(jnp.float32) * slope[None, None]).sum()

        return np.asarray(jax.jit(jax.grad(loss))(params)["bias"][...])

    np.testing.assert_array_equal(gradient(jnp.bfloat16), 64_000 * slope)


@pytest.mark.parametrize("kind", ["plain", "packed", "image"])
def test_a_short_convolution(kind: str) -> None:
    random = np.random.default_rng(0)
    x, slope = 1 + 0.1 * random.normal(size=(2, ROWS, LENGTH, 4))
    grid = (8, LENGTH // 8) if kind == "image" else None
    label = jnp.asarray(IDS) if kind == "packed" else None

    def gradients(dtype: Any) -> dict[str, np.ndarray]:
        graph, params = nnx.split(ShortConv(4, 3, grid=grid, rngs=nnx.Rngs(0)))

        def loss(params: Any) -> jax.Array:
            out = nnx.merge(graph, params)(jnp.asarray(x, dtype), None, label)
            return (out.astype(jnp.float32) * slope.astype(np.float32)).sum()

        slopes = jax.jit(jax.grad(loss))(params)
        return {name: np.asarray(slopes[name][...]) for name in ("kernel", "bias")}

    exact, half = gradients(jnp.float32), gradients(jnp.bfloat16)
    for name, expected in exact.items():
        np.testing.assert_allclose(half[name], expected, rtol=0.01, err_msg=name)
