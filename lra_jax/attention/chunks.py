"""The loop under every causal form: chunks inside super-blocks.

A causal linear mechanism needs a running sum of matrices. Kept for every position it is
M times as large as the input; walked position by position it is a loop of tiny steps.
So the sequence is cut twice:

- a *chunk* (64 positions) is computed quadratically, as a masked product of pairs; what
  lies before it enters through one state, the sum of its outer products;
- a *super-block* (512 positions) holds several chunks, which run in parallel: their
  states are prefix sums of the chunks' own contributions. A loop over the super-blocks
  carries the state on.

Gradients. The loop has its own derivative: it keeps the inputs and one state for each
super-block, walks backward and recomputes everything else, so that memory is linear in
the length and small beside the inputs. Forward-mode derivatives (``jax.jvp``) are
therefore not available; gradients of gradients are.

A mechanism gives the loop its *block*, which maps the state before a super-block and
the block's arrays to its outputs and the state after it (`causal.LinearBlock`,
`flow_causal.FlowBlock`). One position of a stream is a super-block of length 1: there
is no second formula for decoding.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any


@dataclass(frozen=True)
class Chunking:
    """How the causal forms cut a sequence; never changes a result beyond rounding.

    Attributes:
      chunk: positions computed quadratically, C.
      block: positions of a super-block; rounded to whole chunks.
      implementation: "loop" walks over super-blocks. "parallel" makes the whole
        sequence one of them, whose chunk states come from an associative scan: more
        memory, but no loop. None chooses by the backend.
    """

    chunk: int = 64
    block: int = 512
    implementation: str | None = None

    def __post_init__(self) -> None:
        for name, size in (("chunk", self.chunk), ("block", self.block)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: expected a positive int, got {size!r}")
        if self.implementation not in (None, "loop", "parallel"):
            raise ValueError(
                "implementation: expected 'loop', 'parallel' or None, "
                f"got {self.implementation!r}"
            )

    def plan(self, length: int) -> "Plan":
        """The layout for a sequence of this length."""
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
        blocks = -(-chunks // max(1, self.block // chunk))
        # Evenly filled blocks need less padding than full ones and a nearly empty last.
        return Plan(chunk, -(-chunks // blocks), blocks, False)


@dataclass(frozen=True)
class Plan:
    """A sequence as ``blocks`` super-blocks of ``chunks`` chunks of ``chunk``."""

    chunk: int
    chunks: int
    blocks: int
    parallel: bool

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


class Block(Protocol):
    """What a mechanism does in one super-block; hashable, and equal by value.

    Zeros appended to the arrays must not change the state.
    """

    @property
    def plan(self) -> Plan: ...

    def __call__(self, state: Tree, arrays: Tree, tables: Tree, /) -> tuple[Tree, Tree]:
        """Returns the outputs `[B, N, chunks * chunk, ...]` and the state after."""
        ...


@functools.partial(jax.jit, static_argnums=0)
def run(block: Block, start: Tree, arrays: Tree, tables: Tree) -> tuple[Tree, Tree]:
    """Runs a mechanism's block over a whole sequence.

    Compiled here, so that calls outside ``jax.jit`` do not trace the loop every time.

    Args:
      block: the mechanism.
      start: the state before the sequence.
      arrays: `[B, N, T, ...]` each. Zeros are appended to fill the plan.
      tables: likewise, but without a gradient; their batch and head axes may be 1.

    Returns:
      The outputs `[B, N, T, ...]` and the state after the sequence.
    """
    length = jax.tree.leaves(arrays)[0].shape[2]
    cut = functools.partial(_cut, block.plan)
    arrays, tables = jax.tree.map(cut, arrays), jax.tree.map(cut, tables)
    both: Tree = _over_blocks(block, start, arrays, tables)
    outputs, state = both
    return jax.tree.map(functools.partial(_paste, length), outputs), state


def _cut(plan: Plan, x: jax.Array) -> jax.Array:
    """`[B, N, T, ...]` -> `[blocks, B, N, chunks * chunk, ...]`."""
    size = plan.chunks * plan.chunk
    missing = plan.blocks * size - x.shape[2]
    if missing:
        x = jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 3))
    x = x.reshape(*x.shape[:2], plan.blocks, size, *x.shape[3:])
    return jnp.moveaxis(x, 2, 0)


def _paste(length: int, x: jax.Array) -> jax.Array:
    """The inverse of `_cut`."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_blocks(
    block: Block, start: Tree, arrays: Tree, tables: Tree
) -> tuple[Tree, Tree]:
    def step(state: Tree, inputs: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        outputs, after = block(state, *inputs)
        return after, outputs

    state, outputs = _loop(step, start, (arrays, tables))
    return outputs, state


def _forward(block: Block, start: Tree, arrays: Tree, tables: Tree) -> tuple:
    def step(state: Tree, inputs: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        outputs, after = block(state, *inputs)
        return after, (outputs, state)

    state, (outputs, starts) = _loop(step, start, (arrays, tables))
    return (outputs, state), (starts, arrays, tables)


def _backward(block: Block, kept: tuple, cotangents: tuple) -> tuple:
    def step(after: Tree, inputs: tuple) -> tuple[Tree, Tree]:
        start, arrays, tables, outputs = inputs
        _, pullback = jax.vjp(lambda s, a: block(s, a, tables), start, arrays)
        return pullback((outputs, after))

    of_outputs, of_state = cotangents
    of_start, of_arrays = _loop(step, of_state, (*kept, of_outputs), reverse=True)
    return of_start, of_arrays, None


_over_blocks.defvjp(_forward, _backward)


def _loop(
    step: Callable[[Tree, Tree], tuple[Tree, Tree]],
    carry: Tree,
    inputs: Tree,
    reverse: bool = False,
) -> tuple[Tree, Tree]:
    """``jax.lax.scan``, but a single turn is no loop."""
    if jax.tree.leaves(inputs)[0].shape[0] > 1:
        return jax.lax.scan(step, carry, inputs, reverse=reverse)
    carry, outputs = step(carry, jax.tree.map(lambda x: x.squeeze(0), inputs))
    return carry, jax.tree.map(lambda x: x[None], outputs)


def prefix(
    plan: Plan, start: Tree, updates: Tree, decay: jax.Array | None = None
) -> tuple[Tree, Tree]:
    """Prefix sums over the chunks of a super-block.

    Args:
      plan: the layout.
      start: the state before the block, `[B, N, ...]`.
      updates: what each chunk adds, `[B, N, chunks, ...]`.
      decay: logarithm of the factor by which a state shrinks over each chunk, at most
        0: `[B, N, chunks]`, or `[B, N, chunks, M]` with one for each feature, where the
        states are `[B, N, M, ...]`; None = it stays.

    Returns:
      The state before each chunk, `[B, N, chunks, ...]`, and the one after the last.
    """
    if plan.chunks == 1:
        before = jax.tree.map(lambda x: x[:, :, None], start)
        kept = before if decay is None else _scaled(before, jnp.exp(decay))
        after = jax.tree.map(lambda x, update: (x + update).squeeze(2), kept, updates)
        return before, after
    # Row p is the state before chunk p; the last row is the state after all.
    rows = (_scanned if plan.parallel else _multiplied)(start, updates, decay)
    before = jax.tree.map(lambda x: x[:, :, :-1], rows)
    return before, jax.tree.map(lambda x: x[:, :, -1], rows)


def _scaled(tree: Tree, factors: jax.Array) -> Tree:
    """Multiplies `[B, N, chunks, ...]` by `[B, N, chunks]` or `[B, N, chunks, M]`."""
    return jax.tree.map(
        lambda x: x * factors.reshape(*factors.shape, *[1] * (x.ndim - factors.ndim)),
        tree,
    )


def _scanned(start: Tree, updates: Tree, decay: jax.Array | None) -> Tree:
    rows = jax.tree.map(
        lambda first, x: jnp.concatenate([first[:, :, None], x], 2), start, updates
    )
    if decay is None:
        return jax.lax.associative_scan(_added, rows, axis=2)

    def combine(earlier: tuple, later: tuple) -> tuple:
        (early, past), (late, present) = earlier, later
        return early + late, _added(_scaled(past, jnp.exp(late)), present)

    decay = jnp.concatenate([jnp.zeros_like(decay[:, :, :1]), decay], 2)
    return jax.lax.associative_scan(combine, (decay, rows), axis=2)[1]


def _added(one: Tree, two: Tree) -> Tree:
    return jax.tree.map(jnp.add, one, two)


def _multiplied(start: Tree, updates: Tree, decay: jax.Array | None) -> Tree:
    """A triangular product: for few chunks quicker than a scan."""
    leaf = jax.tree.leaves(updates)[0]
    count = leaf.shape[2]
    by_feature = 0 if decay is None else decay.ndim - 3
    terms = "bnprm,bnrmx->bnpmx" if by_feature else "bnpr,bnrx->bnpx"
    earlier = np.tri(count + 1, count, -1, dtype=bool)[None, None]
    earlier = earlier[..., None] if by_feature else earlier
    first = None
    if decay is None:
        # Made from the update, so that it has its sharding.
        ones = jnp.ones_like(leaf.reshape(*leaf.shape[:3], -1)[:, :, :1, :1])
        weights = jnp.where(earlier, ones, jnp.zeros((), leaf.dtype))
    else:
        ends = jnp.cumsum(decay, 2)
        first = jnp.concatenate([jnp.zeros_like(ends[:, :, :1]), ends], 2)
        # Differences of logarithms: factors of their own would under- and overflow.
        weights = decayed(first[:, :, :, None] - ends[:, :, None], earlier)
        first = jnp.exp(first)[..., None]

    def rows(start: jax.Array, update: jax.Array) -> jax.Array:
        flat = update.reshape(*update.shape[: 3 + by_feature], -1)
        # These are sums, so they keep float32 where products may be rounded.
        sums = jnp.einsum(terms, weights, flat, precision=jax.lax.Precision.HIGHEST)
        past = start[:, :, None].reshape(*start.shape[:2], 1, *flat.shape[3:])
        sums = sums + (past if first is None else past * first)
        return sums.reshape(*sums.shape[:3], *update.shape[3:])

    return jax.tree.map(rows, start, updates)


def decayed(exponent: jax.Array, visible: jax.Array | np.ndarray) -> jax.Array:
    """``exp(exponent)`` where visible, else 0; the rest may be large and positive."""
    zero = jnp.zeros((), exponent.dtype)
    return jnp.where(visible, jnp.exp(jnp.where(visible, exponent, zero)), zero)


def triangle(size: int) -> np.ndarray:
    """`[1, 1, 1, size, size]`, True where the column does not lie after the row."""
    return np.tri(size, dtype=bool)[None, None, None]
