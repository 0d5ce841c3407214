"""Luna beyond the common tests: its causal form, its memory, what does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lra_jax import attention
from lra_jax.models import MultiHeadAttention, TransformerEncoder

from .. import dense
from ..mechanisms import MASK, Case, assert_close, fast_jit, inputs, keywords


def memory(heads: int, head_dim: int) -> np.ndarray:
    rng = np.random.default_rng(head_dim)
    return rng.normal(size=(1, 3, heads, head_dim)).astype("float32")


def formula(q, k, v, mask=None, causal=False, *, memory) -> np.ndarray:
    """Packed by the memory and unpacked; causal by means over what was seen."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    scale = q.shape[-1] ** -0.5
    for (b, n), queries, keys, values, real in dense.samples(q, k, v, mask):
        slots = np.asarray(memory, np.float64)[b % len(memory), :, n]
        where = np.flatnonzero(real)
        scores = slots @ keys[where].T * scale
        if not causal:
            if where.size:
                packed = dense.row_softmax(scores)
                unpack = dense.row_softmax(queries @ (packed @ keys[where]).T * scale)
                out[b, :, n] = unpack @ packed @ values[where]
            continue
        pack = np.where(scores > 0, scores + 1, np.exp(np.minimum(scores, 0)))
        for i, x in enumerate(queries):
            seen = where <= i
            if seen.any():
                past = pack[:, seen] / seen.sum()
                unpack = dense.row_softmax(past @ keys[where[seen]] @ x * scale)
                out[b, i, n] = unpack @ past @ values[where[seen]]
    return out


CASE = Case(
    formula,
    lambda heads, head_dim: {"memory": memory(heads, head_dim)},
    mean=True,
    unordered=("query", "key"),
    largest=1e12,  # Its causal scores are products of three inputs.
)


def test_what_is_packed() -> None:
    q, k, v = inputs(3)
    memory = keywords("luna", 2, 4)["memory"]
    out, packed = attention.luna_packed(q, k, v, memory, MASK[:2])
    assert_close(out, attention.luna_attention(q, k, v, memory, MASK[:2]), 1e-6)
    slots = np.broadcast_to(memory, (2, *memory.shape[1:]))
    assert_close(packed, attention.softmax_attention(slots, k, v, MASK[:2]))


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 3, 2, 4), (1, 0, 2, 4), (1, 3, 2, 3)])
def test_memories_that_do_not_fit(shape) -> None:
    with pytest.raises(ValueError, match=r"memory: expected \[B, L, N, H\]"):
        attention.luna_attention(*inputs(4), np.ones(shape, "float32"))
    with pytest.raises(ValueError, match="got None; luna_parameters makes one"):
        attention.luna_attention(*inputs(4))
    with pytest.raises(ValueError, match="slots: expected a positive int, got 0"):
        attention.luna_parameters(jax.random.key(0), num_heads=1, head_dim=1, slots=0)


def encoder() -> TransformerEncoder:
    return TransformerEncoder(
        11,
        num_layers=3,
        embed_dim=8,
        mlp_dim=8,
        max_length=16,
        mechanism="luna",
        attention_options={"slots": 3},
        rngs=nnx.Rngs(0),
    )


def test_the_memory_goes_from_layer_to_layer() -> None:
    model = encoder()
    layers = [block.attention for block in model.blocks]
    made = [(x.memory_in is None, x.memory_out is None) for x in layers]
    assert made == [(True, False), (False, False), (False, True)]
    tokens = np.random.default_rng(0).integers(1, 11, (2, 7))
    mask = np.array([[1] * 7, [1] * 4 + [0] * 3], bool)
    graph, state = nnx.split(model)

    @fast_jit
    def both(state, tokens, mask):
        def loss(state):
            out = nnx.merge(graph, state)(tokens, mask)
            return jnp.sin(out[:, :4]).sum(), out

        return jax.grad(loss, has_aux=True)(state)

    gradients, out = both(state, tokens, mask)
    for gradient in jax.tree.leaves(gradients["blocks"]):
        assert np.asarray(gradient).any(), "no array without a use"
    short = np.where(mask, tokens, 3)
    np.testing.assert_array_equal(out[1, :4], both(state, short, mask)[1][1, :4])


def test_causal_layers_carry_no_memory() -> None:
    layer = MultiHeadAttention(
        2, 8, mechanism="luna", is_causal=True, layer=1, num_layers=3, rngs=nnx.Rngs(0)
    )
    assert layer.memory_in is layer.memory_out is None
    x = jnp.ones((1, 5, 8))
    assert layer.attend(x, memory=x)[1] is x
