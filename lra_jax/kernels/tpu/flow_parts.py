"""The common parts of Flow-Attention's TPU kernels: flows of a chunk, sums, features.

Flow-Attention's values for a position are one number per head each. In registers such a
number fills all of the head's columns, `[C, G H]` for a chunk of a group of heads, so
that it multiplies features directly and no register holds a single number. Sums over a
head's columns are products with a matrix of ones and zeros, and so are the running sums
over a chunk's positions: two products of the matrix unit's size, for all heads at once.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.kernels.spec import FlowSpec, divisor
from lra_jax.kernels.tpu.layout import Call
from lra_jax.kernels.tpu.parts import Chunk, row_sums, valid_rows


class Rows(NamedTuple):
    """A chunk of queries or keys."""

    features: jax.Array  # phi(x), [C, G H] float32, rounded to the arrays' dtype
    slope: jax.Array  # phi'(x)
    valid: jax.Array  # [C, 1]


@dataclass(frozen=True)
class FlowChunk(Chunk):
    """The mathematics of a chunk of Flow-Attention for a group of heads."""

    spec: FlowSpec

    def rows(
        self, x: jax.Array, first: jax.Array, length: int, mask: jax.Array | None
    ) -> Rows:
        """The features of the positions from ``first`` on, zero where hidden."""
        valid = valid_rows(first, x.shape[0], length, mask)
        (terms,), slope = self.features(x, valid, None)
        return Rows(terms.astype(jnp.float32), slope, valid)

    def head_sums(self, x: jax.Array) -> jax.Array:
        """The sum of each head's columns, in all of them: `[C, G H]`."""
        if self.group.heads == 1:
            return jnp.broadcast_to(row_sums(x), x.shape)
        size, width = x.shape[1], self.group.width
        row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0) // width
        lane = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1) // width
        ones = jnp.where(row == lane, 1.0, 0.0)
        return self.dot(x, ones, exact=True)

    def so_far(self, x: jax.Array) -> jax.Array:
        """Sums over the chunk's rows up to each one, `[C, G H]`."""
        return self.dot(_triangle(x.shape[0]), x, exact=True)

    def from_here(self, x: jax.Array) -> jax.Array:
        """Sums over the chunk's rows from each one on, `[C, G H]`."""
        return self.dot(_triangle(x.shape[0]), x, "tn", exact=True)

    def inner(self, features: jax.Array, total: jax.Array) -> jax.Array:
        """``(features + eps) . (total + eps) + extra_eps`` of each head."""
        eps = self.spec.eps
        return self.head_sums((features + eps) * (total + eps)) + self.spec.extra_eps

    def flow(self, features: jax.Array, total: jax.Array) -> jax.Array:
        """`inner` as a divisor."""
        return divisor(self.inner(features, total))

    def clipped(self, logits: jax.Array) -> jax.Array:
        """The conserved outgoing flow as it enters the competition."""
        clip = self.spec.clip
        return logits if clip is None else jnp.clip(logits, -clip, clip)

    def passes(self, logits: jax.Array, slope: jax.Array) -> jax.Array:
        """The gradient of the logits from that of `clipped`."""
        clip = self.spec.clip
        if clip is None:
            return slope
        return jnp.where((logits <= clip) & (logits >= -clip), slope, 0.0)

    def shares(self, logits: jax.Array, top: Any, seen: jax.Array) -> jax.Array:
        """``exp(logits - top)``, zero where hidden; rounded as in products."""
        found = jnp.where(seen, jnp.exp(self.clipped(logits) - top), 0.0)
        return found.astype(self.dtype).astype(jnp.float32)

    def outer(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """``sum_i a_i b_i^T`` of each head, `[G H, G Hv]`."""
        return self.group.diagonal(self.dot(a, b, "tn"))


@dataclass(frozen=True)
class FlowCall(Call):
    """A kernel of Flow-Attention."""

    spec: FlowSpec

    @property
    def chunk(self) -> FlowChunk:
        """The computations of one chunk."""
        return FlowChunk(self.spec, self.layout.group, self.dtype)


def sigmoid(x: jax.Array) -> jax.Array:
    """The sigmoid, for arguments that are not far below zero."""
    return 1.0 / (1.0 + jnp.exp(-x))


def down(x: jax.Array) -> jax.Array:
    """The sum of all rows, `[1, G H]`."""
    return x.sum(0, keepdims=True)


def _triangle(size: int) -> jax.Array:
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return jnp.where(lane <= row, 1.0, 0.0)
