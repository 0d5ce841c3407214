"""One chunk of linear attention inside a TPU kernel: values in, values out.

A TPU's vector registers have 128 lanes, more than most head widths. So a program
processes G neighbouring heads together, as the columns of one matrix `[C, G H]`, which
is how they are stored: nothing is transposed on the way in or out. Products of all
heads at once are masked to each head's own columns; the matrix unit is 128 wide either
way, so this costs nothing for heads of up to 128.

cosFormer's weights are a sum of two products, ``cos a cos b + sin a sin b``. Features
are therefore a list of *terms* `[C, G H]`, one or two, as are the states.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lra_jax.kernels.spec import MAPS, Spec, plus

Terms = list[jax.Array]


@dataclass(frozen=True)
class Group:
    """G heads of width H with values of width Hv, side by side.

    Attributes:
      heads: G.
      width: H.
      value_width: Hv.
    """

    heads: int
    width: int
    value_width: int

    @property
    def columns(self) -> int:
        """Columns of all its keys, side by side."""
        return self.heads * self.width

    @property
    def value_columns(self) -> int:
        """Columns of all its values."""
        return self.heads * self.value_width

    @property
    def packed_rows(self) -> int:
        """Rows of a state in memory: one head's if they align, else all heads'."""
        return self.width if self.width % 8 == 0 else self.columns

    def of_head(self, x: jax.Array, head: int, width: int) -> jax.Array:
        """x `[C, G width]` with the columns of other heads zeroed."""
        if self.heads == 1:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        return zero_invalid(x, lane // width == head)

    def keys_of(self, x: jax.Array, head: int) -> jax.Array:
        """Keys with the columns of other heads zeroed."""
        return self.of_head(x, head, self.width)

    def values_of(self, x: jax.Array, head: int) -> jax.Array:
        """Values with the columns of other heads zeroed."""
        return self.of_head(x, head, self.value_width)

    def diagonal(self, state: jax.Array) -> jax.Array:
        """A state `[G H, G Hv]` without the products of different heads."""
        if self.heads == 1:
            return state
        row = jax.lax.broadcasted_iota(jnp.int32, state.shape, 0) // self.width
        lane = jax.lax.broadcasted_iota(jnp.int32, state.shape, 1) // self.value_width
        return zero_invalid(state, row == lane)

    def pack(self, state: jax.Array) -> jax.Array:
        """`[G H, G Hv]` -> `[H, G Hv]`, each head's block in its own columns."""
        state = self.diagonal(state)
        if self.packed_rows == self.columns:
            return state
        width = self.width
        return plus(state[h * width : (h + 1) * width] for h in range(self.heads))

    def unpack(self, state: jax.Array) -> jax.Array:
        """The inverse of `pack`."""
        if self.packed_rows == self.columns:
            return state
        return self.diagonal(jnp.concatenate([state] * self.heads, 0))

    def spread(self, columns: Terms, width: int) -> jax.Array:
        """A column `[C, 1]` for each head -> `[C, G width]`."""
        shape = (columns[0].shape[0], self.heads * width)
        if self.heads == 1:
            return jnp.broadcast_to(columns[0], shape)
        zeros = jnp.zeros(shape, columns[0].dtype)
        return plus(
            self.of_head(zeros + column, head, width)
            for head, column in enumerate(columns)
        )


@dataclass(frozen=True)
class Chunk:
    """The mathematics of a chunk for a spec and a group of heads.

    Attributes:
      spec: the computation.
      group: the heads.
      dtype: of the operands of products; sums are float32.
    """

    spec: Spec
    group: Group
    dtype: jnp.dtype

    def dot(
        self, a: jax.Array, b: jax.Array, axes: str = "nn", exact: bool = False
    ) -> jax.Array:
        """``a b`` in float32; "t" transposes: "nt" is ``a b^T``, "tn" is ``a^T b``.

        With ``exact``, products of float32 operands are exact, whatever the precision.
        """
        over = ((int(axes[0] == "n"),), (int(axes[1] == "t"),))
        precision = self.spec.precision
        if exact and self.dtype == jnp.float32:
            precision = jax.lax.Precision.HIGHEST
        return jax.lax.dot_general(
            a.astype(self.dtype),
            b.astype(self.dtype),
            (over, ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    def weights(self, first: jax.Array, size: int, scale: jax.Array) -> Terms | None:
        """Cosine and sine `[C, 1]` of the positions' angles; None without angles."""
        if not self.spec.rotate:
            return None
        place = first + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        angle = place.astype(jnp.float32) * scale
        return [jnp.cos(angle), jnp.sin(angle)]

    def features(
        self, x: jax.Array, valid: jax.Array, weights: Terms | None
    ) -> tuple[Terms, jax.Array]:
        """The terms of phi(x), zero where not valid, and phi'(x), for `[C, G H]`."""
        # Hidden before the map, since x may hold NaN, and after it, since phi(0) may
        # not be zero.
        x = jnp.where(valid, x.astype(jnp.float32), 0.0)
        y, slope = MAPS[self.spec.feature_map](x)
        y, slope = jnp.where(valid, y, 0.0), jnp.where(valid, slope, 0.0)
        terms = [y] if weights is None else [y * weight for weight in weights]
        return [term.astype(self.dtype) for term in terms], slope

    def pull_back(
        self, terms: Terms, slope: jax.Array, weights: Terms | None
    ) -> jax.Array:
        """The gradient of x from the gradients of its terms."""
        if weights is None:
            return terms[0] * slope
        pairs = zip(terms, weights, strict=True)
        return plus(term * weight for term, weight in pairs) * slope

    def scores(self, query: Terms, key: Terms, head: int) -> jax.Array:
        """The lower triangle of the weights `[C, C]` of one head."""
        pairs = zip(query, key, strict=True)
        keys_of = self.group.keys_of
        return lower(plus(self.dot(keys_of(q, head), k, "nt") for q, k in pairs))

    def past(self, query: Terms, state: Terms, total: Terms) -> tuple[jax.Array, Terms]:
        """Numerators `[C, G Hv]` and each head's denominators `[C, 1]` from a state.

        ``state`` holds only the diagonal blocks.
        """
        pairs = zip(query, state, strict=True)
        num = plus(self.dot(q, s) for q, s in pairs)
        each = zip(query, total, strict=True)
        dens = plus(q.astype(jnp.float32) * z for q, z in each)
        heads = range(self.group.heads)
        return num, [row_sums(self.group.keys_of(dens, head)) for head in heads]

    def grow(
        self,
        key: Terms,
        value: jax.Array,
        state: Terms,
        total: Terms,
        weights: jax.Array | None = None,
    ) -> tuple[Terms, Terms]:
        """The state and total after the chunk; ``weights`` multiply rows in the total.

        In the backward pass keys are queries, values are the gradients of numerators,
        and the weights are the gradients of denominators.
        """
        state = [
            s + self.group.diagonal(self.dot(k, value, "tn"))
            for s, k in zip(state, key, strict=True)
        ]
        rows = [k.astype(jnp.float32) for k in key]
        rows = rows if weights is None else [row * weights for row in rows]
        sums = [row.sum(0, keepdims=True) for row in rows]
        return state, [z + x for z, x in zip(total, sums, strict=True)]

    def divide(self, num: jax.Array, dens: Terms) -> tuple[jax.Array, jax.Array]:
        """The output `[C, G Hv]` and the reciprocal of its divisor."""
        bounded = [self.spec.bound(den) for den in dens]
        inverse = 1.0 / self.group.spread(bounded, self.group.value_width)
        return num * inverse, inverse

    def slopes(
        self, num: jax.Array, dens: Terms, of_out: jax.Array
    ) -> tuple[jax.Array, Terms]:
        """The gradients of the numerators and of each head's denominators."""
        out, inverse = self.divide(num, dens)
        of_num = of_out.astype(jnp.float32) * inverse
        both = of_num * out
        of_dens = [
            -row_sums(self.group.values_of(both, head)) * self.spec.passes(den)
            for head, den in enumerate(dens)
        ]
        return of_num, of_dens


def row_sums(x: jax.Array) -> jax.Array:
    """`[C, M]` -> `[C, 1]`."""
    return x.sum(1, keepdims=True)


def lower(x: jax.Array) -> jax.Array:
    """A matrix with zeros to the right of its diagonal."""
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) <= row, x, 0.0)


def zero_invalid(x: jax.Array, valid: jax.Array) -> jax.Array:
    """An array with zeros where it, or its row, is not valid, whatever it held."""
    return jnp.where(valid, x, jnp.zeros((), x.dtype))


def valid_rows(
    first: jax.Array, size: int, length: int, mask: jax.Array | None
) -> jax.Array:
    """`[C, 1]`: positions before the end and not hidden by a mask `[1, C]`."""
    place = first + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    valid = place < length
    if mask is None:
        return valid
    return valid & (column(mask) > 0)


def column(x: jax.Array) -> jax.Array:
    """A row `[1, C]` as a column `[C, 1]`."""
    # By way of the diagonal: cheap, and possible in every layout.
    size = x.shape[1]
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    return row_sums(jnp.where(row == lane, x, 0.0))


def start(*refs: Any) -> None:
    """Zeroes the sums of a program before its first block."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for ref in refs:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)


def read(terms: int, state_ref: Any, total_ref: Any) -> tuple[Terms, Terms]:
    """State `[terms, G H, G Hv]` and total `[terms, G H]` as lists."""
    state = [state_ref[term] for term in range(terms)]
    return state, [total_ref[term : term + 1] for term in range(terms)]


def write(state_ref: Any, total_ref: Any, state: Terms, total: Terms) -> None:
    """The inverse of `read`."""
    for term, (s, z) in enumerate(zip(state, total, strict=True)):
        state_ref[term] = s
        total_ref[term : term + 1] = z
