"""Reformer (Kitaev et al. 2020, "Reformer: The Efficient Transformer").

Queries serve as keys, ``k_j = q_j / |q_j|``, and attend within buckets of a hash:
``h(x) = argmax [x R; -x R]`` with a random R of H rows, so that vectors of similar
direction share a bucket. In each of several rounds, each with its own R, the positions
are sorted by bucket (and by position within a bucket) and cut into chunks of C; a query
sees the keys of its bucket in its own chunk and the previous one. Then

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j``

over the union A(i) of all rounds, without i itself unless there is nothing else. A pair
that meets in several rounds counts once (the paper's equation 6).

Cost: O(R T C (H + Hv)) time and memory for R rounds, and R sorts.

There is no causal form: where chunks end depends on the hashes of later positions, and
so does which earlier positions a query sees.

The rotations are drawn from a seed, the same for all heads, and stay fixed. Hidden
positions are sorted after all others, and the number of buckets follows from
``max_length``: padding is exact on either side.

Deviations: scores are as in the paper, with keys of length 1; the authors' code (Trax)
gives keys the length sqrt(H), so that its scores are sqrt(H) times as large. By default
there are as many buckets as chunks; the paper has twice as many. The first chunk does
not look back, whereas in the authors' code it looks at the last; today's version of
that code sees all keys of both chunks, whatever their bucket, and counts a pair once
per round.

LRA's code cuts the sequence into as many chunks as there are buckets (``chunk=None``),
multiplies the scores by sqrt(H) instead of dividing, does not normalise the keys, sees
itself and other buckets, hashes with one constant rotation, mixes up heads, and has no
output projection.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import dense, feature_maps, inputs, masking
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.softmax import key_sets, patterns
from lra_jax.errors import expected

__all__ = ["reformer_attention", "reformer_weights"]


@documents_in_turn
def reformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: int | None = None,
    *,
    segment_ids: jax.Array | None = None,
    chunk: int | None = 64,
    num_hashes: int = 2,
    num_buckets: int | None = None,
    seed: int = 0,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes attention within hash buckets.

    Args:
      query: `[B, T, N, H]`; also used as keys.
      key: `[B, T, N, H]`; not read.
      value: `[B, T, N, Hv]`; its heads may be a divisor of N.
      mask: boolean, True = may be attended: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`. Hidden positions are left out as queries too; their output rows
        are zero.
      is_causal: must be False; there is no causal form.
      segment_ids: as in `linear_attention`, but documents are computed one by one;
        each gives what it would alone if ``num_buckets`` or ``max_length`` is set.
      max_length: determines ``num_buckets`` or ``chunk`` if one is None; None = T.
      chunk: C; None = max_length / num_buckets, rounded up.
      num_hashes: R, the number of rounds.
      num_buckets: even; None = max_length / C, rounded up to an even number.
      seed: of the rotations; it may differ between the layers of a model.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, query and key differ
        in length, or `is_causal` is True.
    """
    call = Call.of(query, key, value, mask)
    if max_length is None:
        max_length = query.shape[1]
    rounds = _Rounds(max_length, chunk, num_hashes, num_buckets, seed, query.shape[3])
    dtype = inputs.accumulation_dtype(query, value)
    wide = call.replace(value=call.value.astype(dtype))
    _, sequence = patterns.prepare(wide, "reformer")
    # Hidden like keys: a query's broken rows would be zeroed.
    shared = masking.by_head(query, query.shape[2], call.mask, dtype)
    compute = jax.checkpoint(functools.partial(_compute, rounds, precision))
    out = compute(shared, sequence.value, sequence.position)
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


reformer_weights = dense.weights_of(reformer_attention, "Rows sum to one or zero.")


class _Rounds:
    """The hashes: their sizes and rotations, and which positions meet."""

    def __init__(
        self,
        max_length: int,
        chunk: int | None,
        count: int,
        buckets: int | None,
        seed: int,
        width: int,
    ):
        inputs.check_size("max_length", max_length)
        self.count = inputs.check_size("num_hashes", count)
        if chunk is None:
            if buckets is None:
                raise expected("chunk", "a positive int without num_buckets", None)
            chunk = -(-max_length // inputs.check_size("num_buckets", buckets))
        self.chunk = inputs.check_size("chunk", chunk)
        chunks = -(-max_length // self.chunk)
        buckets = chunks + chunks % 2 if buckets is None else buckets
        self.num_buckets = inputs.check_size("num_buckets", buckets)
        if self.num_buckets % 2:
            raise expected("num_buckets", "an even number", buckets)
        rng = np.random.default_rng(inputs.check_size("seed", seed, 0))
        shape = (self.count, width, self.num_buckets // 2)
        self.rotations = rng.normal(size=shape)

    def buckets(self, shared: jax.Array, real: jax.Array) -> jax.Array:
        """The buckets `[B, N, R, T]` int32; hidden positions are in an extra one."""
        rotated = jnp.einsum(
            "bnth,rhf->bnrtf",
            shared,
            jnp.asarray(self.rotations, shared.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
        both = jnp.concatenate([rotated, -rotated], -1)
        bucket = jnp.argmax(both, -1).astype(jnp.int32)
        return jnp.where(real[:, :, None], bucket, self.num_buckets)

    def codes(self, buckets: jax.Array, back: jax.Array) -> jax.Array:
        """A number for each position and round; see `meetings`."""
        # Buckets are so far apart that no difference of chunks bridges two of them.
        apart = buckets.shape[-1] // self.chunk + 3
        return buckets * apart + back.astype(jnp.int32) // self.chunk

    def meetings(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """In how many rounds a query meets a key: same bucket, same or previous chunk.

        Both are codes `[B, N, R, ...]`.
        """
        met = jnp.zeros((), jnp.int32)
        for one in range(self.count):
            ahead = query[:, :, one] - key[:, :, one]
            met = met + ((ahead == 0) | (ahead == 1)).astype(jnp.int32)
        return met


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
    """`[B, N, R, T, H]` with its rows in this order; ``back`` is the inverse order."""
    return jnp.take_along_axis(x, order[..., None], axis=3)


def _permuted_forward(x: jax.Array, order: jax.Array, back: jax.Array) -> tuple:
    return _permute(x, order, back), (order, back)


def _permuted_backward(kept: tuple, cotangent: jax.Array) -> tuple:
    # Another gather; the automatic derivative of a gather would be a scatter.
    order, back = kept
    return _permute(cotangent, back, order), None, None


_permute.defvjp(_permuted_forward, _permuted_backward)


def _compute(
    rounds: _Rounds,
    precision: jax.lax.PrecisionLike,
    shared: jax.Array,
    value: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """`[B, N, T, Hv]`: every round sorted and cut, then all of them together."""
    batch, heads, length, _ = shared.shape
    real = (position >= 0)[:, None]
    buckets = rounds.buckets(shared, real)
    order = jnp.argsort(buckets, -1, stable=True)
    back = jnp.argsort(order, -1)  # the place of each position in this order
    shape = (batch, heads, rounds.count, length)
    size = min(rounds.chunk, length)

    def sort(x: jax.Array) -> jax.Array:
        """`[B, N, T, H]` -> `[B, N * R, T, H]`."""
        x = jnp.broadcast_to(x[:, :, None], (*shape, x.shape[-1]))
        return _permute(x, order, back).reshape(batch, -1, length, x.shape[-1])

    def unsort(x: jax.Array) -> jax.Array:
        # Two steps, since sharded arrays cannot split and join axes in one.
        x = x.reshape(*x.shape[:2], -1, x.shape[-1])
        x = x.reshape(batch, heads, rounds.count, *x.shape[2:])
        return _permute(x[:, :, :, :length], back, order)

    # Position, own bucket, and the codes of all rounds.
    codes = jnp.split(rounds.codes(buckets, back), rounds.count, 2)
    facts = [position[:, None, None], buckets, *codes]
    facts = jnp.stack([jnp.broadcast_to(fact, shape) for fact in facts], -1)
    facts = jnp.take_along_axis(facts, order[..., None], axis=3)
    facts = facts.reshape(batch, -1, length, facts.shape[-1])
    of_queries = _cut_facts(facts, size, 0)[..., None]
    of_keys = _cut_facts(facts, size, size)[..., None, :]
    met = rounds.meetings(of_queries[:, :, 2:], of_keys[:, :, 2:])
    keys = key_sets.Keys(
        "block",
        key_sets.windows(sort(feature_maps.unit(shared)), size, size, 0),
        key_sets.windows(sort(value), size, size, 0),
        of_keys[:, :, 0],
        lambda i, j: (i != j) & (of_queries[:, :, 1] == of_keys[:, :, 1]),
        # A pair that meets in several rounds counts once in total.
        discount=jnp.log(jnp.maximum(met, 1).astype(shared.dtype)),
    )
    queries = key_sets.cut(sort(shared), size)
    out, total = patterns.attend(queries, of_queries[:, :, 0], [keys], precision)
    out = _together(unsort(out), unsort(total), value)
    return jnp.where(real[..., None], out, 0)


def _cut_facts(facts: jax.Array, size: int, before: int) -> jax.Array:
    """Integers `[B, N, T, F]` -> `[B, N, F, P, before + C]`, -1 beyond the ends."""
    return jnp.moveaxis(key_sets.windows(facts + 1, size, before, 0) - 1, -1, 2)


def _together(out: jax.Array, total: jax.Array, value: jax.Array) -> jax.Array:
    """Combines rounds `[B, N, R, T, Hv]` by their sums; own value where all are 0."""
    peak = jax.lax.stop_gradient(total.max(2, keepdims=True))
    seen = total > jnp.finfo(total.dtype).min
    shares = jnp.where(seen, jnp.exp(total - peak), 0)
    weight = shares.sum(2)
    mean = (shares * out).sum(2) / jnp.where(weight > 0, weight, 1)
    return jnp.where(weight > 0, mean, value)
