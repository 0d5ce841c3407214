"""A batch split over a mesh with explicit axes, as ``jax.make_mesh`` makes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from lra_jax import attention, models
from lra_jax.attention import MECHANISMS

from ..mechanisms import STREAMS, assert_close, gates, keywords

LENGTH, HEADS, WIDTH = 16, 2, 8
MASK = np.arange(LENGTH)[None] < np.array([16, 9])[:, None]
DOCUMENTS = np.array([[1] * 8 + [2] * 8, [1] * 5 + [2] * 6 + [0] * 5])
FORMS = [
    (name, is_causal)
    for name, one in MECHANISMS.items()
    for is_causal in ([False, True] if one.causal else [False])
]


def _on_mesh(call: Any, kind: AxisType, *arrays: Any) -> Any:
    """The results on two devices and on one."""
    wanted = jax.jit(call)(*arrays)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, jax.P("data"))
        return jax.jit(call)(*(jax.device_put(x, place) for x in arrays)), wanted


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_layers(name: str, is_causal: bool, kind: AxisType) -> None:
    """Output and gradients with padding, and the output of packed rows."""
    layer = models.MultiHeadAttention(
        num_heads=HEADS,
        in_features=HEADS * WIDTH,
        mechanism=name,
        max_length=LENGTH,
        is_causal=is_causal,
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(layer)

    def call(x, mask, documents):
        def padded(x):
            out = nnx.merge(graph, state)(x, mask=mask)
            out = jnp.where(mask[..., None], out, 0)
            return out.sum(), out

        slope, out = jax.grad(padded, has_aux=True)(x)
        packed = nnx.merge(graph, state)(x, segment_ids=documents)
        return out, slope, jnp.where((documents > 0)[..., None], packed, 0)

    x = np.random.default_rng(0).normal(size=(2, LENGTH, HEADS * WIDTH))
    assert_close(*_on_mesh(call, kind, x.astype("float32"), MASK, DOCUMENTS), 1e-4)


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name: str) -> None:
    rng = np.random.default_rng(1)
    shape = (2, LENGTH, HEADS, WIDTH)
    arrays = rng.normal(size=(3, *shape)).astype("float32")
    prefill, step = (
        getattr(attention, f"{name}_{part}") for part in ("prefill", "step")
    )
    more = keywords(name, HEADS, WIDTH)

    def call(query, key, value):
        first = [x[:, :-1] for x in (query, key, value)]
        last = [x[:, -1] for x in (query, key, value)]
        options = dict(more)
        if name in ("cosformer", "softmax"):
            options["max_length"] = LENGTH
        out, state = prefill(*first, **options, **gates(name, first[1]))
        options = {x: y for x, y in options.items() if x != "max_length"}
        return out, step(state, *last, **options, **gates(name, last[1]))[0]

    assert_close(*_on_mesh(call, AxisType.Explicit, *arrays), 1e-4)


def test_embeddings() -> None:
    model = models.SequenceClassifier(
        vocab_size=17, num_classes=3, max_length=LENGTH, rngs=nnx.Rngs(0)
    )
    graph, state = nnx.split(model)

    def call(tokens):
        def loss(state):
            return jnp.square(nnx.merge(graph, state)(tokens)).sum()

        return jax.grad(loss, allow_int=True)(state)

    tokens = np.random.default_rng(0).integers(1, 17, (2, LENGTH))
    found, wanted = _on_mesh(call, AxisType.Explicit, tokens.astype("int32"))
    floats = [
        (one, two)
        for one, two in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
        if jnp.issubdtype(one.dtype, jnp.floating)
    ]
    assert_close(*zip(*floats, strict=True), 1e-4)
