"""Loads, layouts and products of the Hopper kernels, on the device and off it.

Only this file deals with register layouts and tensor cores. The interpreter supports
neither; there `Ops` falls back to plain loads and products, and everything else,
including the copies between memories, is the same code.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.spec import plus

TILE = 64
_TILED = plgpu.Layout.WGMMA
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)
# jax 0.12 removed the index from `load`'s arguments.
_INDEXED = "idx" in inspect.signature(plgpu.load).parameters


def interpreter() -> Any:
    """The parameters for Mosaic GPU's interpreter."""
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
    vector" one for each column; their register layouts differ.
    """

    interpret: bool

    def _load(self, ref: Any, layout: Any, optimized: bool = False) -> jax.Array:
        if self.interpret:
            return ref[...]
        index = ((),) if _INDEXED else ()
        # Shared memory has a fast path; the states come from global memory, once.
        return plgpu.load(ref, *index, layout=layout, optimized=optimized)

    def tile(self, ref: Any) -> jax.Array:
        """Loads a tile `[64, 64]` from shared memory."""
        return self._load(ref, _TILED, optimized=True)

    def stored_tile(self, ref: Any) -> jax.Array:
        """Loads a tile of a state."""
        return self._load(ref, _TILED)

    def by_row(self, ref: Any) -> jax.Array:
        """Loads a row vector."""
        return self._load(ref, _BY_ROW)

    def by_column(self, ref: Any) -> jax.Array:
        """Loads a column vector."""
        return self._load(ref, _BY_COLUMN)

    def zero_tile(self) -> jax.Array:
        """Zeros `[64, 64]`."""
        return self._zeros((TILE, TILE), _TILED)

    def zero_columns(self) -> jax.Array:
        """A column vector of zeros."""
        return self._zeros((TILE,), _BY_COLUMN)

    def _zeros(self, shape: tuple[int, ...], layout: Any) -> jax.Array:
        x = jnp.zeros(shape, jnp.float32)
        return x if self.interpret else plgpu.layout_cast(x, layout)

    def index(self, axis: int) -> jax.Array:
        """Each element's row (0) or column (1), `[64, 64]`."""
        shape = (TILE, TILE)
        if self.interpret:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_TILED)

    def row_numbers(self) -> jax.Array:
        """A row vector of 0 to 63."""
        if self.interpret:
            return lax.iota(jnp.int32, TILE)
        return plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=_BY_ROW)

    def down(self, rows: jax.Array) -> jax.Array:
        """Broadcasts a row vector to every column, `[64, 64]`."""
        return lax.broadcast_in_dim(rows, (TILE, TILE), [0])

    def across(self, columns: jax.Array) -> jax.Array:
        """Broadcasts a column vector to every row, `[64, 64]`."""
        return lax.broadcast_in_dim(columns, (TILE, TILE), [1])

    def transpose(self, ref: Any) -> Any:
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

        def multiply(accumulator: Any) -> jax.Array:
            for a, b in pairs:
                plgpu.wgmma(accumulator, a, b)
            return accumulator[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, TILE)))
