"""The forward kernels for Hopper GPUs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.parts import Program, Terms, send
from lra_jax.kernels.spec import plus

Arrays = dict[str, jax.Array]


def outputs(
    program: Program, query: jax.Array, pairs: Arrays, scale: jax.Array, starts: list
) -> list[jax.Array]:
    """Outputs `[B, T, N, 64]` and denominators `[B, N, T]`, given the states before.

    ``pairs`` are key, value and mask in the causal form, otherwise empty.
    """
    terms = program.spec.terms
    return program.run(
        functools.partial(_outputs, program),
        {"query": query} | pairs,
        [scale, *starts],
        [program.rows(), program.line()],
        tiles=1 + 2 * terms + (terms + 1 if pairs else 0),
        vectors=1 + terms,
    )


def values(program: Program, tile: Any, stage: Any, valid: Any) -> Any:
    """The tile of values for products, in which hidden rows are replaced by zeros."""
    if valid is None:
        return tile
    x = program.ops.tile(tile)
    seen = program.ops.down(valid) > 0
    stage[...] = jnp.where(seen, x, jnp.zeros((), x.dtype))
    return stage


def grow(program: Program, state: Any, staged: list[Any], value: Any) -> tuple:
    """Adds a chunk, whose terms are in shared memory, to the state."""
    ops = program.ops
    return tuple(
        s + ops.product((ops.transpose(ref), value))
        for s, ref in zip(state, staged, strict=True)
    )


def add_up(
    program: Program, total: Any, staged: list[Any], weights: jax.Array | None = None
) -> tuple:
    """Adds a chunk's rows times their weights to the total, in column vectors."""
    terms = (program.ops.tile(ref).astype(jnp.float32) for ref in staged)
    if weights is not None:
        terms = (term * program.ops.down(weights) for term in terms)
    return tuple(z + term.sum(0) for z, term in zip(total, terms, strict=True))


def stage_pairs(
    program: Program,
    tiles: dict[str, Any],
    weights: Terms | None,
    key_stages: list[Any],
    hidden_stage: Any,
) -> Any:
    """Puts a chunk's key terms into shared memory; returns the values for products."""
    valid = program.ops.by_row(tiles["mask"]) if "mask" in tiles else None
    terms, _ = program.features(tiles["key"], weights, valid)
    program.stage(key_stages, terms)
    value = values(program, tiles["value"], hidden_stage, valid)
    plgpu.commit_smem()
    return value


def sums(
    program: Program,
    walked: Arrays,
    scale: jax.Array,
    stage: Callable[..., Any] = stage_pairs,
) -> list[jax.Array]:
    """``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of each segment.

    The arrays are key, value and mask, or those of another ``stage``.
    """
    return program.run(
        functools.partial(_sums, program, stage),
        walked,
        [scale],
        list(program.states()),
        tiles=program.spec.terms + 1,
    )


def walk_with_state(
    program: Program,
    body: Any,
    inputs: dict[str, Any],
    starts: list[Any],
    states: Any,
    total: Any,
) -> None:
    """Walks over the chunks with the segment's state, or with the whole sums.

    The total is in shared memory, and so is the state if it does not change.
    """
    causal = program.spec.is_causal
    state, sums = program.read(starts, program.here()[2] if causal else 0)
    program.put(total, sums)
    if not causal:
        program.stage(states, state)
    plgpu.commit_smem()
    program.walk(body, inputs, state)
    plgpu.wait_smem_to_gmem(0)


def _sums(
    program: Program,
    stage: Callable[..., Any],
    inputs: dict[str, Any],
    others: list[Any],
    outputs: list[Any],
    tiles: list[Any],
    _: list[Any],
) -> None:
    (scale,), (value_stage, *stages) = others, tiles

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        weights = program.weights(first, scale)
        value = stage(program, tiles, weights, stages, value_stage)
        of_rows = program.ops.by_row(tiles["of_den"]) if "of_den" in tiles else None
        state, total = carry
        state = grow(program, state, stages, value)
        return state, add_up(program, total, stages, of_rows)

    program.write(outputs, program.walk(body, inputs, program.nothing()))


def _outputs(
    program: Program,
    inputs: dict[str, Any],
    others: list[Any],
    outputs: list[Any],
    tiles: list[Any],
    vectors: list[Any],
) -> None:
    (scale, *starts), (out, den_out) = others, outputs
    (out_stage, *stages), (den_stage, *total) = tiles, vectors
    ops, terms = program.ops, program.spec.terms
    batch, head, _ = program.here()
    states, query_stages = stages[:terms], stages[terms : 2 * terms]
    key_stages = stages[2 * terms : 3 * terms]

    def body(first: Any, tiles: dict[str, Any], state: tuple) -> tuple:
        after = state
        weights = program.weights(first, scale)
        # Features in shared memory need not stay in registers.
        q, _ = program.features(tiles["query"], weights)
        program.stage(query_stages, q)
        dens = [
            (term.astype(jnp.float32) * ops.across(z)).sum(1)
            for term, z in zip(q, program.columns(total), strict=True)
        ]
        products = list(zip(query_stages, states, strict=True))
        if program.spec.is_causal:
            program.stage(states, state)
            value = stage_pairs(program, tiles, weights, key_stages, stages[-1])
            scores = _lower(program, query_stages, key_stages)
            products.append((scores, value))
            dens.append(scores.astype(jnp.float32).sum(1))
            after = grow(program, state, key_stages, value)
            sums = add_up(program, program.columns(total), key_stages)
            program.put(total, sums)
        else:
            plgpu.commit_smem()
        den = plus(dens)
        num = ops.product(*products)
        if program.spec.denominator != "none":
            num = num / ops.down(program.spec.bound(den))
        plgpu.wait_smem_to_gmem(0)
        out_stage[...] = num.astype(out.dtype)
        den_stage[...] = den
        plgpu.commit_smem()
        send(first, [(out_stage, out), (den_stage, den_out)], (batch, head))
        return after

    walk_with_state(program, body, inputs, starts, states, total)


def _lower(program: Program, query: list[Any], key_stages: list[Any]) -> jax.Array:
    """The lower triangle of a chunk's weights, in the arrays' dtype."""
    ops = program.ops
    scores = ops.product(
        *((q, ops.transpose(k)) for q, k in zip(query, key_stages, strict=True))
    )
    return jnp.where(program.visible(True), scores, 0.0).astype(program.dtype)
