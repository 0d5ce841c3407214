"""What the Hopper kernels are made of: tiles, products, features, the walk over chunks.

A program is one warpgroup of 128 threads. Tiles are 64 x 64: what the tensor cores take
from shared memory, with accumulators in registers. `Ops` is the only place that speaks
of registers' layouts and of tensor cores. In the interpreter, which knows neither, it
falls back to plain loads and products; everything else, the copies between the memories
included, is the same code.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.attention.pallas.spec import MAPS, Spec, plus

TILE = 64
_TILED = plgpu.Layout.WGMMA
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
# The index left `load`'s arguments in jax 0.12.
_INDEXED = "idx" in inspect.signature(plgpu.load).parameters

Terms = list[jax.Array]


def interpreter() -> Any:
    """The parameters of Mosaic GPU's interpreter."""
    exported = getattr(plgpu, "InterpretGPUParams", None)
    if exported is not None:
        return exported()
    # jax 0.10 has it, but does not export it.
    from jax._src.pallas.mosaic_gpu.interpret import params

    return params.InterpretGPUParams()


@dataclass(frozen=True)
class Ops:
    """Loads, layouts and products, on the device or in the interpreter.

    A "row vector" `[64]` below holds one number for each row of a tile, a "column
    vector" one for each column; they lie in different registers.
    """

    interpret: bool

    def _load(self, ref: Any, layout: Any) -> jax.Array:
        if self.interpret:
            return ref[...]
        index = ((),) if _INDEXED else ()
        # Shared memory has a fast path; the states come from global memory, once.
        return plgpu.load(ref, *index, layout=layout, optimized=False)

    def tile(self, ref: Any) -> jax.Array:
        if self.interpret:
            return ref[...]
        index = ((),) if _INDEXED else ()
        return plgpu.load(ref, *index, layout=_TILED)

    def stored_tile(self, ref: Any) -> jax.Array:
        return self._load(ref, _TILED)

    def by_row(self, ref: Any) -> jax.Array:
        return self._load(ref, _BY_ROW)

    def by_column(self, ref: Any) -> jax.Array:
        return self._load(ref, _BY_COLUMN)

    def zero_tile(self) -> jax.Array:
        return self._cast(jnp.zeros((TILE, TILE), jnp.float32), _TILED)

    def zero_columns(self) -> jax.Array:
        return self._cast(jnp.zeros((TILE,), jnp.float32), _BY_COLUMN)

    def _cast(self, x: jax.Array, layout: Any) -> jax.Array:
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def index(self, axis: int) -> jax.Array:
        """Each element's row (0) or column (1), `[64, 64]`."""
        shape = (TILE, TILE)
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILED)

    def row_numbers(self) -> jax.Array:
        if self.interpret:
            return lax.iota(jnp.int32, TILE)
        return plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_BY_ROW)

    def down(self, rows: jax.Array) -> jax.Array:
        """A row vector in every column, `[64, 64]`."""
        return lax.broadcast_in_dim(rows, (TILE, TILE), [0])

    def across(self, columns: jax.Array) -> jax.Array:
        """A column vector in every row, `[64, 64]`."""
        return lax.broadcast_in_dim(columns, (TILE, TILE), [1])

    def transposed(self, ref: Any) -> Any:
        """A tile in shared memory, read by columns."""
        return ref[...].T if self.interpret else ref.transpose((1, 0))

    def product(self, *pairs: tuple[Any, Any]) -> jax.Array:
        """The float32 sum of ``a b``; b is in shared memory, a there or an array."""
        if self.interpret:
            products = [
                jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
                for a, b in pairs
            ]
            return plus(products)

        def multiplied(accumulator: Any) -> jax.Array:
            for a, b in pairs:
                plgpu.wgmma(accumulator, a, b)
            return accumulator[...]

        return pl.run_scoped(multiplied, plgpu.WGMMAAccumulatorRef((TILE, TILE)))


@dataclass(frozen=True)
class Program:
    """One segment of one head: a walk over its chunks of 64 positions.

    Attributes:
      spec: what is computed; its ``block`` is the length of a segment.
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
        return Ops(self.spec.interpret)

    @property
    def segments(self) -> int:
        return self.shape[2] // self.spec.block

    @property
    def terms(self) -> range:
        return range(self.spec.terms)

    def tile_memory(self) -> Any:
        """A tile in shared memory, as tensor cores and copies want it."""
        return plgpu.SMEM((TILE, TILE), self.dtype, transforms=self._transforms)

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
        self, body: Callable[..., Any], refs: Sequence[tuple[str, Any]], carry: Any
    ) -> Any:
        """Runs ``carry = body(first, tiles, carry)`` over the segment's chunks.

        ``first`` is a chunk's first position. The tiles of the refs, by the names given
        with them, are copied to shared memory while earlier ones are computed on: those
        of arrays `[B, T, N, 64]`, of lines `[B, N, T]` and of masks `[B, T]`.
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
            named = dict(zip((name for name, _ in refs), tiles, strict=True))
            return body(place(indices[0]) * TILE, named, carry)

        return plgpu.emit_pipeline(
            step,
            grid=(count,),
            in_specs=[specs(ref) for _, ref in refs],
            max_concurrent_steps=2,
            init_carry=carry,
        )(*(ref for _, ref in refs))

    def weights(self, first: Any, scale_ref: Any) -> Terms | None:
        """Cosine and sine of the positions' angles, row vectors; None without."""
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

    def pulled_back(
        self, terms: Terms, slope: jax.Array, weights: Terms | None
    ) -> jax.Array:
        """The gradient of x from those of the terms, in the arrays' dtype."""
        if weights is not None:
            terms = [x * self.ops.down(w) for x, w in zip(terms, weights, strict=True)]
        return (plus(terms) * slope).astype(self.dtype)

    def read(self, state_ref: Any, total_ref: Any, segment: Any) -> tuple:
        """State and total of a segment, tuples over the terms."""
        at = (*self.here()[:2], segment)
        state = tuple(self.ops.stored_tile(state_ref.at[*at, t]) for t in self.terms)
        total = tuple(self.ops.by_column(total_ref.at[*at, t]) for t in self.terms)
        return state, total

    def nothing(self) -> tuple:
        """An empty state and total."""
        state = tuple(self.ops.zero_tile() for _ in self.terms)
        return state, tuple(self.ops.zero_columns() for _ in self.terms)

    def write(self, refs: tuple[Any, Any], carry: tuple) -> None:
        """The inverse of `read`, for the program's own segment."""
        for term in self.terms:
            for ref, sums in zip(refs, carry, strict=True):
                ref.at[*self.here(), term][...] = sums[term]

    def stage(self, refs: list[Any], tiles: Any) -> None:
        """Puts float32 or other arrays into shared memory; `commit` follows."""
        for ref, tile in zip(refs, tiles, strict=True):
            ref[...] = tile.astype(self.dtype)

    def run(
        self,
        kernel: Callable[..., None],
        arrays: list[jax.Array],
        outputs: list[jax.ShapeDtypeStruct],
        scratch: list[Any],
    ) -> list[jax.Array]:
        """Runs ``kernel(*arrays, *outputs, *scratch)`` for every segment and head."""
        kind = jax.typeof(arrays[0]).manual_axis_type
        outputs = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind)
            for x in outputs
        ]
        more = {"interpret": interpreter()} if self.spec.interpret else {}
        grid = (*self.shape[:2], self.segments)
        return plgpu.kernel(
            kernel,
            out_type=outputs,
            scratch_types=scratch,
            grid=grid,
            grid_names=("b", "n", "g"),
            **more,
        )(*arrays)


def send(first: Any, pairs: list[tuple[Any, Any]], at: tuple[Any, Any]) -> None:
    """Copies staged tiles `[64, 64]` or lines `[64]` to their place in the arrays.

    The caller has waited for the copies before (`plgpu.wait_smem_to_gmem`), put the
    values into shared memory and committed them.
    """
    batch, head = at
    rows = pl.ds(first, TILE)
    for staged, ref in pairs:
        wide = len(ref.shape) == 4
        place = (batch, rows, head) if wide else (batch, head, rows)
        plgpu.copy_smem_to_gmem(staged, ref.at[*place])
