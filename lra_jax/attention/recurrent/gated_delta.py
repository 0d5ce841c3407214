"""Gated DeltaNet (Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta
Rule"), also the basis of DeltaNet (`lra_jax.attention.recurrent.delta`).

``S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T`` and
``out_t = g_t * norm(S_t^T q_t)``: the state decays, and a share b_t in (0, 1) of the
value stored under k_t is replaced by v_t. Queries and keys go through
``phi(x) = silu(x)`` and are normalised to length one. In a model
``b_t = sigmoid(w x_t + c)``, ``a_t = exp(-softplus(w' x_t + c'))`` is one number per
head, and ``g_t = silu(W_g x_t + c_g)``. Each head of a position is normalised
separately.

Cost: O(T (C (H + Hv) + H Hv)) time for chunks of C = 64 positions in the WY form, twice
that without ``is_causal``, and O(T H) memory; a stream holds one state `[H, Hv]` per
head. For the form without ``is_causal`` see `lra_jax.attention.recurrent.recurrence`.

``beta_range=2`` doubles the share, so that the factor of the state has eigenvalues
1 - 2 b in (-1, 1) instead of (0, 1): the value stored under a key can be negated, not
only forgotten, as parity and other state tracking require (Grazzi et al. 2024,
"Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues",
arXiv:2411.12537).

Deviations: no short convolutions before the activations; the norm has no learned gain
(the output projection can absorb it); no 1 / sqrt(H), which the norm would cancel; the
decay has no per-head factor in addition to w' and c'. Padding is exact: a hidden
position changes nothing.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import documents, engine, fades
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import exp_visible, so_far
from lra_jax.attention.recurrent import recurrence
from lra_jax.errors import expected

__all__ = [
    "GatedDeltaState",
    "gated_delta_attention",
    "gated_delta_init",
    "gated_delta_prefill",
    "gated_delta_step",
    "gated_delta_weights",
]


class GatedDeltaState(recurrence.RecurrentState):
    """Everything that the next position needs from the earlier ones."""


# Added to the squares of queries and keys, whose length becomes one.
_EPS = 1e-6


def run(
    call: Call,
    *,
    beta: jax.Array | None,
    beta_range: float,
    log_decay: jax.Array | None = None,
    gate: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap,
    mechanism: str = "gated_delta",
    kind: type[recurrence.RecurrentState] = GatedDeltaState,
    **of_output: Any,
) -> tuple[jax.Array, Any]:
    """The rule with and without decay and gate."""
    inputs.refuse_without_gates(call.deterministic, mechanism, beta, log_decay, gate)
    inputs.check_number("beta_range", beta_range)
    if beta_range > 2:
        raise expected("beta_range", "a number in (0, 2]", beta_range)
    inputs.check_self(call.query, call.key, mechanism)
    recurrence.check_gate("beta", beta, call.query)
    recurrence.check_gate("log_decay", log_decay, call.query)
    query, key, phi = feature_maps.apply_custom(
        call.query, call.key, feature_map, call.dtype, call.mask
    )
    # One head for all, of the value's sharding.
    share = jnp.ones_like(call.value[:, :, :1, 0], call.dtype) if beta is None else beta
    options = feature_maps.Options(phi, call.dtype, call.precision)
    return recurrence.run(
        call.replace(query=query, key=key),
        engine.Form(_prepare, _segment, options),
        kind,
        log_decay=log_decay,
        beta=share * beta_range,
        gate=gate,
        mechanism=mechanism,
        chunking=engine.Chunking(64, 64),
        feature_map=phi,
        unit_eps=_EPS,
        **of_output,
    )


@attention_of(run)
def gated_delta_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    beta: jax.Array | None = None,
    beta_range: float = 1.0,
    log_decay: jax.Array | None = None,
    gate: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "silu",
    norm: str | None = "rms",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes the gated delta rule.

    Args:
      query, key, value, mask, segment_ids: as in `linear_attention`.
      is_causal: position i sees keys 0..i only; otherwise the recurrence runs from both
        ends.
      beta: b, in (0, 1), `[B, T, N]`; its heads may be a divisor of N. None = 1.
      beta_range: a factor of beta in (0, 2]. Above 1, the value stored under a key can
        change sign.
      log_decay: log(a), not positive, shaped like beta. None = no decay.
      gate: g, `[B, T, N, Hv]`; None = 1.
      feature_map: phi, by name or as a function with phi(0) = 0.
      norm: "rms" or "layer", of each head of a position; None = no norm.
      eps: of the norm.
      implementation: as in `gla_attention`.
      deterministic: from Flax's layers, which are refused unless they pass gates.
      chunking, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; states are float32 or wider.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, or query and key
        differ in length.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> beta, decay = jax.random.uniform(jax.random.key(1), (2, 2, 64, 4))
      >>> gated_delta_attention(
      ...     query, key, value, is_causal=True, beta=beta, log_decay=-decay
      ... ).shape
      (2, 64, 4, 16)
    """
    ...


gated_delta_weights = dense.weights_of(
    gated_delta_attention,
    "It leaves out the norm and the gate; entries may be negative.",
    without=("gate",),
    fixed={"norm": None},
)
gated_delta_prefill = streams.make_prefill(gated_delta_attention, run, GatedDeltaState)
gated_delta_init = streams.make_init(gated_delta_prefill)
gated_delta_step = streams.make_step(gated_delta_prefill, "beta", "log_decay", "gate")


class _Features(NamedTuple):
    """A segment's inputs, heads first; keys, gates and values zero where hidden."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array  # [B, N, T]
    beta: jax.Array  # [B, N, T]


def _prepare(
    options: feature_maps.Options, arrays: engine.Arrays, tables: engine.Tables
) -> _Features:
    query, key, value = feature_maps.prepare(options, arrays, tables)
    key, heads = feature_maps.unit(key, _EPS), query.shape[1]
    log_decay, beta = (
        jnp.zeros_like(key[..., 0])
        if x is None
        else recurrence.gate_by_head(x, heads, tables.mask, options.dtype)
        for x in (arrays.log_decay, arrays.beta)
    )
    query = feature_maps.unit(query, _EPS)
    return _Features(query, key, value, fades.bound(log_decay), beta)


def _segment(
    options: feature_maps.Options,
    state: recurrence.Memory,
    features: _Features,
    _: None,
    packed_rows: Documents | None,
) -> tuple[jax.Array, recurrence.Memory]:
    """One segment of the delta rule, see `engine.Form`.

    If c_i is the product of a chunk's decays up to i, the state at i is
    ``S_i = c_i S_0 + sum_(j <= i) (c_i / c_j) k_j u_j^T``, where the corrections u
    solve the triangular system ``u_i + b_i sum_(j < i) (c_i / c_j) (k_i . k_j) u_j =
    b_i (v_i - c_i S_0^T k_i)``: the WY form. Its inverse does not depend on S_0, so it
    is computed for all chunks at once, and only states are passed on one by one.
    """
    query, key, value, log_decay, beta = features
    product = functools.partial(jnp.einsum, precision=options.precision)
    fade = fades.accumulate(log_decay, so_far)
    seen = documents.visible(key.shape[3], packed_rows)
    rows = fade.map(lambda x: x[..., None])
    columns = fade.map(lambda x: x[..., None, :])
    kept = exp_visible(rows.since(columns), seen)
    until = jnp.exp(fade.total)
    scores = product("bnpim,bnpjm->bnpij", query, key) * kept
    lower = product("bnpim,bnpjm->bnpij", key, key) * kept * beta[..., None]
    inverse = unit_inverse(jnp.tril(lower, -1), options.precision)
    within = product("bnpij,bnpjv->bnpiv", inverse, value * beta[..., None])
    faded = documents.readers(key * (beta * until)[..., None], packed_rows)
    past = product("bnpij,bnpjm->bnpim", inverse, faded)
    end = fade.map(lambda x: x[..., -1:])
    key = documents.stayers(key * jnp.exp(end.since(fade))[..., None], packed_rows)
    passed: Any = documents.decay(end.total[..., 0], packed_rows, key.dtype)
    factor = jnp.exp(passed)[..., None, None]

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        within, past, key, factor = chunk
        correction = within - product("bnim,bnmv->bniv", past, state)
        return state * factor + product("bnim,bniv->bnmv", key, correction), state

    by_chunk = tuple(jnp.moveaxis(x, 2, 0) for x in (within, past, key, factor))
    after, before = jax.lax.scan(step, state.summary, by_chunk)
    before = jnp.moveaxis(before, 0, 2)
    correction = within - product("bnpim,bnpmv->bnpiv", past, before)
    out = product("bnpij,bnpjv->bnpiv", scores, correction)
    query = documents.readers(query * until[..., None], packed_rows)
    out += product("bnpim,bnpmv->bnpiv", query, before)
    return out, recurrence.Memory(after)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def unit_inverse(lower: jax.Array, precision: jax.lax.PrecisionLike) -> jax.Array:
    """``(I + L)^-1`` for strictly lower triangular L, `[..., C, C]`.

    By halves, ``[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]``, from single
    numbers up, with products of the parts' inverses only. The terms of the series
    ``I - L + L^2 - ...`` would grow and cancel.
    """
    size, lead = lower.shape[-1], lower.shape[:-2]
    full = 1 << (size - 1).bit_length()
    fill = [(0, 0)] * len(lead) + [(0, full - size)] * 2
    lower = jnp.pad(lower, fill)
    inverse = jnp.ones_like(lower[..., :1])[..., None]
    product = functools.partial(jnp.matmul, precision=precision)
    half = 1
    while half < full:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        pairs = full // (2 * half)
        rows = lower.reshape(*lead, pairs, 2 * half, full)
        tiles = rows.reshape(*rows.shape[:-1], pairs, 2 * half)
        corner = jnp.diagonal(tiles, axis1=-4, axis2=-2)
        corner = jnp.moveaxis(corner, -1, -3)[..., half:, :half]
        corner = -product(second, product(corner, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        below = jnp.concatenate([corner, second], -1)
        inverse = jnp.concatenate([upper, below], -2)
        half *= 2
    return inverse[..., 0, :size, :size]


def _inverse_forward(
    lower: jax.Array, precision: jax.lax.PrecisionLike
) -> tuple[jax.Array, jax.Array]:
    inverse: Any = unit_inverse(lower, precision)
    return inverse, inverse


def _inverse_backward(
    precision: jax.lax.PrecisionLike, inverse: jax.Array, of_inverse: jax.Array
) -> tuple[jax.Array]:
    """``-X^T G X^T`` for X = (I + L)^-1: two products, instead of all halves again.

    Entries on and above the diagonal are those of a full matrix; L has none there.
    """
    product = functools.partial(jnp.matmul, precision=precision)
    turned = jnp.swapaxes(inverse, -1, -2)
    return (-product(turned, product(of_inverse, turned)),)


unit_inverse.defvjp(_inverse_forward, _inverse_backward)
