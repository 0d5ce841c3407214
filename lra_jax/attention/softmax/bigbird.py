"""BigBird (Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences").

``out_i = sum_{j in A(i)} softmax_j(q_i . k_j / sqrt(H)) v_j``, with A(i) made of blocks
of C positions: the query's own and its two neighbours, the first and the last block,
which are global (all see them and they see all), and R random blocks, which differ from
head to head. The random blocks are drawn without replacement from those that are
neither neighbours nor global; if there are fewer than R, all of them are used.

In the causal form a block sees itself, the block before it, the first block, and R
random blocks in between, without positions j > i. The draws depend only on the past, so
a prefix attends like the whole sequence. The paper has no causal form.

Cost: O(T W (H + Hv)) time and O(T W) memory for W = (7 + R) C, by gathered blocks
(`lra_jax.attention.softmax.patterns`).

The draws are a hash of seed, head, block and count: the same on every machine, without
any state. The last block and the range of the draws follow each sample's real length,
so padding on the right is exact. Deviations: the authors' code needs lengths divisible
by C and masks by adding -1e4; here the last block may be short. Their code and LRA's
draw from the first 1,024 positions only, and LRA's draws differ from layer to layer.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import dense, inputs
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.attention.softmax import key_sets, patterns

__all__ = ["bigbird_attention", "bigbird_weights"]


@documents_in_turn
def bigbird_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    block: int = 64,
    num_random: int = 3,
    seed: int = 0,
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes softmax attention over neighbouring, global and random blocks.

    Args:
      query, key, value, mask, is_causal, segment_ids: as in `local_attention`. Padding
        is exact on the right.
      block: C, positions of a block.
      num_random: R, random blocks for each block and head.
      seed: of the random blocks; it may differ between the layers of a model.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, or query and key
        differ in length.
    """
    call = Call.of(query, key, value, mask, is_causal, precision=precision)
    blocks = _Blocks(block, num_random, seed, is_causal)
    pattern = patterns.Pattern(blocks.size, blocks.sets, blocks.global_runs)
    return patterns.attention(call, "bigbird", pattern)


bigbird_weights = dense.weights_of(bigbird_attention, "Rows sum to one or zero.")


class _Blocks:
    """Which blocks see each other."""

    def __init__(self, size: int, num_random: int, seed: int, is_causal: bool):
        self.size = inputs.check_size("block", size)
        self.num_random = inputs.check_size("num_random", num_random, 0)
        self.seed = inputs.check_size("seed", seed, 0)
        self.is_causal = is_causal

    def last(self, sequence: key_sets.Sequence) -> jax.Array:
        """Each sample's last block, `[1 or B]`."""
        return jnp.maximum(sequence.position.max(1), 0) // self.size

    def global_runs(self, sequence: key_sets.Sequence) -> list[patterns.Run]:
        """The two global blocks."""
        if self.is_causal:
            return []
        last = self.last(sequence)
        return [(first * self.size, self.size) for first in (0 * last, last)]

    def random(self, last: jax.Array, heads: int, count: int) -> jax.Array:
        """`[1 or B, N, P, R]`: the random blocks of each block; -1 = none."""
        row = jnp.arange(count, dtype=jnp.int32)[None, None]
        head = jnp.arange(heads, dtype=jnp.int32)[None, :, None]
        last = last[:, None, None]
        # Blocks 1 to free, then those after the gap.
        if self.is_causal:
            begin, gap = row, jnp.zeros_like(row)
            free = jnp.maximum(row - 2, 0)
        else:
            begin = jnp.maximum(row - 1, 1)
            gap = jnp.minimum(row + 1, last - 1) - begin + 1
            free = jnp.where((row > 0) & (row < last), last - 1 - gap, 0)
        free, begin, gap, head = jnp.broadcast_arrays(free, begin, gap, head)
        picks: list[jax.Array] = []
        for number in range(self.num_random):
            # Floyd's algorithm for drawing distinct numbers below `free`.
            top = free - self.num_random + number
            choices = jnp.maximum(top + 1, 1).astype(jnp.uint32)
            drawn = _hash(self.seed, head, row, number) % choices
            drawn = drawn.astype(jnp.int32)
            for earlier in picks:
                drawn = jnp.where(drawn == earlier, top, drawn)
            picks.append(jnp.where(free > self.num_random, drawn, number))
        table = jnp.stack(picks, -1)
        chosen = 1 + table + jnp.where(1 + table >= begin[..., None], gap[..., None], 0)
        return jnp.where(table < free[..., None], chosen, -1)

    def sets(self, sequence: key_sets.Sequence) -> list[key_sets.Keys]:
        """The key sets of each block, without duplicate pairs."""
        size, block = self.size, self.last(sequence)
        heads, length = sequence.key.shape[1:3]
        last = block[:, None, None, None, None]

        def is_far(query: jax.Array, _: jax.Array) -> jax.Array:
            return query // size > 1

        def is_far_from_last(query: jax.Array, _: jax.Array) -> jax.Array:
            return (jnp.abs(query // size - last) > 1) & (last > 0)

        after = 0 if self.is_causal else size
        first = key_sets.part(sequence, 0, size)
        sets = [
            key_sets.band(sequence, size, size, after, key_sets.always),
            key_sets.all_keys(first, is_far),
        ]
        if not self.is_causal:
            final = key_sets.take_part(sequence, size, block)
            sets.append(key_sets.all_keys(final, is_far_from_last))
        if self.num_random:
            table = self.random(block, heads, -(-length // size))
            sets.append(
                key_sets.blocks_of_table(sequence, size, table, key_sets.always)
            )
        return sets


def _hash(seed: int, head: jax.Array, row: jax.Array, number: int) -> jax.Array:
    """Random bits, uint32, from three numbers and a seed."""
    bits = jnp.asarray(seed & 0xFFFFFFFF, jnp.uint32)
    for word in (head, row, jnp.asarray(number, jnp.int32)):
        bits = bits ^ word.astype(jnp.uint32)
        for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        bits = bits ^ (bits >> 16)
    return bits
