"""Linear attention whose state decays or forgets by gates computed from the input.

The state S `[H, Hv]` of a head is updated at each position:

- gated linear attention: ``S_t = diag(a_t) S_(t-1) + k_t v_t^T``;
- the (gated) delta rule: ``S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T``;

and read by the query, ``out_t = S_t^T q_t``. Within a chunk of C positions decays are
multiplied, or differences of sums of their logarithms are exponentiated, of which none
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
from lra_jax.attention import feature_maps, inputs, masking, packed, streams
from lra_jax.attention.causal import engine
from lra_jax.attention.causal.both_ends import from_both_ends


class Memory(NamedTuple):
    """The sums over past positions; float32 or float64."""

    summary: jax.Array  # [B, N, H, Hv]

    __repr__ = streams.shapes_shown


class RecurrentState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: Memory  # [B, N, H, Hv]
    position: jax.Array  # of the next token in each sample, [B] int32

    __repr__ = streams.shapes_shown


def recur(
    form: engine.Form,
    arrays: engine.Arrays,
    *,
    is_causal: bool,
    mask: jax.Array | None,
    rows: packed.Packed | None,
    state: RecurrentState | None,
    chunking: engine.Chunking | None,
    usual: engine.Chunking,
    by: kernels.Implementation,
    feature_map: str | None = None,
    length_eps: float = 0.0,
) -> tuple[jax.Array, RecurrentState]:
    """Runs a recurrence over a sequence, or from both ends.

    Args:
      form: the mechanism; its options give the dtype.
      arrays: as passed by the caller, `[B, T, ...]`.
      is_causal: position i reads positions 0..i only.
      mask: the real positions, `[B, T]`, in packed rows without the documents'
        padding; None = all.
      rows: where packed documents are; None = one per row.
      state: the state so far; None = a new stream.
      chunking: how the caller cuts the sequence; None = as usual.
      usual: how it is cut otherwise.
      by: the attention's ``implementation``, see `kernels.choose`. Prefills, which
        need the state, leave it at "xla" and do not offer it.
      feature_map: phi of queries and keys that are divided by their length; None =
        neither.
      length_eps: added to the square of the length.

    Returns:
      `[B, T, N, Hv]` in the dtype of the options, and the state after the last real
      position, which without ``is_causal``, or from kernels, has no meaning.

    Raises:
      ValueError: the state does not fit, or there are no such kernels.
    """
    batch, length, _, width = arrays.query.shape
    options: Any = form.options
    zeros = engine.nothing(arrays, options.dtype)[..., None, None]
    empty = jnp.zeros((1, 1, width, arrays.value.shape[-1]), options.dtype)
    start = Memory(zeros + empty)
    before = None if state is None else state.position
    position = packed.next_position(mask, rows, batch, length, before)
    target = kernels.choose(
        by,
        *arrays[:3],
        chunking=chunking,
        mechanism="recurrent",
        is_causal=is_causal,
        packed=rows is not None,
    )
    if target is not None:
        whole = _by_kernels(
            target, arrays, is_causal, mask, rows, feature_map, length_eps
        )
        return whole, RecurrentState(start, position)
    rest: dict[str, Any] = {
        "mask": mask,
        "resets": packed.resets(rows),
        "chunking": chunking or usual,
        "dtype": options.dtype,
    }
    if not is_causal:
        until, after = from_both_ends(form, start, arrays, **rest)
        return until + after, RecurrentState(start, position)
    if state is not None:
        start = streams.checked(state.sums, start)
    out, sums = engine.run(form, start, arrays, **rest)
    return out, RecurrentState(sums, position)


def _by_kernels(
    target: kernels.Target,
    arrays: engine.Arrays,
    is_causal: bool,
    mask: jax.Array | None,
    rows: packed.Packed | None,
    feature_map: str | None,
    length_eps: float,
) -> jax.Array:
    """The outputs of `recur`, from no earlier state."""
    query, key, value, decay, share = arrays
    heads, dtype = query.shape[2], query.dtype
    if decay is not None and share is None:
        decay = inputs.match_heads(masking.hide(decay.astype(dtype), mask), heads)
    elif decay is not None:
        decay = _numbers(decay, heads, mask, dtype)
    return kernels.attend_recurrent(
        target,
        query,
        masking.hide(key, mask),
        masking.hide(value, mask),
        is_causal,
        decay,
        None if share is None else _numbers(share, heads, mask, dtype),
        packed.numbers(rows),
        None if feature_map is None else feature_maps.for_kernels(feature_map),
        length_eps,
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
    if width is None:
        inputs.check_shape(name, gate, "B T N", batch, length, shared)
    else:
        inputs.check_shape(name, gate, "B T N H", batch, length, shared, width)


def gate_by_head(
    gate: jax.Array, num_heads: int, mask: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """`[B, T, n]` -> `[B, N, T]`, zero where hidden."""
    return jnp.swapaxes(_numbers(gate, num_heads, mask, dtype), 1, 2)


def _numbers(
    gate: jax.Array, num_heads: int, mask: jax.Array | None, dtype: jnp.dtype
) -> jax.Array:
    """`[B, T, n]` -> `[B, T, N]`, zero where hidden."""
    hidden = masking.hide(gate[..., None], mask).astype(dtype)
    return inputs.match_heads(hidden, num_heads)[..., 0]


def finished(
    out: jax.Array,
    gate: jax.Array | None,
    norm: str | None,
    eps: float,
    query: jax.Array,
    mask: jax.Array | None,
) -> jax.Array:
    """Applies norm and gate to `[B, T, N, Hv]`; returns the query's dtype."""
    out = feature_maps.normalised(out, norm, (3,), eps)
    return gated(out, gate, mask).astype(query.dtype)


def gated(out: jax.Array, gate: jax.Array | None, mask: jax.Array | None) -> jax.Array:
    """``gate * out``, `[B, T, N, Hv]`; zero where hidden.

    Raises:
      ValueError: the gate does not fit.
    """
    if gate is None:
        return out
    inputs.check_shape("gate", gate, "B T N Hv", *out.shape)
    return out * masking.hide(gate, mask).astype(out.dtype)


def dtype_of(state: RecurrentState | None, *arrays: jax.Array) -> jnp.dtype:
    """The dtype of the given state, or of one for these arrays."""
    if state is not None:
        return state.sums.summary.dtype
    return inputs.accumulation_dtype(*arrays)
