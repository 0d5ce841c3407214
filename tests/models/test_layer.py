"""The layer in programs of others: shared heads, streams, and jax's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention.mechanisms import assert_close, assert_rejects, fast_jit
from flax import nnx

from lra_jax import attention
from lra_jax.models import ModelConfig, MultiHeadAttention, TransformerEncoder

X = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")


def _layer(mechanism: str = "cosformer", seed: int = 0, **more) -> MultiHeadAttention:
    settings = {"max_length": 6, **more}
    rngs = nnx.Rngs(params=seed)
    return MultiHeadAttention(4, 8, mechanism=mechanism, rngs=rngs, **settings)


PARTS = {"short_conv": 2, "gate": True, "local_values": True}


@pytest.mark.parametrize("mechanism", ["softmax", "cosformer", "gla"])
def test_shared_heads_of_keys_and_values(mechanism: str) -> None:
    """The same as a layer whose heads of keys and values repeat those, streams too."""
    few = _layer(mechanism, num_kv_heads=2, is_causal=True, **PARTS)
    many = _layer(mechanism, is_causal=True, **PARTS)
    assert nnx.state(few)["key"]["kernel"].shape == (8, 4)

    def repeated(x: jax.Array) -> jax.Array:
        heads = x.reshape(*x.shape[:-1], 2, 2)
        return jnp.repeat(heads, 2, axis=-2).reshape(*x.shape[:-1], 8)

    nnx.update(
        many,
        jax.tree.map(
            lambda a, b: a if a.shape == b.shape else repeated(a),
            nnx.state(few),
            nnx.state(many),
        ),
    )

    @fast_jit
    def run(x):
        out, state = few.prefill(x[:, :4])
        step, _ = few.step(state, x[:, 4])
        return few(x), many(x), out, step

    got, expected, out, step = run(X)
    assert_close(got, expected)
    assert_close(out, expected[:, :4])
    assert_close(step, expected[:, 4])


@pytest.mark.parametrize("heads", [3, 0])
def test_heads_that_cannot_be_shared(heads: int) -> None:
    assert_rejects(lambda: _layer(num_kv_heads=heads), "num_kv_heads: expected")


def test_shared_heads_need_projections() -> None:
    for name in ("gau", "fnet"):
        assert_rejects(lambda name=name: _layer(name, num_kv_heads=2), "None for")


def test_a_stream_from_its_first_position() -> None:
    layer = _layer(is_causal=True, **PARTS)
    state = layer.init_state(2)
    outs = []
    for position in range(3):
        out, state = layer.step(state, X[:, position])
        outs.append(out)
    assert_close(jnp.stack(outs, 1), layer(X)[:, :3])


def test_a_state_shows_its_shapes() -> None:
    state = attention.linear_init(2, 4, 3)
    sums = "Sums(summary=float32[2, 4, 3, 3], total=float32[2, 4, 3])"
    assert repr(state) == f"LinearState(sums={sums}, position=int32[2])"
    assert repr(_layer(is_causal=True).init_state(1)).startswith(
        "LayerState(mechanism=CosformerState(sums=Sums(summary=float32[1, 4, 4, 2]"
    )


def test_checkpoint_scan_and_vmap() -> None:
    """Layers of one shape as one with a first axis: in depth, and side by side."""
    layers = [_layer(seed=seed) for seed in (0, 1)]
    graph = nnx.graphdef(layers[0])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, layers))

    def one(x, state):
        return x + nnx.merge(graph, state)(x)

    @fast_jit
    def run(x):
        def loss(x):
            deep, _ = jax.lax.scan(
                lambda x, state: (jax.checkpoint(one)(x, state), None), x, stacked
            )
            return jnp.sin(deep).sum(), deep

        slope, deep = jax.grad(loss, has_aux=True)(x)
        wide = jax.vmap(one, in_axes=(None, 0))(x, stacked)

        def plain(x):
            for layer in layers:
                x = x + layer(x)
            return x

        expected, pull = jax.vjp(plain, x)
        alone = jnp.stack([x + layer(x) for layer in layers])
        return (deep, slope, wide), (expected, pull(jnp.cos(expected))[0], alone)

    assert_close(*run(X))


def test_an_encoder_shares_heads() -> None:
    config = ModelConfig(
        num_layers=1, embed_dim=8, num_heads=4, num_kv_heads=1, max_length=6
    )
    encoder = TransformerEncoder(5, config=config, rngs=nnx.Rngs(params=0))
    layer = encoder.blocks[0].attention
    assert nnx.state(layer)["key"]["kernel"].shape == (8, 2)
