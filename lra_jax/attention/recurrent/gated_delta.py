"""Gated DeltaNet (Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta
Rule"), and under it DeltaNet (`lra_jax.attention.recurrent.delta`).

``S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T`` and
``out_t = g_t * norm(S_t^T q_t)``: what the state holds under k_t is replaced, by a
share b_t in (0, 1), by v_t, and fades. Queries and keys go through ``phi(x) = silu(x)``
and have length one. In a model ``b_t = sigmoid(w x_t + c)``,
``a_t = exp(-softplus(w' x_t + c'))`` is one number a head, and
``g_t = silu(W_g x_t + c_g)``. The norm takes each head of a position by itself.

Cost: O(T (C (H + Hv) + H Hv)) time for chunks of C = 64 positions in the WY form, twice
that without ``is_causal``, and O(T H) memory; a stream holds one state `[H, Hv]` for
each head. The chunked form and what it is without ``is_causal``:
`lra_jax.attention.recurrent.recurrence`.

Deviations: no short convolutions before the activations; the norm has no learned gain
(the output projection can hold it); no 1 / sqrt(H), which the norm would take away; the
decay has no factor of its own for each head beside w' and c'. Padding is exact: a
hidden position changes nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import sums as causal
from lra_jax.attention.recurrent import recurrence
from lra_jax.attention.recurrent import stream as recurrent_stream
from lra_jax.attention.registry import Gate, Mechanism

__all__ = [
    "GatedDeltaState",
    "gated_delta_attention",
    "gated_delta_init",
    "gated_delta_prefill",
    "gated_delta_step",
    "gated_delta_weights",
]

MECHANISM = Mechanism(
    name="gated_delta",
    causal=True,
    cross=False,
    stream=True,
    cost="2 T (64 + H) H",
    summary="the delta rule with a decay and an output gate (Gated DeltaNet)",
    source="Yang et al. 2025",
    gates=(
        Gate("beta", width="one", activation="sigmoid"),
        Gate("log_decay", width="one", activation="softplus_decay", bias=-3.0),
        Gate("gate", of="query", width="value", activation="silu"),
    ),
)


GatedDeltaState = recurrent_stream.RecurrentState


def gated_delta_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    beta: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    gate: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "silu",
    norm: str | None = "rms",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes the gated delta rule.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, T, N, H]`; its heads may be a divisor of N.
      value: `[B, T, N, Hv]`.
      mask: boolean, True = may be attended: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`.
      is_causal: position i sees keys 0..i only; otherwise the recurrence runs from both
        ends.
      beta: b, in (0, 1), `[B, T, N]`; its heads may be a divisor of N. None = 1.
      log_decay: log(a), not positive, likewise. None = no decay.
      gate: g, `[B, T, N, Hv]`; None = 1.
      feature_map: phi, by name or as a function with phi(0) = 0.
      norm: "rms" or "layer", of each head of a position; None leaves the sum.
      eps: of the norm.
      chunking: how the sequence is cut; None = by the backend.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; states are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, or query and key
        differ in length.
    """
    inputs.check_inputs(query, key, value, is_causal)
    options = (beta, log_decay, gate, feature_map, norm, eps, chunking, precision)
    return _run(query, key, value, mask, is_causal, None, *options)[0]


def gated_delta_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    beta: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "silu",
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, T]` before norm and gate, of either sign.

    float32 or wider. Arguments and errors are those of `gated_delta_attention`.
    """
    inputs.check_inputs(query, key, None, is_causal)
    # The sum is linear in the values: on unit vectors it is the matrix itself.
    units = inputs.unit_values(query, key)
    options = (beta, log_decay, None, feature_map, None, 0.0, None, precision)
    arrays = (query.astype(units.dtype), key, units)
    return jnp.swapaxes(_run(*arrays, mask, is_causal, None, *options)[0], 1, 2)


gated_delta_init = recurrent_stream.recurrent_init


def gated_delta_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    state: GatedDeltaState | None = None,
    beta: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    gate: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "silu",
    norm: str | None = "rms",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, GatedDeltaState]:
    """Takes a whole prompt, or a further part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, mask and options as in `gated_delta_attention`.
      state: what came before; None = nothing.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position.

    Raises:
      ValueError: shapes, dtypes, the mask, an option or the state do not fit.
    """
    inputs.check_inputs(query, key, value, True)
    options = (beta, log_decay, gate, feature_map, norm, eps, chunking, precision)
    start = None if state is None else state.sums
    out, sums = _run(query, key, value, mask, True, start, *options)
    return out, GatedDeltaState(sums, recurrent_stream.moved(state, query, mask))


def gated_delta_step(
    state: GatedDeltaState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    beta: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    gate: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, GatedDeltaState]:
    """Takes one position of each sample; arrays `[B, N, H]` -> `[B, N, Hv]`.

    Options and errors are those of `gated_delta_prefill`, gates without the axis T.
    """
    arrays = inputs.one_position(query, key, value)
    more = recurrent_stream.one_gate(beta=beta, log_decay=log_decay, gate=gate)
    out, state = gated_delta_prefill(*arrays, state=state, **more, **options)
    return out[:, 0], state


def _run(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    start: recurrence.Memory | None,
    beta: jax.Array | None,
    log_decay: jax.Array | None,
    gate: jax.Array | None,
    feature_map: feature_maps.FeatureMap,
    norm: str | None,
    eps: float,
    chunking: causal.Chunking | None,
    precision: jax.lax.PrecisionLike,
) -> tuple[jax.Array, recurrence.Memory]:
    inputs.check_self(query, key, "delta-rule")
    feature_maps.check_norm(norm)
    mask = inputs.padding_mask(mask, query.shape[0], query.shape[1])
    heads, dtype = query.shape[2], recurrence.dtype_of(start, query, key, value)
    phi = feature_maps.feature_map(feature_map)
    sizes = (None, heads, mask, dtype)
    share = recurrence.gate_by_head("beta", beta, query, *sizes)
    key = _unit(inputs.hide_by_head(phi(inputs.by_head(key, heads, mask, dtype)), mask))
    arrays = recurrence.Arrays(
        _unit(phi(inputs.by_head(query, heads, dtype=dtype))),
        key,
        inputs.by_head(value, heads, mask, dtype),
        recurrence.gate_by_head("log_decay", log_decay, query, *sizes),
        jnp.ones_like(key[..., 0]) if share is None else share,
    )
    block = recurrence.DeltaBlock
    options = (is_causal, start, chunking, precision)
    out, state = recurrence.recur(block, arrays, *options)
    return recurrence.finished(out, gate, norm, eps, query), state


def _unit(x: jax.Array) -> jax.Array:
    """Columns of length one; zeros stay zero, with a finite gradient."""
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
