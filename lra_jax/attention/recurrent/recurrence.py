"""Linear attention whose state fades or forgets by gates of the input.

The state S `[H, Hv]` of a head is rewritten at each position:

- gated linear attention: ``S_t = diag(a_t) S_(t-1) + k_t v_t^T``;
- the (gated) delta rule: ``S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T``;

and read by the query, ``out_t = S_t^T q_t``. Both run on the loop of
`lra_jax.attention.causal.chunks`. Within a chunk of C positions only differences of the
logarithms of decays are exponentiated, none of them positive: nothing is divided by a
product of decays, which vanishes.

Without ``is_causal`` a query also reads the state of the reversed recurrence over the
positions behind it, so that each pair of positions counts once. No paper has this form;
it is what these mechanisms need to classify.

A hidden position changes no state.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal.chunks import (
    Chunking,
    Plan,
    decayed,
    prefix,
    run,
    triangle,
)


class Memory(NamedTuple):
    """The past of a position; float32 or float64."""

    summary: jax.Array  # [B, N, H, Hv]


class Arrays(NamedTuple):
    """What a block reads, `[B, N, T, ...]` each."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    log_decay: jax.Array | None  # not positive, [B, N, T, H] or [B, N, T]
    beta: jax.Array | None  # [B, N, T]


class _Block:
    """What the loop asks of a block beside its call: heads first, and its gradient."""

    axis = 2
    keeps_outputs = False

    def pullback(
        self, state: Any, arrays: Any, tables: None, outputs: None, cotangents: Any
    ) -> Any:
        """The gradients of state and arrays."""

        def call(state: Any, arrays: Any) -> Any:
            block: Any = self
            return block(state, arrays, tables)

        return jax.vjp(call, state, arrays)[1](cotangents)


@dataclass(frozen=True)
class GatedBlock(_Block):
    """One super-block of gated linear attention."""

    plan: Plan
    precision: jax.lax.PrecisionLike

    def __call__(
        self, start: Memory, arrays: Arrays, tables: None
    ) -> tuple[jax.Array, Memory]:
        query, key, value, log_decay, _ = self.plan.split(arrays)
        product = functools.partial(jnp.einsum, precision=self.precision)
        fade = jnp.cumsum(log_decay, 3)
        end = fade[..., -1, :]
        # Products of pairs, column by column: factors of their own for queries and keys
        # would under- and overflow. Chunks are short, and the sum is fused.
        seen = triangle(self.plan.chunk)[..., None]
        kept = decayed(fade[..., :, None, :] - fade[..., None, :, :], seen)
        scores = (query[..., :, None, :] * key[..., None, :, :] * kept).sum(-1)
        key = key * jnp.exp(end[..., None, :] - fade)
        update = Memory(product("bnpjm,bnpjv->bnpmv", key, value))
        before, after = prefix(self.plan, start, update, end)
        out = product("bnpij,bnpjv->bnpiv", scores, value)
        query = query * jnp.exp(fade)
        out = out + product("bnpim,bnpmv->bnpiv", query, before.summary)
        return self.plan.join(out), after


@dataclass(frozen=True)
class DeltaBlock(_Block):
    """One super-block of the delta rule, with or without decay.

    With c_i the product of the decays of a chunk up to i, the state in it is
    ``S_i = c_i S_0 + sum_(j <= i) (c_i / c_j) k_j u_j^T``, where the corrections u
    solve the triangular system ``u_i + b_i sum_(j < i) (c_i / c_j) (k_i . k_j) u_j =
    b_i (v_i - c_i S_0^T k_i)``: the WY form. Its inverse does not depend on S_0, so it
    is formed for all chunks at once, and only states are passed on one by one.
    """

    plan: Plan
    precision: jax.lax.PrecisionLike

    def __call__(
        self, start: Memory, arrays: Arrays, tables: None
    ) -> tuple[jax.Array, Memory]:
        query, key, value, log_decay, beta = self.plan.split(arrays)
        product = functools.partial(jnp.einsum, precision=self.precision)
        visible = triangle(self.plan.chunk)
        zero = jnp.zeros((), key.dtype)
        fade = jnp.zeros_like(beta) if log_decay is None else jnp.cumsum(log_decay, 3)
        kept = decayed(fade[..., None] - fade[..., None, :], visible)
        scores = product("bnpim,bnpjm->bnpij", query, key) * kept
        lower = product("bnpim,bnpjm->bnpij", key, key) * kept * beta[..., None]
        inverse = unit_inverse(jnp.tril(lower, -1), self.precision)
        own = product("bnpij,bnpjv->bnpiv", inverse, value * beta[..., None])
        faded = key * (beta * jnp.exp(fade))[..., None]
        past = product("bnpij,bnpjm->bnpim", inverse, faded)
        end = fade[..., -1:]
        key = key * jnp.exp(end - fade)[..., None]
        factor = jnp.exp(end)[..., None]

        def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
            own, past, key, factor = chunk
            correction = own - product("bnim,bnmv->bniv", past, state)
            update = product("bnim,bniv->bnmv", key, correction)
            return state * factor + update, state

        by_chunk = [jnp.moveaxis(x, 2, 0) for x in (own, past, key, factor)]
        after, before = jax.lax.scan(step, start.summary, tuple(by_chunk))
        before = jnp.moveaxis(before, 0, 2)
        correction = own - product("bnpim,bnpmv->bnpiv", past, before)
        scores = jnp.where(visible, scores, zero)
        out = product("bnpij,bnpjv->bnpiv", scores, correction)
        query = query * jnp.exp(fade)[..., None]
        out = out + product("bnpim,bnpmv->bnpiv", query, before)
        return self.plan.join(out), Memory(after)


def unit_inverse(lower: jax.Array, precision: jax.lax.PrecisionLike) -> jax.Array:
    """``(I + L)^-1`` for strictly lower triangular L, `[..., C, C]`.

    By halves, ``[[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]``, from single
    numbers up: products of inverses of parts alone. The series ``I - L + L^2 - ...``
    would have terms that grow and cancel.
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
        tiles = lower.reshape(*lead, pairs, 2 * half, pairs, 2 * half)
        corner = jnp.diagonal(tiles, axis1=-4, axis2=-2)
        corner = jnp.moveaxis(corner, -1, -3)[..., half:, :half]
        corner = -product(second, product(corner, first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        below = jnp.concatenate([corner, second], -1)
        inverse = jnp.concatenate([upper, below], -2)
        half *= 2
    return inverse[..., 0, :size, :size]


# Short chunks for decays of each column, whose pairs are formed one by one.
_CHUNKS = {GatedBlock: Chunking(chunk=16), DeltaBlock: Chunking(64, 64)}


def recur(
    kind: type[GatedBlock] | type[DeltaBlock],
    arrays: Arrays,
    is_causal: bool,
    start: Memory | None = None,
    chunking: Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, Memory]:
    """Runs a recurrence over a sequence, or from both of its ends.

    Args:
      kind: of the block.
      arrays: heads first; keys, values and decays zero where hidden.
      is_causal: position i reads what lies up to i.
      start: the state before; None = nothing came before.
      chunking: how the sequence is cut.
      precision: of the matrix products.

    Returns:
      `[B, N, T, Hv]` and, if causal, the state after the last position.

    Raises:
      ValueError: the start does not fit.
    """
    batch, heads, length = arrays.query.shape[:3]
    plan = (chunking or _CHUNKS[kind]).plan(length, batch * heads)
    block: Any = kind(plan, precision)
    # Of a first product and not of a shape, so that it has its sharding.
    empty = arrays.key[:, :, 0, :, None] * arrays.value[:, :, :1]
    empty = Memory(jnp.zeros_like(empty))
    start = empty if start is None else inputs.checked_state(start, empty)
    until: Any
    until, state = run(block, start, arrays, None)
    if is_causal:
        return until, state
    backward = jax.tree.map(lambda x: jnp.flip(x, 2), arrays)
    later = jax.tree.map(_later, backward)
    after, _ = run(block, empty, later._replace(query=backward.query), None)
    return until + jnp.flip(after, 2), state


def _later(x: jax.Array) -> jax.Array:
    """`[B, N, T, ...]` one position later; zeros come first, the last drops out."""
    return jnp.pad(x[:, :, :-1], [(0, 0), (0, 0), (1, 0)] + [(0, 0)] * (x.ndim - 3))


def gate_by_head(
    name: str,
    gate: jax.Array | None,
    like: jax.Array,
    width: int | None,
    num_heads: int,
    mask: jax.Array | None,
    dtype: jnp.dtype,
) -> jax.Array | None:
    """A gate `[B, T, n]` or `[B, T, n, width]` with its heads first, zero where hidden.

    Raises:
      ValueError: it does not fit ``like``, `[B, T, ...]`, or n does not divide N.
    """
    if gate is None:
        return None
    tail = () if width is None else (width,)
    heads = jnp.shape(gate)[2] if jnp.ndim(gate) > 2 else 0
    if not heads or num_heads % heads or gate.shape != (*like.shape[:2], heads, *tail):
        letters = "[B, T, N]" if width is None else "[B, T, N, width]"
        wanted = (*like.shape[:2], num_heads, *tail)
        raise ValueError(
            f"{name}: expected {letters}={wanted}, or a divisor of its heads, got "
            f"shape {jnp.shape(gate)}"
        )
    wide = gate if tail else gate[..., None]
    out = inputs.by_head(wide, num_heads, mask, dtype)
    return out if tail else out[..., 0]


def finished(
    out: jax.Array,
    gate: jax.Array | None,
    norm: str | None,
    eps: float,
    query: jax.Array,
) -> jax.Array:
    """Norm and gate: `[B, N, T, Hv]` -> `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: the gate does not fit.
    """
    out = jnp.swapaxes(feature_maps.normalised(out, norm, (3,), eps), 1, 2)
    if gate is not None:
        if jnp.shape(gate) != out.shape:
            raise ValueError(
                f"gate: expected [B, T, N, Hv]={out.shape}, got shape {jnp.shape(gate)}"
            )
        out = out * gate.astype(out.dtype)
    return out.astype(query.dtype)


def dtype_of(start: Memory | None, *arrays: jax.Array) -> jnp.dtype:
    """The dtype of a state, given or to be made."""
    if start is not None:
        return start.summary.dtype
    return inputs.accumulation_dtype(*arrays)
