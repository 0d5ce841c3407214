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
    inputs.check_keywords(luna_attention, flax)
    inputs.check_inputs(query, key, value, is_causal)
    if not is_causal:
        out, _unused = luna_packed(query, key, value, memory, mask, precision=precision)
        return out
    whole, rows, keys, values, slots, mask = _prepare(query, key, value, memory, mask)
    out = _causal(rows, keys, values, slots, mask, chunking, precision)
    out = jnp.swapaxes(out, 1, 2).astype(query.dtype)
    return masking.broken_again(out, whole)


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
    inputs.check_inputs(query, key, value)
    whole, rows, keys, values, slots, mask = _prepare(query, key, value, memory, mask)
    keys, values = _packed(keys, values, slots, mask, precision)
    weights = feature_maps.softmax(feature_maps.products(rows, keys, precision), -1)
    out = jnp.matmul(weights, values, precision=precision)
    out, values = (jnp.swapaxes(x, 1, 2).astype(query.dtype) for x in (out, values))
    return masking.broken_again(out, whole), values


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


_REASON = "Luna packs the keys once for all queries"


def _prepare(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    memory: jax.Array | None,
    mask: jax.Array | None,
) -> tuple[
    jax.Array | None, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None
]:
    """The unbroken rows; query, key, value and memory, heads first; the mask.

    Query and memory are divided by sqrt(H).
    """
    batch, _, heads, width = query.shape
    memory = inputs.check_array(
        "memory",
        memory,
        "B L N H",
        {1, batch},
        None,
        heads,
        width,
        source="luna_parameters",
    )
    if memory.shape[1] == 0:
        raise expected("memory", "[B, L, N, H] with L > 0", memory.shape)
    mask = masking.padding_mask(mask, batch, key.shape[1], reason=_REASON)
    dtype = inputs.accumulation_dtype(query, key, value)
    scale = 1 / math.sqrt(width)
    # Cast first, so that the gradient is summed over the batch in this dtype.
    # The zeros have the batch, and its split over devices.
    memory = memory.astype(dtype) + jnp.zeros_like(query[:, :1], dtype)
    query, whole = masking.hide_broken(query, mask)
    query, memory = (
        masking.by_head(x, heads, dtype=dtype) * scale for x in (query, memory)
    )
    key, value = (masking.by_head(x, heads, mask, dtype) for x in (key, value))
    return whole, query, key, value, memory, mask


def _packed(
    key: jax.Array,
    value: jax.Array,
    memory: jax.Array,
    mask: jax.Array | None,
    precision: jax.lax.PrecisionLike,
) -> tuple[jax.Array, jax.Array]:
    """A k and A v, `[B, N, L, ...]`."""
    scores = feature_maps.products(memory, key, precision)
    visible = None if mask is None else mask[:, None, None]
    weights = feature_maps.masked_softmax(scores, visible)
    keys, values = (jnp.matmul(weights, x, precision=precision) for x in (key, value))
    return keys, values


def _causal(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    memory: jax.Array,
    mask: jax.Array | None,
    chunking: engine.Chunking | None,
    precision: jax.lax.PrecisionLike,
) -> jax.Array:
    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        call = Call(
            query=query,
            key=key,
            value=value,
            is_causal=True,
            dtype=query.dtype,
            chunking=chunking,
            precision=precision,
            implementation="xla",
        )
        return jnp.swapaxes(core.attend(call, core.Kernel(), "luna")[0], 1, 2)

    phi = feature_maps.feature_map("elu")
    pack = masking.hide_by_head(
        phi(feature_maps.products(key, memory, precision)), mask
    )
    length = key.shape[2]
    seen = jnp.ones((1, length), bool) if mask is None else mask
    counts = feature_maps.at_least(jnp.cumsum(seen, 1, dtype=query.dtype), 1.0)
    counts = counts[:, None, :, None]
    scores = run(query, key, pack) / counts
    return run(feature_maps.softmax(scores, -1), pack, value) / counts
