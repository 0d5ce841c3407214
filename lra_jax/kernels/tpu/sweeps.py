"""TPU kernels that walk over the keys and the queries several times.

One kernel does all of these walks, or *sweeps*: the last axis of its grid runs over the
blocks of the first sweep, then over those of the second, and so on, and the sums stay
in VMEM. An array that takes no part in a sweep keeps its block, so nothing is copied.
If a group's whole sequences fit into VMEM there is a single step, which does one sweep
after another: every array is then read once.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lra_jax.kernels.spec import FlowSpec
from lra_jax.kernels.tpu.flow_parts import FlowCall
from lra_jax.kernels.tpu.layout import LANES, Layout

# Bytes of whole sequences that one step may take, including two buffers per array: a
# program gets 16 MiB of a core's VMEM unless it requests more.
_FITS = 10 << 20
# Up to this many chunks of a block are unrolled.
_UNROLLED = 4


@dataclass(frozen=True)
class Side(FlowCall):
    """The queries or the keys, with their sweeps.

    Attributes:
      starts: the steps of the grid at which the sweeps over this side begin.
      total: the number of grid steps; a single step does all sweeps.
    """

    starts: tuple[int, ...] = (0,)
    total: int = 1

    @property
    def steps(self) -> int:
        """See the base class."""
        return self.total

    def place(self, step: Any) -> Any:
        """The block that a step processes, or keeps between sweeps."""
        if self.blocks == 1:
            return 0
        places = [jnp.clip(step - start, 0, self.blocks - 1) for start in self.starts]
        found = places[0]
        for start, place in zip(self.starts[1:], places[1:], strict=True):
            found = jnp.where(step >= start, place, found)
        return found

    def only(self, sweep: int) -> "Side":
        """The same side, for an array that takes part in only one sweep."""
        return dataclasses.replace(self, starts=(self.starts[sweep],))

    def sweep(self, index: int, body: Callable[[Any, Any], None]) -> None:
        """Runs ``body(slice of the block, its first position)`` for each chunk."""
        begin = self.starts[index]
        # The interpreter cannot evaluate it inside a branch.
        step = pl.program_id(2)

        def run() -> None:
            size, block = self.spec.chunk, self.spec.block
            first = 0 if self.total == 1 else (step - begin) * block

            def turn(at: Any, _: Any = None) -> None:
                place = at * size
                if not isinstance(at, int):
                    place = pl.multiple_of(place, size)
                body(pl.ds(place, size), first + place)

            count = -(-min(block, self.length) // size)
            # The lanes of a mask are sliced at register boundaries or at constants.
            if count <= _UNROLLED or size % LANES:
                for at in range(count):
                    turn(at)
            else:
                jax.lax.fori_loop(0, count, turn, None)

        if self.total == 1:
            run()
        else:
            pl.when((step >= begin) & (step < begin + self.blocks))(run)


def sides(
    spec: FlowSpec,
    found: Layout,
    lengths: tuple[int, int],
    widths: tuple[int, int],
    dtype: jnp.dtype,
    order: str,
) -> tuple[Side, Side]:
    """The queries and keys of one kernel.

    Args:
      spec: what is computed.
      found: the layout of the heads.
      lengths: T and S.
      widths: columns of a group that a kernel holds for a query and for a key, inputs
        and outputs.
      dtype: of the arrays.
      order: the sweeps, "q" over the queries and "k" over the keys.
    """
    unit = spec.chunk if spec.interpret else math.lcm(spec.chunk, LANES)
    rows = [-(-length // unit) * unit for length in lengths]
    pairs = zip(rows, widths, strict=True)
    size = 2 * jnp.dtype(dtype).itemsize * sum(row * width for row, width in pairs)
    whole = spec.fitted and size <= _FITS
    blocks = rows if whole else [min(spec.block, row) for row in rows]
    steps = [-(-x // block) for x, block in zip(lengths, blocks, strict=True)]
    one = steps == [1, 1]
    starts: tuple[list[int], list[int]] = ([], [])
    total = 0
    for side in ("qk".index(letter) for letter in order):
        starts[side].append(total)
        total += steps[side]
    queries, keys = (
        Side(
            dataclasses.replace(spec, block=block),
            found,
            length,
            dtype,
            starts=tuple(begins),
            total=1 if one else total,
        )
        for block, length, begins in zip(blocks, lengths, starts, strict=True)
    )
    return queries, keys
