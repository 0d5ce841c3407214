"""``jax.export`` with a batch whose size is a symbol."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import models
from lra_jax.attention import MECHANISMS

from .mechanisms import LENGTH, assert_close, fast_jit, run

HEADS, WIDTH = 2, 4
FORMS = [
    (name, is_causal)
    for name, one in MECHANISMS.items()
    for is_causal in ([False, True] if one.causal else [False])
]


@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_export(name: str, is_causal: bool) -> None:
    """Function and layer, padded and packed, for batches of 2 and of 3."""
    layer = models.MultiHeadAttention(
        num_heads=HEADS,
        in_features=HEADS * WIDTH,
        mechanism=name,
        max_length=LENGTH,
        is_causal=is_causal,
        rngs=nnx.Rngs(0),
    )
    form = {"is_causal": True} if is_causal else {}

    def call(x, mask, documents):
        heads = x.reshape(x.shape[0], LENGTH, HEADS, WIDTH)
        packed = layer(x, segment_ids=documents)
        return (
            run(name)(heads, heads, heads, **form),
            jnp.where(mask[..., None], layer(x, mask=mask), 0),
            jnp.where((documents > 0)[..., None], packed, 0),
        )

    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, LENGTH, HEADS * WIDTH)).astype("float32")
    mask = np.arange(LENGTH) < np.array([[16], [9], [1]])
    documents = np.sort(rng.integers(0, 3, (3, LENGTH)))[:, ::-1]
    arrays = x, mask, documents.astype("int32")
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *a.shape[1:]), a.dtype) for a in arrays]
    exported = jax.export.export(jax.jit(call))(*shapes)
    direct = fast_jit(call)(*arrays)
    for size in (2, 3):
        out = fast_jit(exported.call)(*(a[:size] for a in arrays))
        assert_close(list(out), [a[:size] for a in direct], 1e-4)
