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

from ..mechanisms import STREAMS, assert_close, fast_jit, gates, keywords

LENGTH, HEADS, WIDTH = 16, 2, 8
MASK = np.arange(LENGTH)[None] < np.array([16, 9])[:, None]
DOCUMENTS = np.array([[1] * 8 + [2] * 8, [1] * 5 + [2] * 6 + [0] * 5])
FORMS = [
    (name, is_causal)
    for name, one in MECHANISMS.items()
    for is_causal in ([False, True] if one.causal else [False])
    # As linear attention, RetNet and the gated delta rule.
    if name not in ("norm", "lightning", "delta")
]

# An operation that does not know how its result is split is refused when it is traced,
# so most are only traced. These run: caches, scans, sums over all keys, a memory.
COMPUTED = [("softmax", True), ("cosformer", True), ("flow", False), ("luna", True)]
COMPUTED_STREAMS = ("softmax", "gla")


def _assert_same(call: Any, *arrays: Any, computed: bool, auto: bool = False) -> None:
    """The results on two devices are those on one.

    If ``auto``, on axes of the other kind, too: a run of the trainer has these.
    """
    expected = fast_jit(call)(*arrays) if computed else None
    for kind in (AxisType.Explicit, AxisType.Auto)[: 1 + auto]:
        devices = jax.devices()[:2]
        mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,), devices=devices)
        place = NamedSharding(mesh, jax.P("data"))
        with jax.set_mesh(mesh):
            split = [jax.device_put(x, place) for x in arrays]
            if computed:
                assert_close(fast_jit(call)(*split), expected, 1e-4)
                continue
            for out in jax.tree.leaves(jax.eval_shape(call, *split)):
                assert out.sharding.spec[0] == "data"


@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_layers(name: str, is_causal: bool) -> None:
    """Outputs with padding and of packed rows, and the gradients of both.

    Of two forms, the full one has the gradient with padding, the causal that of rows.
    """
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
        def loss(x):
            layer = nnx.merge(graph, state)
            to_pad = jax.lax.stop_gradient(x) if is_causal else x
            causal_too = MECHANISMS[name].causal and not is_causal
            to_pack = jax.lax.stop_gradient(x) if causal_too else x
            padded = jnp.where(mask[..., None], layer(to_pad, mask=mask), 0)
            packed = layer(to_pack, segment_ids=documents)
            packed = jnp.where((documents > 0)[..., None], packed, 0)
            return (padded - 2 * packed).sum(), (padded, packed)

        return jax.grad(loss, has_aux=True)(x)

    x = np.random.default_rng(0).normal(size=(2, LENGTH, HEADS * WIDTH))
    _assert_same(
        call,
        *(x.astype("float32"), MASK, DOCUMENTS),
        computed=(name, is_causal) in COMPUTED,
        auto=(name, is_causal) == ("cosformer", True),
    )


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

    _assert_same(call, *arrays, computed=name in COMPUTED_STREAMS)
