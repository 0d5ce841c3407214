"""Gated linear attention (Yang et al. 2024, "Gated Linear Attention Transformers with
Hardware-Efficient Training").

``S_t = diag(a_t) S_(t-1) + k_t v_t^T``, ``out_t = g_t * norm(S_t^T q_t)`` with a decay
a_t in (0, 1) for each column of the keys, computed from the input. In a model it is
``a_t = sigmoid(W_2 W_1 x_t + b)^(1/16)`` with 16 columns between the two matrices, and
the gate is ``g_t = silu(W_g x_t + b_g)``, as in the paper. Each head of a position is
normalised separately.

Cost: O(T (C + Hv) H) time for chunks of C = 16 positions, twice that without
``is_causal``, and O(T H) memory; a stream holds one state `[H, Hv]` per head. For how
chunks are computed, the form without ``is_causal``, and why nothing is divided by a
vanishing decay see `lra_jax.attention.recurrent.recurrence`.

Deviations: the norm has no learned gain (the output projection can absorb it), and is
"rms" as in the authors' code (fla-org/flash-linear-attention), not "layer" as in the
paper; no 1 / sqrt(H), which the norm would cancel. Padding is exact: a hidden position
neither adds to the state nor makes it decay.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import documents, engine, fades
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import hide_pairs, prefix
from lra_jax.attention.recurrent import recurrence

__all__ = [
    "GlaState",
    "gla_attention",
    "gla_init",
    "gla_prefill",
    "gla_step",
    "gla_weights",
]


class GlaState(recurrence.RecurrentState):
    """Everything that the next position needs from the earlier ones."""


def _run(
    call: Call,
    *,
    log_decay: jax.Array | None,
    gate: jax.Array | None,
    **of_output: Any,
) -> tuple[jax.Array, GlaState]:
    inputs.refuse_without_gates(call.deterministic, "gla", log_decay, gate)
    inputs.check_self(call.query, call.key, "gla")
    width = call.query.shape[3]
    recurrence.check_gate("log_decay", log_decay, call.query, width)
    options = feature_maps.Options("identity", call.dtype, call.precision)
    return recurrence.run(
        call,
        engine.Form(_prepare, _segment, options),
        GlaState,
        log_decay=log_decay,
        gate=gate,
        mechanism="gla",
        # Short chunks, because pairs are computed for each column separately.
        chunking=engine.Chunking(chunk=16),
        **of_output,
    )


@attention_of(_run)
def gla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    gate: jax.Array | None = None,
    norm: str | None = "rms",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes gated linear attention.

    Args:
      query, key, value, mask, segment_ids: as in `linear_attention`.
      is_causal: position i sees keys 0..i only; otherwise the recurrence runs from both
        ends.
      log_decay: log(a), not positive, `[B, T, N, H]`; its heads may be a divisor of N.
        None = no decay.
      gate: g, `[B, T, N, Hv]`; None = 1.
      norm: "rms" or "layer", of each head of a position; None = no norm.
      eps: of the norm.
      chunking: how the sequence is cut; None = chunks of 16. They should be short:
        every distance within a chunk is a step of the program.
      implementation: "xla", "native" (`lra_jax.kernels`, on CPUs) or "auto": the
        kernels if the default device is a CPU, the inputs are float32, chunking is
        None and the call is large enough (docs/kernels.md). The kernels have first
        derivatives only.
      deterministic: from Flax's layers, which are refused unless they pass gates.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; states are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, or query and key
        differ in length.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> logits = jax.random.normal(jax.random.key(1), key.shape)
      >>> log_decay = jax.nn.log_sigmoid(logits)
      >>> gla_attention(query, key, value, is_causal=True, log_decay=log_decay).shape
      (2, 64, 4, 16)
    """
    ...


gla_weights = dense.weights_of(
    gla_attention,
    "It leaves out the norm and the gate; entries may be negative.",
    without=("gate",),
    fixed={"norm": None},
)
gla_prefill = streams.make_prefill(gla_attention, _run, GlaState)
gla_init = streams.make_init(gla_prefill)
gla_step = streams.make_step(gla_prefill, "log_decay", "gate")


def _prepare(
    options: feature_maps.Options, arrays: engine.Arrays, tables: engine.Tables
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query, key, value and log(a), heads first, zero where hidden."""
    heads, dtype = arrays.query.shape[2], options.dtype
    query = masking.by_head(arrays.query, heads, dtype=dtype)
    key, value = (
        masking.by_head(x, heads, tables.mask, dtype)
        for x in (arrays.key, arrays.value)
    )
    if arrays.log_decay is None:
        fade = jnp.zeros_like(key)
    else:
        fade = masking.by_head(arrays.log_decay, heads, tables.mask, dtype)
    return query, key, value, fades.bound(fade)


def _segment(
    options: feature_maps.Options,
    state: recurrence.Memory,
    features: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    _: None,
    rows: Documents | None,
) -> tuple[jax.Array, recurrence.Memory]:
    """One segment, see `engine.Form`."""
    query, key, value, log_decay = features
    product = functools.partial(jnp.einsum, precision=options.precision)
    scores, key = _within(query, key, log_decay)
    scores = hide_pairs(scores, documents.visible(scores.shape[-1], rows))
    key = documents.stayers(key, rows)
    updates = recurrence.Memory(product("bnpjm,bnpjv->bnpmv", key, value))
    fade = jnp.cumsum(log_decay, 3)
    passed = documents.decay(fade[..., -1, :], rows, key.dtype)
    before, after = prefix(state, updates, passed)
    out = product("bnpij,bnpjv->bnpiv", scores, value)
    query = documents.readers(query * jnp.exp(fade), rows)
    return out + product("bnpim,bnpmv->bnpiv", query, before.summary), after


def _within(
    query: jax.Array, key: jax.Array, log_decay: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores of a chunk's pairs, and its keys as they are at its end.

    ``s_ij = sum_m q_im k_jm prod_(j < l <= i) a_lm``, one distance ``i - j`` after the
    other: with each, a key decays by one more factor. So no pair needs an exponential,
    only each position, and nothing is divided or subtracted. A matrix product of
    ``q_i prod_(l <= i) a_l`` and ``k_j / prod_(l <= j) a_l`` would overflow.

    Args:
      query, key, log_decay: `[B, N, P, C, H]`.

    Returns:
      The scores `[B, N, P, C, C]`, of keys before or at a query, and the keys.
    """
    size, factors = key.shape[3], jnp.exp(log_decay)
    lines, ends = [], []
    for distance in range(size):
        if distance:  # The key that would leave the chunk is dropped.
            key = key[..., :-1, :] * factors[..., distance:, :]
        line = (query[..., distance:, :] * key).sum(-1)
        lines.append(jnp.pad(line, [(0, 0)] * 3 + [(0, distance)]))
        ends.append(key[..., -1:, :])
    # From [key, distance] to [key, query]: with one more column, row j moves by j.
    by_distance = jnp.pad(jnp.stack(lines, -1), [(0, 0)] * 4 + [(0, 1)])
    flat = by_distance.reshape(*by_distance.shape[:3], -1)[..., : size * size]
    scores = jnp.swapaxes(flat.reshape(*flat.shape[:3], size, size), 3, 4)
    return scores, jnp.concatenate(ends[::-1], 3)
