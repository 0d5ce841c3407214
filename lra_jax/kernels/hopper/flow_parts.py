"""The common parts of the Hopper kernels of causal Flow-Attention.

Within a chunk the flows are row sums of the chunk's products ``x_i . y_j``, with x and
y the features of queries and keys: of ``x y^T`` for the queries, of ``y x^T`` for the
keys. Positions before or after the chunk enter as vectors of H numbers, the sums of
features.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.errors import expected
from lra_jax.kernels.hopper.ops import TILE
from lra_jax.kernels.hopper.parts import Program
from lra_jax.kernels.spec import FlowSpec


class Lines(NamedTuple):
    """Per-position values of a chunk that forward keeps; float32 row vectors."""

    incoming: jax.Array  # I
    outgoing: jax.Array  # O
    allocation: jax.Array  # a
    logit: jax.Array  # O', before it is clipped
    total: jax.Array  # the competition's exponentials up to each position


LINES = len(Lines._fields)


class Sums(NamedTuple):
    """Sums of features before a chunk, or of gradients after it: vectors `[64]`.

    They are in shared memory: as column vectors they would take 64 of a thread's 255
    registers.
    """

    keys: Any  # of y
    queries: Any  # of x
    key_flow: Any  # of y n / O
    query_flow: Any  # of x n / I


# Vectors that forward keeps for each chunk: lines, and the sums before it.
KEPT = LINES + len(Sums._fields)


@dataclass(frozen=True, kw_only=True)
class FlowProgram(Program):
    """One head of one sample: a walk over all of its chunks.

    Attributes:
      width: M; further columns are zero.
    """

    spec: FlowSpec
    width: int

    @property
    def chunks(self) -> int:
        """Number of chunks in a sequence."""
        return self.shape[2] // TILE

    @property
    def clip(self) -> float:
        """Bound on the logits; these kernels are not used without one."""
        if self.spec.clip is None:
            raise expected("clip", "a number", "None")
        return self.spec.clip

    def vectors(self, count: int) -> jax.ShapeDtypeStruct:
        """``count`` vectors of 64 numbers for each chunk."""
        axes = (*self.shape[:2], self.chunks, count, TILE)
        return jax.ShapeDtypeStruct(axes, jnp.float32)

    def tiles(self) -> jax.ShapeDtypeStruct:
        """A tile for each chunk, for products."""
        axes = (*self.shape[:2], self.chunks, TILE, TILE)
        return jax.ShapeDtypeStruct(axes, self.dtype)

    def side(self, tile: Any, stage: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Features for products, the same in float32, and their slope."""
        (rounded,), slope = self.features(tile, None)
        stage[...] = rounded
        return rounded, rounded.astype(jnp.float32), slope

    def summed(self, pairs: jax.Array, seen: jax.Array, stage: Any) -> jax.Array:
        """``sum_j pairs_ij weights_j`` over visible j; ``stage`` holds the weights."""
        return jnp.where(seen, pairs * self.across(stage), 0.0).sum(1)

    def across(self, ref: Any) -> jax.Array:
        """A vector in shared memory, in every row of a tile."""
        return self.ops.across(self.ops.by_column(ref))

    def down(self, ref: Any) -> jax.Array:
        """A vector in shared memory, in every column of a tile."""
        return self.ops.down(self.ops.by_row(ref))

    def grow(self, ref: Any, tile: jax.Array) -> None:
        """Adds the sum of a tile's rows to a vector; `commit_smem` follows."""
        ref[...] = self.ops.by_column(ref) + tile.sum(0)

    def clipped(self, logit: jax.Array) -> jax.Array:
        """The conserved outgoing flow as it enters the competition."""
        return jnp.minimum(jnp.maximum(logit, -self.clip), self.clip)

    def no_sums(self, refs: Any) -> Sums:
        """Empty sums in the refs; `commit_smem` follows."""
        for ref in refs:
            ref[...] = self.ops.zero_columns()
        return Sums(*refs)

    def before(self, features: jax.Array, side: jax.Array, total: Any) -> jax.Array:
        """``(x_i + eps) . (sum_j y_j + eps)`` without the chunk's own products.

        Args:
          features: x.
          side: the sum of x over the columns.
          total: the sum of y before the chunk.
        """
        eps = self.spec.eps
        far = ((features + eps) * self.across(total)).sum(1)
        return far + eps * (side + self.width * eps) + self.spec.extra_eps
