"""How the causal forms cut a sequence: chunks inside super-blocks.

What the two are for stands in `lra_jax.attention.causal.chunks`.
"""

from dataclasses import dataclass
from typing import Any

import jax

Tree = Any

# Positions of all rows in a super-block, and those of one row at least and at most.
# Measured on a CPU: docs/performance.md.
_TOGETHER = 1024
_SHORTEST, _LONGEST = 64, 256


@dataclass(frozen=True)
class Chunking:
    """How the causal forms cut a sequence; never changes a result beyond rounding.

    Attributes:
      chunk: positions computed quadratically, C.
      block: positions of a super-block; rounded to whole chunks. None chooses by the
        number of rows, that is of samples times heads: the more there are, the fewer
        positions of all of them fit into the caches together.
      implementation: "loop" walks over super-blocks. "parallel" makes the whole
        sequence one of them, whose chunk states come from an associative scan: more
        memory, but no loop. None chooses by the backend.
    """

    chunk: int = 64
    block: int | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name, size in (("chunk", self.chunk), ("block", self.block)):
            if size is None and name == "block":
                continue
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected a positive int, got {size!r}")
        if self.implementation not in (None, "loop", "parallel"):
            raise ValueError(
                "implementation: expected 'loop', 'parallel' or None, "
                f"got {self.implementation!r}"
            )

    def plan(self, length: int, rows: int = 8) -> "Plan":
        """The layout for sequences of this length.

        Args:
          length: T.
          rows: samples times heads, B N.
        """
        implementation = self.implementation
        if implementation is None:
            # On a CPU the loop keeps its working set in the caches. An accelerator
            # pays several kernel launches a turn of a loop, and has the memory.
            on_cpu = jax.default_backend() == "cpu"
            implementation = "loop" if on_cpu else "parallel"
        chunk = min(self.chunk, length)
        chunks = -(-length // chunk)
        if implementation == "parallel":
            return Plan(chunk, chunks, 1, True)
        block = self.block
        if block is None:
            block = min(max(_TOGETHER // max(1, rows), _SHORTEST), _LONGEST)
        blocks = -(-chunks // max(1, block // chunk))
        # Evenly filled blocks need less padding than full ones and a nearly empty last.
        return Plan(chunk, -(-chunks // blocks), blocks, False)


@dataclass(frozen=True)
class Plan:
    """A sequence as ``blocks`` super-blocks of ``chunks`` chunks of ``chunk``."""

    chunk: int
    chunks: int
    blocks: int
    parallel: bool

    @property
    def length(self) -> int:
        """Positions that it has room for."""
        return self.blocks * self.chunks * self.chunk

    def split(self, tree: Tree) -> Tree:
        """`[B, N, chunks * chunk, ...]` -> `[B, N, chunks, chunk, ...]`."""
        return jax.tree.map(
            lambda x: x.reshape(*x.shape[:2], self.chunks, self.chunk, *x.shape[3:]),
            tree,
        )

    def join(self, tree: Tree) -> Tree:
        """The inverse of `split`."""
        return jax.tree.map(
            lambda x: x.reshape(*x.shape[:2], self.chunks * self.chunk, *x.shape[4:]),
            tree,
        )
