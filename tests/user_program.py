# pyright: strict
"""What a user of the library may write, for pyright's strictest rules.

`tests/test_types.py` checks it; every name and keyword here is a public one.
"""

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from lra_jax import attention, models
from lra_jax.attention import Mechanism


def attend(query: jax.Array, mask: jax.Array) -> jax.Array:
    """Functions of arrays."""
    out: jax.Array = attention.cosformer_attention(
        query, query, query, mask=mask, max_length=64
    )
    out = attention.linear_attention(out, query, query, is_causal=True)
    out = attention.flow_attention(out, query, query, mask=mask, clip=30.0)
    weights: jax.Array = attention.softmax_weights(out, query, mask=mask)
    return (weights @ out.swapaxes(1, 2)).swapaxes(1, 2)


def squared_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None = None
) -> jax.Array:
    """An attention of one's own."""
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    scores = (query @ key.swapaxes(2, 3)) ** 2
    if mask is not None:
        scores = scores * mask
    return (scores @ value).swapaxes(1, 2)


class Block(nnx.Module):
    """A layer of one's own around the library's, by name or by function."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.named = models.MultiHeadAttention(
            4, width, mechanism="cosformer", max_length=64, rngs=rngs
        )
        self.mixer = models.MultiHeadAttention(
            num_heads=4, in_features=width, mechanism=squared_attention, rngs=rngs
        )

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        x = x + self.named(x, mask=mask)
        return x + self.mixer(x, mask=mask)


def describe(name: str) -> str:
    """What the registry says."""
    mechanism: Mechanism = attention.resolve(name)
    function: Callable[..., jax.Array] = mechanism.attention
    return f"{mechanism.name} {mechanism.causal} {mechanism.source} {function}"


def classify(run: str, texts: list[str]) -> np.ndarray:
    """A trained model, applied."""
    saved: models.Saved = models.load(run, allow_code=False)
    prediction: models.Prediction = saved.predict(texts, batch_size=8)
    models.save("copy.safetensors", saved.model, raw=saved.raw, about=saved.about)
    return prediction.labels


def main() -> None:
    """Runs the parts that need no trained model."""
    rngs = nnx.Rngs(0)
    x = jax.random.normal(jax.random.key(0), (2, 16, 32))
    mask = x[:, :, 0] > -1
    print(Block(32, rngs)(x, mask).shape, describe("flow"))
    print(attend(x.reshape(2, 16, 4, 8), mask).shape)


if __name__ == "__main__":
    main()
