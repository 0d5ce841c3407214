"""How `[B, T, N, H]` arrays are cut into the blocks of TPU programs.

The last axis of a block is a multiple of 128 lanes, or the whole axis. So `[B, T, N,
H]` is read as `[B, T, N H]`, which costs nothing, and a program handles as many
neighbouring heads as fill the lanes. For widths where no group of up to `WIDEST`
columns fills them, arrays are first transposed to `[B N, T, H]`, at the cost of a pass
over memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lra_jax.kernels.spec import Gradients, Inputs, Spec
from lra_jax.kernels.tpu.parts import Chunk, Group

LANES = 128
WIDEST = 256


@dataclass(frozen=True)
class Layout:
    """How heads are divided among programs.

    Attributes:
      group: the heads of one program.
      groups: programs that share a row of the arrays.
      rows: rows of the arrays for each sample: 1, or N if heads come first.
    """

    group: Group
    groups: int
    rows: int

    def lay(self, x: jax.Array) -> jax.Array:
        """`[B, T, N, W]` -> `[B, T, N W]` or `[B N, T, W]`."""
        batch, length, heads, width = x.shape
        if self.rows == 1:
            return x.reshape(batch, length, heads * width)
        return jnp.swapaxes(x, 1, 2).reshape(batch * heads, length, width)

    def unlay(self, x: jax.Array) -> jax.Array:
        """The inverse of `lay`."""
        heads = self.group.heads * self.groups * self.rows
        if self.rows == 1:
            return x.reshape(*x.shape[:2], heads, -1)
        x = x.reshape(-1, heads, *x.shape[1:])
        return jnp.swapaxes(x, 1, 2)

    def gradients(self, arrays: Iterable[jax.Array]) -> Gradients:
        """`unlay` of the gradients of query, key and value."""
        query, key, value = (self.unlay(x) for x in arrays)
        return query, key, value


def layout(operands: Inputs) -> Layout:
    """The smallest group of heads that fills whole registers."""
    _, _, heads, width = operands.query.shape
    value_width = operands.value.shape[3]
    for size in range(1, heads + 1):
        columns = size * width, size * value_width
        if heads % size or max(columns) > max(WIDEST, width, value_width):
            continue
        if size == heads or all(x % LANES == 0 for x in columns):
            return Layout(Group(size, width, value_width), heads // size, 1)
    return Layout(Group(1, width, value_width), 1, heads)


@dataclass(frozen=True)
class Call:
    """One kernel over the grid (rows, groups, blocks), the last axis in order.

    Attributes:
      spec: the computation.
      layout: of the heads.
      length: positions that the grid walks over.
      dtype: of the arrays.
      backward: walk from the last block to the first.
    """

    spec: Spec
    layout: Layout
    length: int
    dtype: jnp.dtype
    backward: bool = False

    @property
    def blocks(self) -> int:
        """Number of blocks in a sequence."""
        return -(-self.length // self.spec.block)

    def place(self, step: Any) -> Any:
        """The block that a step of the grid processes."""
        return self.blocks - 1 - step if self.backward else step

    def rows_of(self, width: int) -> pl.BlockSpec:
        """Blocks of an array from `Layout.lay`, with W columns per head."""
        shape = (None, self.spec.block, self.layout.group.heads * width)
        return pl.BlockSpec(shape, lambda b, n, i: (b, self.place(i), n))

    @property
    def keys(self) -> pl.BlockSpec:
        """Blocks of queries or keys."""
        return self.rows_of(self.layout.group.width)

    @property
    def values(self) -> pl.BlockSpec:
        """Blocks of values or outputs."""
        return self.rows_of(self.layout.group.value_width)

    @property
    def mask(self) -> pl.BlockSpec:
        """Blocks of a mask `[B, 1, S]`."""
        rows = self.layout.rows
        shape = (None, 1, self.spec.block)
        return pl.BlockSpec(shape, lambda b, n, i: (b // rows, 0, self.place(i)))

    def sums(
        self, rows: int, shapes: Iterable[tuple[int, ...]], by_block: bool = False
    ) -> list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]:
        """Float32 sums for each group of heads, or each of its blocks, as outputs."""
        axes = (rows, self.layout.groups, *([self.blocks] * by_block))
        structs = [jax.ShapeDtypeStruct((*axes, *x), jnp.float32) for x in shapes]
        return self.lay_out(structs, by_block)

    def lay_out(
        self, sums: Iterable[Any], by_block: bool = False
    ) -> list[tuple[Any, pl.BlockSpec]]:
        """Sums `[rows, groups, ...]` or, by block, `[rows, groups, blocks, ...]`."""

        def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
            outer = 2 + by_block
            block, zeros = (None,) * outer + shape[outer:], (0,) * (len(shape) - outer)
            if by_block:
                return pl.BlockSpec(
                    block, lambda b, n, i: (b, n, self.place(i), *zeros)
                )
            return pl.BlockSpec(block, lambda b, n, i: (b, n, *zeros))

        return [(x, spec(x.shape)) for x in sums]

    def run(
        self,
        kernel: Callable[..., None],
        arrays: list[tuple[jax.Array, pl.BlockSpec]],
        outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
        scratch: tuple[tuple[int, ...], ...] = (),
    ) -> list[jax.Array]:
        """Runs ``kernel(*inputs, *outputs, *scratch)`` over the grid.

        ``scratch`` are shapes of float32 arrays in VMEM.
        """
        # Under shard_map the outputs vary over the mesh like the inputs.
        kinds = (jax.typeof(x).manual_axis_type for x, _ in arrays)
        kind = max(kinds, key=lambda kind: len(kind.varying))
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=kind)
            for x, _ in outputs
        ]
        return pl.pallas_call(
            kernel,
            grid=(outputs[0][0].shape[0], self.layout.groups, self.blocks),
            in_specs=[spec for _, spec in arrays],
            out_specs=[spec for _, spec in outputs],
            out_shape=shapes,
            scratch_shapes=[pltpu.VMEM(x, jnp.float32) for x in scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            interpret=self.spec.interpret,
        )(*(array for array, _ in arrays))

    @property
    def chunk(self) -> Chunk:
        """The computations of one chunk."""
        return Chunk(self.spec, self.layout.group, self.dtype)

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a group's sums in a program: state and total."""
        group, terms = self.layout.group, self.spec.terms
        return (terms, group.columns, group.value_columns), (terms, group.columns)

    def angles(self, scale: jax.Array) -> tuple[jax.Array, pl.BlockSpec]:
        """One number per sample, `[B]`, as the input that `scale` reads."""
        return scale, pl.BlockSpec(memory_space=pltpu.SMEM)

    def scale(self, scale_ref: Any) -> jax.Array:
        """The sample's angle between neighbouring positions, from `[B]`."""
        return scale_ref[pl.program_id(0) // self.layout.rows]


def like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """An output with the shape and dtype of an input."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
