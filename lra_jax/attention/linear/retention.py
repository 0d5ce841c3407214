"""Retention (Sun et al. 2023, "Retentive Network: A Successor to Transformer for Large
Language Models").

``out_i = norm(sum_{j <= i} R_ij v_j / max(|sum_j R_ij|, 1))`` with
``R_ij = (q_i e^(i theta) . k_j e^(j theta)) D_ij / sqrt(H sum_j D_ij)`` and
``D_ij = gamma^(i - j)``, gamma = 1 - 2^(-5 - h) in head h.

The three divisions are the paper's "retention score normalization"; the norm is its
GroupNorm, over each head of each position separately and without a learned gain, so
that the divisions matter only through its eps. The authors' current code
(microsoft/torchscale) uses ``norm="rms"``. The rotation is the paper's e^(i theta), see
`linear.rotary`. The gate and projection that follow in their layer are not included.

Without ``is_causal`` the sums run over all j with ``D_ij = gamma^|i - j|``. The paper
has no such form; it is that of Fan et al. 2024 ("RMT: Retentive Networks Meet Vision
Transformers") and Afzal et al. 2025 ("Linear Attention for Efficient Bidirectional
Sequence Modeling"), with the paper's normalisations.

Deviations: the authors stop the gradient of ``max(|sum_j R_ij|, 1)``; here gradients
are exact, which under a norm gives the same up to its eps. They have no mask; here
padding is exact: ``sum_j D_ij`` starts at a sample's first real position and, without
``is_causal``, ends at its last. Their state is a running mean; ours is the plain sum.

Cost: O(T (H + C) Hv) time for chunks of C positions, twice that without ``is_causal``
(`linear.core`); O(H Hv) memory besides inputs and output. A stream holds one sum,
rotated so that its next position is 0 (``S <- gamma e^(i theta) S + k v``), so it loses
no precision however long it runs. Sums are float32 or wider.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import core, decay, rotary
from lra_jax.attention.linear.sums import Sums

__all__ = [
    "RetentionState",
    "retention_attention",
    "retention_init",
    "retention_prefill",
    "retention_slopes",
    "retention_step",
    "retention_weights",
]


class RetentionState(core.LinearState):
    """Everything that the next position needs; the first real position counts as 0."""


def retention_slopes(num_heads: int) -> np.ndarray:
    """Returns the published slopes `[N]`: ``-log(1 - 2^(-5 - h))`` for h = 0, 1, ..."""
    return -np.log1p(-(2.0 ** (-5 - np.arange(num_heads))))


def _run(
    call: Call,
    *,
    slopes: decay.Slopes | None,
    rotate: bool,
    norm: str | None,
    eps: float,
) -> tuple[jax.Array, RetentionState]:
    inputs.refuse_decoding(call.deterministic, call.query, call.key, "retention")
    feature_maps.check_norm(norm)
    length, heads = call.query.shape[1:3]
    rates = decay.check_slopes(slopes, retention_slopes(heads), call.dtype)
    first, last = _first(call), None if call.is_causal else _last(call)
    spread = decay.spread(rates, length, first, last)
    kernel = core.Kernel(
        denominator="absolute",
        eps=1.0,
        slopes=rates,
        refusal=decay.kernel_refusal(call, slopes),
    )
    turned = _rotate(call, spread, rotate)
    out, sums = core.attend(turned, kernel, "retention", call.dtype)
    out = call.finish(feature_maps.normalise(out, norm, (3,), eps))
    state: Any = None
    if call.streams:
        ends = masking.next_position(call.mask, call.query.shape[0], length)
        sums = _from_here(sums, call.mask, ends, length) if rotate else sums
        # The last document's; padding after a document has the same number.
        state = RetentionState(sums, ends - first[:, -1])
    return out, state


@attention_of(_run)
def retention_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    slopes: decay.Slopes | None = None,
    rotate: bool = True,
    norm: str | None = "layer",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes retention: rotated products that decay with distance, and a norm.

    Args:
      query, key, value, mask, segment_ids: as in `linear_attention`. Hidden positions
        still count towards distances and in ``sum_j D_ij``.
      is_causal: position i sees keys 0..i only; needs T == S. Otherwise it sees all
        keys, with a decay by distance.
      slopes: `[N]`, not negative, -log(gamma) of each head; None = `retention_slopes`.
      rotate: rotate queries and keys by position; needs an even H.
      norm: "layer" (the paper's GroupNorm) or "rms" normalises each head of a position
        separately; None returns the weighted sum, which is linear in the values.
      eps: of the norm.
      implementation: as in `lightning_attention`.
      deterministic: from Flax's layers; with it, ``decode=True`` is refused.
      chunking, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> out = retention_attention(query, key, value, is_causal=True)
      >>> prompt, state = retention_prefill(query[:, :63], key[:, :63], value[:, :63])
      >>> last, state = retention_step(state, query[:, 63], key[:, 63], value[:, 63])
      >>> bool(jnp.allclose(out[:, 63], last, atol=1e-5))
      True
    """
    ...


retention_weights = dense.weights_of(
    retention_attention,
    "It leaves out the norm, which acts on the output.",
    fixed={"norm": None},
)
retention_prefill = streams.make_prefill(retention_attention, _run, RetentionState)
retention_init = streams.make_init(retention_prefill)
retention_step = streams.make_step(retention_prefill)


def _rotate(call: Call, spread: jax.Array, rotate: bool) -> Call:
    """Queries divided by ``sqrt(H sum_j D_ij)`` and keys, both rotated.

    ``spread`` is ``sum_j D_ij``, `[B or 1, N, T]`.
    """
    length, head_dim = call.query.shape[1], call.query.shape[3]
    inputs.check_flag("rotate", rotate)
    query = call.query.astype(call.dtype)
    key = masking.hide(call.key, call.mask).astype(call.dtype)
    if rotate:
        rotary.check_width(head_dim)
        cos, sin = rotary.tables(max(length, key.shape[1]), head_dim, call.dtype)
        query, key = (
            rotary.rotate(x, (cos[None, :size, None], sin[None, :size, None]))
            for x, size in ((query, length), (key, key.shape[1]))
        )
    factors = jax.lax.rsqrt(head_dim * jnp.swapaxes(spread, 1, 2))
    return call.replace(query=query * factors[..., None], key=key)


def _first(call: Call) -> jax.Array:
    """`[B or 1, T or 1]`: the first real position of each sample or document.

    It is negative if it lies in an earlier part of the stream.
    """
    first = jnp.zeros((1, 1), jnp.int32)
    if call.rows is not None:
        first = call.rows.ends(call.mask)[0]
    elif call.mask is not None:
        first = jnp.argmax(call.mask, 1).astype(jnp.int32)[:, None]
    if call.state is None:
        return first
    before = call.state.position
    inputs.check_shape("state", before, "B", call.query.shape[0])
    goes_on = (before > 0)[:, None]
    if call.rows is not None:
        goes_on &= call.rows.number <= 1
    return jnp.where(goes_on, -before[:, None], first)


def _last(call: Call) -> jax.Array:
    """`[B or 1, T or 1]`: the last real position of each sample or document."""
    if call.rows is not None:
        return call.rows.ends(call.mask)[1]
    return masking.next_position(call.mask, 1, call.key.shape[1])[:, None] - 1


def _from_here(
    sums: Sums, mask: jax.Array | None, ends: jax.Array, length: int
) -> Sums:
    """Rotates the key axis of a state so that its next position is 0."""
    tables = rotary.tables(length, sums.total.shape[-1], sums.total.dtype)
    if mask is None:
        cos, sin = (table[None, None, length] for table in tables)
    else:
        cos, sin = (table[ends][:, None] for table in tables)
    total = rotary.rotate(sums.total, (cos, -sin))
    summary = jnp.swapaxes(sums.summary, 2, 3)
    summary = rotary.rotate(summary, (cos[:, :, None], -sin[:, :, None]))
    return Sums(jnp.swapaxes(summary, 2, 3), total)
