"""Linear attention whose state decays or forgets by gates computed from the input.

The state S `[H, Hv]` of a head is updated at each position:

- gated linear attention: ``S_t = diag(a_t) S_(t-1) + k_t v_t^T``;
- the (gated) delta rule: ``S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T``;

and read by the query, ``out_t = S_t^T q_t``. Within a chunk of C positions decays are
multiplied, or differences of sums of their logarithms are exponentiated, none of which
is positive. Nothing is divided by a product of decays, which may vanish.

Without ``is_causal`` a query also reads the state of the reversed recurrence over the
positions after it, so that each pair of positions counts once. No paper has this form;
these mechanisms need it for classification.

Hidden positions do not change the state.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import feature_maps, inputs, masking, streams
from lra_jax.attention.call import Call
from lra_jax.attention.causal import engine
from lra_jax.attention.causal.both_ends import from_both_ends


class Memory(NamedTuple):
    """The sums over past positions; float32 or float64."""

    summary: jax.Array  # [B, N, H, Hv]

    __repr__ = streams.show_shapes


class RecurrentState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: Memory  # [B, N, H, Hv]
    position: jax.Array  # of the next token in each sample, [B] int32

    __repr__ = streams.show_shapes


def run(
    call: Call,
    form: engine.Form,
    kind: type[RecurrentState],
    *,
    log_decay: jax.Array | None = None,
    beta: jax.Array | None = None,
    gate: jax.Array | None,
    norm: str | None,
    eps: float,
    mechanism: str,
    chunking: engine.Chunking,
    feature_map: str | None = None,
    unit_eps: float = 0.0,
) -> tuple[jax.Array, Any]:
    """Runs a recurrence over a sequence, or from both ends; then norm and gate.

    Args:
      call: the arguments.
      form: the mechanism, of this name in the registry.
      kind: the class of its state.
      log_decay, beta, gate, norm, eps: as passed by the caller.
      chunking: how the sequence is cut if the caller does not say.
      feature_map: phi of queries and keys that are divided by their length, to whose
        square ``unit_eps`` is added; None = neither.

    Returns:
      The output of the mechanism, and of a stream its state.
    """
    feature_maps.check_norm(norm)
    sums: Any = None
    if call.choose(mechanism) is not None:
        out = kernels.attend_recurrent(
            _kernel_inputs(call, log_decay, beta),
            is_causal=call.is_causal,
            feature_map=feature_map and feature_maps.for_kernels(feature_map),
            eps=unit_eps,
        )
    else:
        arrays = call.arrays._replace(log_decay=log_decay, beta=beta)
        zeros = engine.nothing(arrays, call.dtype)[..., None, None]
        shape = 1, 1, call.query.shape[-1], call.value.shape[-1]
        start = Memory(zeros + jnp.zeros(shape, call.dtype))
        cut = {"chunking": call.chunking or chunking, "dtype": call.dtype}
        if call.is_causal:
            start = streams.check_sums(call.sums, start)
            out, sums = engine.run(form, start, arrays, call.tables(), **cut)
        else:
            until, after = from_both_ends(form, start, arrays, call.tables(), **cut)
            out = until + after
    out = feature_maps.normalise(out, norm, (3,), eps)
    out = call.finish(apply_gate(out, gate, call.mask))
    return out, kind(sums, call.next_position) if call.streams else None


def _kernel_inputs(
    call: Call, log_decay: jax.Array | None, beta: jax.Array | None
) -> kernels.Inputs:
    """The arrays for kernels, zero where hidden."""
    heads, dtype, mask = call.query.shape[2], call.query.dtype, call.mask
    log_decay, beta = (
        None if gate is None else _match_heads(gate, heads, mask, dtype)
        for gate in (log_decay, beta)
    )
    return call.kernel_inputs._replace(
        key=masking.hide(call.key, mask),
        value=masking.hide(call.value, mask),
        mask=None,
        log_decay=log_decay,
        beta=beta,
    )


def check_gate(
    name: str, gate: jax.Array | None, query: jax.Array, width: int | None = None
) -> None:
    """Raises ``ValueError`` unless a gate is `[B, T, n]`, or `[B, T, n, width]`.

    n is N or a divisor of it.
    """
    if gate is None:
        return
    batch, length, heads, _ = query.shape
    shared = {heads // part for part in range(1, heads + 1) if heads % part == 0}
    axes, columns = ("B T N", ()) if width is None else ("B T N H", (width,))
    inputs.check_shape(name, gate, axes, batch, length, shared, *columns)


def gate_by_head(
    gate: jax.Array, num_heads: int, mask: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """`[B, T, n]` -> `[B, N, T]`, zero where hidden."""
    return jnp.swapaxes(_match_heads(gate, num_heads, mask, dtype), 1, 2)


def _match_heads(
    gate: jax.Array, num_heads: int, mask: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """`[B, T, n]` or `[B, T, n, H]` with N heads, zero where hidden."""
    wide = gate if gate.ndim == 4 else gate[..., None]
    wide = inputs.match_heads(masking.hide(wide, mask).astype(dtype), num_heads)
    return wide if gate.ndim == 4 else wide[..., 0]


def apply_gate(
    out: jax.Array, gate: jax.Array | None, mask: jax.Array | None
) -> jax.Array:
    """``gate * out``, `[B, T, N, Hv]`; zero where hidden.

    Raises:
      ValueError: the gate does not fit.
    """
    if gate is None:
        return out
    inputs.check_shape("gate", gate, "B T N Hv", *out.shape)
    return out * masking.hide(gate, mask).astype(out.dtype)
