"""Luna (Ma et al. 2021, "Luna: Linear Unified Nested Attention").

A memory of L vectors p packs the keys and values, and the queries unpack them:

``A = softmax(p k^T / sqrt(H))``, ``out = softmax(q (A k)^T / sqrt(H)) A v``,

where both softmaxes run over rows. The packed values also form the next layer's memory:
in a model ``p = m + W_p c``, where m are the layer's own learned vectors and c is the
memory passed between layers, ``c <- norm(c + W_o A v)``; the first layer has no c.

Causal, as the paper defines it: a softmax over later keys would see the future, so
``a_j = elu(p k_j / sqrt(H)) + 1`` replaces it, and means over the past replace the
two products with A: ``u_i = softmax(q_i / sqrt(H) sum_(j <= i) k_j a_j^T / n_i)`` and
``out_i = u_i sum_(j <= i) a_j v_j^T / n_i``, with n_i the number of keys seen. The
memory is not passed on, since all of it sees the last position.

Cost: O((T + S) L (H + Hv)) time, O((T + S) L) memory; L = 16, 128 and 256 in the paper.

Deviations: the packed keys are mixtures of the layer's keys, whereas the paper projects
the packed values once more; each layer has its own learned vectors in addition to the
memory passed on.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, feature_maps, inputs, masking
from lra_jax.attention.call import Call
from lra_jax.attention.causal import engine
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.linear import core
from lra_jax.errors import expected

__all__ = ["luna_attention", "luna_packed", "luna_parameters", "luna_weights"]


@documents_in_turn
def luna_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    memory: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes attention that packs keys and values by a memory and unpacks them.

    Args:
      query, key, value: as in `linear_attention`.
      memory: p, `[1 or B, L, N, H]`.
      mask: as in `linear_attention`.
      is_causal: position i sees keys 0..i only; needs T == S.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      chunking, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; sums are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the memory or the mask do not fit.
    """
    call = Call.of(
        query, key, value, mask, is_causal, chunking=chunking, precision=precision
    )
    return _causal(call, memory) if is_causal else _attend(call, memory)[0]


def luna_packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    memory: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> tuple[jax.Array, jax.Array]:
    """Non-causal `luna_attention`, and the packed values A v.

    Returns:
      `[B, T, N, Hv]` and `[B, L, N, Hv]`, in the query's dtype.
    """
    inputs.check_keywords(luna_packed, flax)
    return _attend(Call.of(query, key, value, mask, precision=precision), memory)


luna_weights = dense.weights_of(
    luna_attention,
    "No entry is negative. Rows sum to one, except in the causal form.",
)


def luna_parameters(
    rng_key: jax.Array,
    *,
    num_heads: int,
    head_dim: int,
    slots: int = 16,
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the array that `luna_attention` takes as a keyword.

    Args:
      rng_key: a key of ``jax.random``.
      num_heads: N.
      head_dim: H.
      slots: L.
      dtype: of the array.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      ``memory`` `[1, L, N, H]`, standard normal.

    Raises:
      ValueError: a size is not a positive int.
    """
    inputs.check_sizes(luna_parameters, sizes)
    count = inputs.check_size("slots", slots)
    heads = inputs.check_size("num_heads", num_heads)
    shape = 1, count, heads, inputs.check_size("head_dim", head_dim)
    return {"memory": jax.random.normal(rng_key, shape, dtype)}


def _prepare(
    call: Call, memory: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query, key, value and memory, heads first; query and memory over sqrt(H)."""
    batch, _, heads, width = call.query.shape
    sizes, source = ({1, batch}, None, heads, width), "luna_parameters"
    memory = inputs.check_array("memory", memory, "B L N H", *sizes, source=source)
    if memory.shape[1] == 0:
        raise expected("memory", "[B, L, N, H] with L > 0", memory.shape)
    # Cast first, so that the gradient is summed over the batch in this dtype.
    # The zeros have the batch, and its split over devices.
    memory = memory.astype(call.dtype) + jnp.zeros_like(call.query[:, :1], call.dtype)
    query, key, value = call.by_head(call.dtype)
    scale = 1 / math.sqrt(width)
    return query * scale, key, value, jnp.swapaxes(memory, 1, 2) * scale


def _attend(call: Call, memory: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`luna_packed`."""
    query, key, value, memory = _prepare(call, memory)
    product = functools.partial(jnp.matmul, precision=call.precision)
    scores = feature_maps.products(memory, key, call.precision)
    visible = None if call.mask is None else call.mask[:, None, None]
    weights = feature_maps.masked_softmax(scores, visible)
    keys, values = (product(weights, x) for x in (key, value))
    scores = feature_maps.products(query, keys, call.precision)
    out = jnp.swapaxes(product(feature_maps.softmax(scores, -1), values), 1, 2)
    return call.finish(out), jnp.swapaxes(values, 1, 2).astype(call.out_dtype)


def _causal(call: Call, memory: jax.Array | None) -> jax.Array:
    query, key, value, memory = _prepare(call, memory)

    def run(*arrays: jax.Array) -> jax.Array:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in arrays)
        inner = call.replace(query=query, key=key, value=value, mask=None)
        inner = inner.replace(implementation="xla")
        return jnp.swapaxes(core.attend(inner, core.Kernel(), "luna")[0], 1, 2)

    phi = feature_maps.feature_map("elu")
    pack = phi(feature_maps.products(key, memory, call.precision))
    pack = masking.hide_by_head(pack, call.mask)
    seen = jnp.ones((1, key.shape[2]), bool) if call.mask is None else call.mask
    counts = feature_maps.at_least(jnp.cumsum(seen, 1, dtype=query.dtype), 1.0)
    counts = counts[:, None, :, None]
    scores = run(query, key, pack) / counts
    out = run(feature_maps.softmax(scores, -1), pack, value) / counts
    return call.finish(jnp.swapaxes(out, 1, 2))
