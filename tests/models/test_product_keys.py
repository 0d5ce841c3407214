"""The product-key memory against all of its keys, and what a memory must not do."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax.models import SequenceClassifier, product_keys
from lra_jax.models.product_keys import ProductKeyMemory

OPTIONS = {"keys": 5, "heads": 2, "top": 3, "query_dim": 6}
X = np.random.default_rng(0).normal(size=(2, 7, 8)).astype("float32")


def memory(**more) -> ProductKeyMemory:
    settings = {"rngs": nnx.Rngs(0)} | more
    return ProductKeyMemory(8, OPTIONS, **settings)


def call(module, x, key=None):
    rngs = None if key is None else nnx.Rngs(dropout=key)
    return module(x, rngs=rngs)


def test_is_a_search_through_all_keys() -> None:
    module = memory()
    query = np.asarray(module.norm(module.query(X).reshape(2, 7, 2, 6)))
    keys, values = np.asarray(module.keys[...]), np.asarray(module.values[...])
    expected = np.zeros((2, 7, 8))
    for place in np.ndindex(2, 7):
        for head in range(2):
            first, second = query[place][head].reshape(2, 3)
            scores = (keys[head, 0] @ first)[:, None] + keys[head, 1] @ second
            best = np.argsort(-scores.reshape(-1))[:3]
            weights = np.exp(scores.reshape(-1)[best] - scores.max())
            expected[place] += weights / weights.sum() @ values[best]
    np.testing.assert_allclose(helpers.call_model(call, module, X), expected, atol=1e-5)


def test_parts_of_a_batch_change_nothing(monkeypatch) -> None:
    whole = helpers.call_model(call, memory(), X)
    monkeypatch.setattr(product_keys, "_TOGETHER", 4)
    np.testing.assert_allclose(memory()(X), whole, atol=1e-6)
    # A position by itself is what it is in a batch.
    np.testing.assert_allclose(memory()(X[1, 2]), whole[1, 2], atol=1e-6)
    assert memory()(X[:0]).shape == (0, 7, 8)


def test_gradients_are_those_of_differences() -> None:
    graph, state = nnx.split(memory())
    way = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).reshape(x.shape), state)

    @helpers.quick_jit
    def slope(state):
        loss = lambda state: jnp.sin(nnx.merge(graph, state)(X)).sum()  # noqa: E731
        return jax.value_and_grad(loss)(state)

    step = 1e-3
    ahead, behind = (
        slope(jax.tree.map(lambda x, d, s=sign: x + s * step * d, state, way))[0]
        for sign in (1, -1)
    )
    gradients = slope(state)[1]
    assert all(np.asarray(x).any() for x in jax.tree.leaves(gradients))
    parts = jax.tree.map(lambda g, d: (g * d).sum(), gradients, way)
    expected = sum(jax.tree.leaves(parts))
    assert (ahead - behind) / (2 * step) == pytest.approx(float(expected), rel=2e-2)


def test_dropout_and_half_precision() -> None:
    module = memory(dropout=0.5, dtype=jnp.bfloat16)
    x = jnp.asarray(X, jnp.bfloat16)
    plain = helpers.call_model(call, module, x)
    assert plain.dtype == jnp.bfloat16
    assert {p.dtype for p in jax.tree.leaves(nnx.state(module))} == {jnp.float32.dtype}
    dropped = helpers.call_model(call, module, x, jax.random.key(0))
    assert np.abs(np.asarray(dropped - plain, "float32")).max() > 0.01


def classifier(**more) -> SequenceClassifier:
    sizes = {"num_layers": 1, "embed_dim": 8, "mlp_dim": 8, "max_length": 8}
    return SequenceClassifier(11, 4, **sizes, rngs=nnx.Rngs(0), **more)


@pytest.mark.parametrize("mechanism", ["cosformer", "gau"])
def test_in_the_place_of_the_mlp(mechanism: str) -> None:
    model = classifier(mechanism=mechanism, mlp="product_key", mlp_options=OPTIONS)
    assert isinstance(model.encoder.blocks[0].mlp, ProductKeyMemory)
    tokens = np.arange(16).reshape(2, 8) % 11
    lengths = np.array([8, 5], "int32")
    out = helpers.call_model(lambda m, *a: m(*a), model, tokens, lengths)
    others = np.where(np.arange(8) < lengths[:, None], tokens, 9)
    again = helpers.call_model(lambda m, *a: m(*a), model, others, lengths)
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": 3}, "did you mean 'keys'"),
        ({"top": 65}, "at most keys=64, got 65"),
        ({"top": 1}, "top: .* least 2.*, got 1"),
        ({"query_dim": 5}, "an even width"),
    ],
)
def test_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        classifier(mlp="product_key", mlp_options=options)
