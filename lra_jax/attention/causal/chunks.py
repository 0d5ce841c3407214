"""The loop under every causal form: chunks inside super-blocks.

A causal linear mechanism needs a running sum of matrices. Kept for every position it is
M times as large as the input; walked position by position it is a loop of tiny steps.
So the sequence is cut twice:

- a *chunk* (64 positions) is computed quadratically, as a masked product of pairs; what
  lies before it enters through one state, the sum of its outer products;
- a *super-block* (64 to 256 positions) holds a few chunks, which run in parallel: their
  states are prefix sums of the chunks' own contributions. A loop over the super-blocks
  carries the state on, and cuts them out of the arrays where they lie.

Gradients. The loop has its own derivative: it keeps the inputs, one state for each
super-block and, where that saves work, the outputs; it walks backward and recomputes
everything else, so that memory is linear in the length and small beside the inputs.
Forward-mode derivatives (``jax.jvp``) are therefore not available; gradients of
gradients are.

A mechanism gives the loop its *block*, which maps the state before a super-block and
the block's arrays to its outputs and the state after it (`linear_block.LinearBlock`,
`flow_block.FlowBlock`). One position of a stream is a super-block of length 1: there
is no second formula for decoding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention.causal.plan import Chunking, Plan

__all__ = [
    "Block",
    "Chunking",
    "Plan",
    "decayed",
    "prefix",
    "prefix_pullback",
    "run",
    "triangle",
]

Tree = Any


# Up to so many chunks their states are added up one by one, which is quicker.
_FEW = 16


class Block:
    """What a mechanism does in one super-block; hashable, and equal by value.

    Zeros appended to the arrays must not change the state.

    Attributes:
      plan: how the sequence is cut.
      axis: that of the positions: 2 with the heads first, 1 in `[B, T, N, H]`.
      keeps_outputs: `pullback` needs the outputs.
    """

    plan: Plan
    axis: int
    keeps_outputs: bool = False

    def __call__(self, state: Tree, arrays: Tree, tables: Tree, /) -> tuple[Tree, Tree]:
        """Returns the outputs of the super-block and the state after it."""
        raise NotImplementedError

    def pullback(
        self, state: Tree, arrays: Tree, tables: Tree, outputs: Tree, cotangents: Tree
    ) -> tuple[Tree, Tree]:
        """The gradients of state and arrays, of those of the outputs and state after.

        ``outputs`` is None unless it keeps them.
        """
        del outputs

        def call(state: Tree, arrays: Tree) -> tuple[Tree, Tree]:
            return self(state, arrays, tables)

        return jax.vjp(call, state, arrays)[1](cotangents)

    def scaled_pullback(
        self,
        state: Tree,
        arrays: Tree,
        tables: Tree,
        outputs: jax.Array,
        cotangents: Tree,
        scale: Callable[[jax.Array], jax.Array],
    ) -> tuple[Tree, Tree]:
        """`pullback` where ``numerator * scale(other)`` is all that is made of outputs.

        Args:
          state: before the super-block.
          arrays: of the super-block.
          tables: of the super-block.
          outputs: those products, `[B, N, L, Hv]`.
          cotangents: theirs, and that of the state after.
          scale: makes `[B, N, L]` of `[B, N, L]`.

        Returns:
          The gradients of state and arrays.
        """

        def parts(state: Tree, arrays: Tree) -> tuple[Tree, Tree]:
            (numerator, other), after = self(state, arrays, tables)
            return (numerator, scale(other)), after

        # The outputs spare the numerators: the vjp leaves them out.
        ((_, factor), _), pull = jax.vjp(parts, state, arrays)
        of_out, of_state = cotangents
        of_factor = (of_out * outputs).sum(-1) / factor
        return pull(((of_out * factor[..., None], of_factor), of_state))


@functools.partial(jax.jit, static_argnums=0)
def run(block: Block, start: Tree, arrays: Tree, tables: Tree) -> tuple[Tree, Tree]:
    """Runs a mechanism's block over a whole sequence.

    Compiled here, so that calls outside ``jax.jit`` do not trace the loop every time.

    Args:
      block: the mechanism.
      start: the state before the sequence.
      arrays: positions along ``block.axis``, to which zeros are appended to fill the
        plan.
      tables: likewise, but without a gradient; other axes may be 1.

    Returns:
      The outputs, positions along ``block.axis``, and the state after the sequence.
    """
    axis, length = block.axis, jax.tree.leaves(arrays)[0].shape[block.axis]

    def filled(x: jax.Array) -> jax.Array:
        missing = block.plan.length - x.shape[axis]
        ends = [(0, missing if place == axis else 0) for place in range(x.ndim)]
        return jnp.pad(x, ends) if missing else x

    arrays, tables = jax.tree.map(filled, arrays), jax.tree.map(filled, tables)
    both: Tree = _over_blocks(block, start, arrays, tables)
    outputs, state = both
    if block.plan.length > length:
        outputs = jax.tree.map(
            lambda x: jax.lax.slice_in_dim(x, 0, length, axis=axis), outputs
        )
    return outputs, state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_blocks(
    block: Block, start: Tree, arrays: Tree, tables: Tree
) -> tuple[Tree, Tree]:
    def step(state: Tree, index: jax.Array, _: None) -> tuple[Tree, Tree, None]:
        inputs = _part(block, (arrays, tables), index)
        outputs, after = block(state, *inputs)
        return after, outputs, None

    state, outputs, _ = _loop(block, step, start, None)
    return outputs, state


def _forward(block: Block, start: Tree, arrays: Tree, tables: Tree) -> tuple:
    def step(state: Tree, index: jax.Array, _: None) -> tuple[Tree, Tree, Tree]:
        inputs = _part(block, (arrays, tables), index)
        outputs, after = block(state, *inputs)
        return after, outputs, state

    state, outputs, starts = _loop(block, step, start, None)
    kept = outputs if block.keeps_outputs else None
    return (outputs, state), (starts, arrays, tables, kept)


def _backward(block: Block, kept: tuple, cotangents: tuple) -> tuple:
    starts, arrays, tables, outputs = kept
    of_outputs, of_state = cotangents

    def step(after: Tree, index: jax.Array, start: Tree) -> tuple[Tree, Tree, None]:
        parts: Any = _part(block, (arrays, tables, outputs, of_outputs), index)
        inputs, fixed, made, slopes = parts
        of_start, of_inputs = block.pullback(
            start, inputs, fixed, made, (slopes, after)
        )
        return of_start, of_inputs, None

    of_start, of_arrays, _ = _loop(block, step, of_state, starts, reverse=True)
    return of_start, of_arrays, None


_over_blocks.defvjp(_forward, _backward)


def _part(block: Block, tree: Tree, index: jax.Array) -> Tree:
    """One super-block of every array.

    Cut here and not before the loop, which would copy all arrays to put the
    super-blocks first.
    """
    if block.plan.blocks == 1:
        return tree
    size = block.plan.chunks * block.plan.chunk
    return jax.tree.map(
        lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size, block.axis), tree
    )


def _loop(
    block: Block,
    step: Callable[[Tree, jax.Array, Tree], tuple[Tree, Tree, Tree]],
    carry: Tree,
    inputs: Tree,
    reverse: bool = False,
) -> tuple[Tree, Tree, Tree]:
    """``jax.lax.scan`` over the super-blocks, but a single turn is no loop.

    Args:
      block: says how many there are.
      step: maps the carry, the super-block's index and its input to the carry after,
        outputs for its positions, and anything else for each super-block.
      carry: before the first.
      inputs: one for each super-block along the first axis.
      reverse: begins with the last.

    Returns:
      The carry after the last, outputs for all positions, and the rest, stacked.
    """
    count = block.plan.blocks
    if count == 1:
        only = jax.tree.map(lambda x: x.squeeze(0), inputs)
        carry, outputs, others = step(carry, jnp.zeros((), jnp.int32), only)
        return carry, outputs, jax.tree.map(lambda x: x[None], others)

    def turn(carry: Tree, given: tuple) -> tuple[Tree, tuple]:
        carry, *made = step(carry, *given)
        return carry, tuple(made)

    given = jnp.arange(count, dtype=jnp.int32), inputs
    carry, (outputs, others) = jax.lax.scan(turn, carry, given, reverse=reverse)

    def joined(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x, 0, block.axis)
        axis = block.axis
        return x.reshape(*x.shape[:axis], block.plan.length, *x.shape[axis + 2 :])

    return carry, jax.tree.map(joined, outputs), others


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
    if plan.parallel or plan.chunks > _FEW:
        rows = _scanned(start, updates, decay)
        before = jax.tree.map(lambda x: x[:, :, :-1], rows)
        return before, jax.tree.map(lambda x: x[:, :, -1], rows)
    rows = [start]
    for chunk in range(plan.chunks):
        kept = rows[-1]
        if decay is not None:
            kept = _scaled(kept, jnp.exp(decay[:, :, chunk]))
        update = jax.tree.map(lambda x, place=chunk: x[:, :, place], updates)
        rows.append(_added(kept, update))
    before = jax.tree.map(lambda *each: jnp.stack(each, 2), *rows[:-1])
    return before, rows[-1]


def prefix_pullback(plan: Plan, of_before: Tree, of_after: Tree) -> tuple[Tree, Tree]:
    """The gradients of `prefix`'s start and updates, without a decay.

    Args:
      plan: the layout.
      of_before: gradient of the states before each chunk, `[B, N, chunks, ...]`.
      of_after: of the one after the last, `[B, N, ...]`.
    """
    # Sums: their derivative is the same everywhere, whatever the first two arguments.
    pull = jax.vjp(functools.partial(prefix, plan), of_after, of_before)[1]
    return pull((of_before, of_after))


def _scaled(tree: Tree, factors: jax.Array) -> Tree:
    """Multiplies `[B, N, ...]` by factors for its leading axes."""
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


def decayed(exponent: jax.Array, visible: jax.Array | np.ndarray) -> jax.Array:
    """``exp(exponent)`` where visible, else 0; the rest may be large and positive."""
    zero = jnp.zeros((), exponent.dtype)
    return jnp.where(visible, jnp.exp(jnp.where(visible, exponent, zero)), zero)


def triangle(size: int) -> np.ndarray:
    """`[1, 1, 1, size, size]`, True where the column does not lie after the row."""
    return np.tri(size, dtype=bool)[None, None, None]
