"""The parts of the Hopper kernels: features, states, and the walk over chunks.

A program is one warpgroup of 128 threads. Tiles are 64 x 64, read by the tensor cores
from shared memory, with accumulators in registers.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.ops import TILE, Ops, interpreter
from lra_jax.kernels.spec import DEAD, MAPS, Gradients, Inputs, Spec, plus

Terms = list[jax.Array]


@dataclass(frozen=True)
class Program:
    """One segment of one head: a walk over its chunks of 64 positions.

    Attributes:
      spec: the computation; its ``block`` is the length of a segment.
      shape: B, N and the length T, whole segments.
      dtype: of the arrays and of the operands of products.
      backward: walk from the last chunk to the first.
    """

    spec: Spec
    shape: tuple[int, int, int]
    dtype: jnp.dtype
    backward: bool = False

    @property
    def ops(self) -> Ops:
        """Operations, on the device or in the interpreter."""
        return Ops(self.spec.interpret)

    @property
    def segments(self) -> int:
        """Number of segments in a sequence."""
        return self.shape[2] // self.spec.block

    @property
    def terms(self) -> range:
        """The indices of the states: one, or one of cosines and one of sines."""
        return range(self.spec.terms)

    @property
    def _transforms(self) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)

    def rows(self) -> jax.ShapeDtypeStruct:
        """An array `[B, T, N, 64]`."""
        batch, heads, length = self.shape
        return jax.ShapeDtypeStruct((batch, length, heads, TILE), self.dtype)

    def line(self) -> jax.ShapeDtypeStruct:
        """An array `[B, N, T]`."""
        return jax.ShapeDtypeStruct(self.shape, jnp.float32)

    def states(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """State and total of each segment."""
        axes = (*self.shape[:2], self.segments, self.spec.terms)
        return (
            jax.ShapeDtypeStruct((*axes, TILE, TILE), jnp.float32),
            jax.ShapeDtypeStruct((*axes, TILE), jnp.float32),
        )

    def here(self) -> tuple[Any, Any, Any]:
        """The program's sample, head and segment."""
        batch, head, segment = (lax.axis_index(name) for name in "bng")
        return batch, head, segment

    def walk(
        self,
        body: Callable[..., Any],
        refs: dict[str, Any],
        carry: Any,
    ) -> Any:
        """Runs ``carry = body(first, tiles, carry)`` over the segment's chunks.

        ``first`` is a chunk's first position. ``tiles`` maps the names of the
        refs to their tiles, which are copied to shared memory while earlier ones are in
        use: tiles of arrays `[B, T, N, 64]`, lines `[B, N, T]`, and masks `[B, T]`.
        """
        batch, head, segment = self.here()
        count = self.spec.block // TILE

        def place(step: Any) -> Any:
            return segment * count + (count - 1 - step if self.backward else step)

        def specs(ref: Any) -> plgpu.BlockSpec:
            if len(ref.shape) == 4:
                return plgpu.BlockSpec(
                    (None, TILE, None, TILE),
                    lambda i: (batch, place(i), head, 0),
                    transforms=self._transforms,
                )
            if len(ref.shape) == 3:
                return plgpu.BlockSpec(
                    (None, None, TILE), lambda i: (batch, head, place(i))
                )
            return plgpu.BlockSpec((None, TILE), lambda i: (batch, place(i)))

        def step(indices: Any, *arguments: Any) -> Any:
            *tiles, carry = arguments
            named = dict(zip(refs, tiles, strict=True))
            return body(place(indices[0]) * TILE, named, carry)

        return plgpu.emit_pipeline(
            step,
            grid=(count,),
            in_specs=[specs(ref) for ref in refs.values()],
            max_concurrent_steps=2,
            init_carry=carry,
        )(*refs.values())

    def weights(self, first: Any, scale_ref: Any) -> Terms | None:
        """Cosine and sine of the positions' angles, row vectors; None = no angles."""
        if not self.spec.rotate:
            return None
        place = (self.ops.row_numbers() + first).astype(jnp.float32)
        angle = place * scale_ref[self.here()[0]]
        return [jnp.cos(angle), jnp.sin(angle)]

    def features(
        self, tile: Any, weights: Terms | None, valid: jax.Array | None = None
    ) -> tuple[Terms, jax.Array]:
        """The terms of phi(x), zero where not valid, and phi'(x)."""
        x = self.ops.tile(tile).astype(jnp.float32)
        seen = None if valid is None else self.ops.down(valid) > 0
        x = x if seen is None else jnp.where(seen, x, 0.0)
        y, slope = MAPS[self.spec.feature_map](x)
        if seen is not None:
            y, slope = jnp.where(seen, y, 0.0), jnp.where(seen, slope, 0.0)
        down = self.ops.down
        terms = [y] if weights is None else [y * down(w) for w in weights]
        return [term.astype(self.dtype) for term in terms], slope

    def pull_back(
        self,
        terms: Iterable[jax.Array],
        tile: Any,
        weights: Terms | None,
        valid: jax.Array | None = None,
    ) -> jax.Array:
        """The gradient of x, in the arrays' dtype, from those of a tile's terms."""
        if weights is not None:
            terms = (x * self.ops.down(w) for x, w in zip(terms, weights, strict=True))
        # The slope is recomputed: keeping it would take one register per column.
        total, (_, slope) = plus(terms), self.features(tile, None, valid)
        return (total * slope).astype(self.dtype)

    def read(self, refs: list[Any], segment: Any) -> tuple:
        """State and total of a segment, tuples over the terms."""
        (state_ref, total_ref), at = refs, (*self.here()[:2], segment)
        state = tuple(self.ops.stored_tile(state_ref.at[*at, t]) for t in self.terms)
        total = tuple(self.ops.by_column(total_ref.at[*at, t]) for t in self.terms)
        return state, total

    def put(self, refs: Any, vectors: Any) -> None:
        """Puts vectors into shared memory; `commit_smem` follows."""
        for ref, vector in zip(refs, vectors, strict=True):
            ref[...] = vector

    def columns(self, refs: Any) -> Iterator[jax.Array]:
        """Loads column vectors from shared memory, where they take no registers."""
        return (self.ops.by_column(ref) for ref in refs)

    def visible(self, rows_before: bool) -> jax.Array:
        """Which columns are positions up to the row's position, or from it on."""
        row, column = self.ops.index(0), self.ops.index(1)
        return column <= row if rows_before else row <= column

    def nothing(self) -> tuple:
        """An empty state and total."""
        state = tuple(self.ops.zero_tile() for _ in self.terms)
        return state, tuple(self.ops.zero_columns() for _ in self.terms)

    def write(self, refs: list[Any], carry: tuple) -> None:
        """The inverse of `read`, for the program's own segment."""
        for term in self.terms:
            for ref, sums in zip(refs, carry, strict=True):
                ref.at[*self.here(), term][...] = sums[term]

    def stage(self, refs: list[Any], tiles: Any) -> None:
        """Puts arrays of any dtype into shared memory; `commit_smem` follows."""
        for ref, tile in zip(refs, tiles, strict=True):
            ref[...] = tile.astype(self.dtype)

    def run(
        self,
        kernel: Callable[..., None],
        walked: dict[str, jax.Array],
        others: list[jax.Array],
        outputs: list[jax.ShapeDtypeStruct],
        *,
        tiles: int,
        vectors: int = 0,
    ) -> list[jax.Array]:
        """Runs a kernel for every segment and head.

        Args:
          kernel: called with the refs of the arguments below: a dict and four lists.
          walked: arrays for `walk`, by name.
          others: further inputs.
          outputs: what it returns.
          tiles: tiles `[64, 64]` of shared memory, as tensor cores and copies need it.
          vectors: float32 vectors `[64]` of shared memory.
        """
        sizes = len(others), len(outputs), tiles, vectors

        def by_kind(*refs: Any) -> None:
            each = iter(refs)
            named = {name: next(each) for name in walked}
            kernel(named, *([*itertools.islice(each, size)] for size in sizes))

        tile = plgpu.SMEM((TILE, TILE), self.dtype, transforms=self._transforms)
        scratch = [tile] * tiles + [plgpu.SMEM((TILE,), jnp.float32)] * vectors
        arrays = [*walked.values(), *others]
        more = {"interpret": interpreter()} if self.spec.interpret else {}
        out = plgpu.kernel(
            by_kind,
            out_type=outputs,
            scratch_types=scratch,
            grid=(*self.shape[:2], self.segments),
            grid_names=("b", "n", "g"),
            **more,
        )(*arrays)
        return [_varying_like(x, arrays) for x in out]


def _varying_like(x: jax.Array, arrays: list[jax.Array]) -> jax.Array:
    """Says that a result differs between devices wherever one of its sources does.

    Inside ``jax.shard_map``, where Pallas forgets it.
    """
    axes = {name for y in arrays for name in jax.typeof(y).manual_axis_type.varying}
    axes -= jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(axes), to="varying") if axes else x


def pad(spec: Spec, x: jax.Array, alive: bool = True) -> jax.Array:
    """Pads `[B, T, N, W]` to a multiple of 64 columns and whole segments.

    The added rows are zero, or, if not alive, have zero features.
    """
    missing, narrow = -x.shape[1] % spec.block, -x.shape[3] % TILE
    if not missing and not narrow:
        return x
    pad = [(0, 0), (0, missing), (0, 0), (0, narrow)]
    fill = 0.0 if alive else DEAD.get(spec.feature_map, 0.0)
    return jnp.pad(x, pad, constant_values=fill)


def cut(slopes: Iterable[jax.Array], operands: Inputs) -> Gradients:
    """The gradients of inputs, without the padding that `pad` added."""
    query, key, value = (
        x[:, : like.shape[1], :, : like.shape[3]]
        for x, like in zip(slopes, operands[:3], strict=True)
    )
    return query, key, value


def row_products(a: jax.Array, b: jax.Array, length: int) -> jax.Array:
    """``a_i . b_i`` of `[B, T, N, W]` as a line `[B, N, length]`, padded with zeros."""
    products = (a.astype(jnp.float32) * b.astype(jnp.float32)).sum(3)
    missing = length - products.shape[1]
    return jnp.pad(jnp.swapaxes(products, 1, 2), [(0, 0), (0, 0), (0, missing)])


def send(first: Any, pairs: list[tuple[Any, Any]], at: tuple[Any, Any]) -> None:
    """Copies staged tiles `[64, 64]` or lines `[64]` to their place in the arrays.

    ``at`` is the sample and the head. The caller must have waited for earlier copies
    (`plgpu.wait_smem_to_gmem`), put the values into shared memory and committed them.
    """
    batch, head = at
    rows = pl.ds(first, TILE)
    for staged, ref in pairs:
        place = (batch, rows, head) if len(ref.shape) == 4 else (batch, head, rows)
        plgpu.copy_smem_to_gmem(staged, ref.at[*place])
