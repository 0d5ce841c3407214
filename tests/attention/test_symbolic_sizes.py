"""``jax.export`` with a batch whose size is a symbol."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import models
from lra_jax.attention import MECHANISMS

from .mechanisms import LENGTH, assert_close, fast_jit

HEADS, WIDTH = 2, 4
# Mechanisms whose values are compared, too; both of their forms.
COMPARED = ("softmax", "linear", "flow", "hgrn")
FORMS = [(name, one.causal) for name, one in MECHANISMS.items()]
# As linear attention, RetNet and the gated delta rule.
FORMS = [x for x in FORMS if x[0] not in ("norm", "lightning", "delta")]
FORMS += [(name, False) for name in COMPARED]


@pytest.mark.parametrize(("name", "is_causal"), FORMS)
def test_export(name: str, is_causal: bool) -> None:
    """A layer, padded and packed; the batch that it is called with is another one.

    A size that may not be a symbol is refused when the layer is exported.
    """
    layer = models.MultiHeadAttention(
        num_heads=HEADS,
        in_features=HEADS * WIDTH,
        mechanism=name,
        max_length=LENGTH,
        is_causal=is_causal,
        rngs=nnx.Rngs(0),
    )

    def call(x, mask, documents):
        packed = layer(x, segment_ids=documents)
        return (
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
    assert [x.shape for x in exported.out_avals] == [(batch, *x.shape[1:])] * 2
    if name not in COMPARED:
        return
    direct = fast_jit(call)(*arrays)
    out = fast_jit(exported.call)(*(a[:2] for a in arrays))
    assert_close(list(out), [a[:2] for a in direct], 1e-4)
