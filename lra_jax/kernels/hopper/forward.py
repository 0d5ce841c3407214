"""The forward kernels for Hopper GPUs."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.parts import LinearProgram, Program, Terms, send
from lra_jax.kernels.spec import plus


def sums(
    program: Program,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
) -> list[jax.Array]:
    """``sum_j phi(k_j) v_j^T`` and ``sum_j phi(k_j)`` of each segment."""
    masked = [] if mask is None else [mask]
    kernel = functools.partial(_sums, program, bool(masked))
    scratch = [program.tile_memory() for _ in range(program.spec.terms + 1)]
    arrays = [key, value, scale, *masked]
    return program.run(kernel, arrays, list(program.states()), scratch)


def outputs(
    program: LinearProgram,
    query: jax.Array,
    pairs: tuple[jax.Array, jax.Array] | None,
    mask: jax.Array | None,
    scale: jax.Array,
    starts: list[jax.Array],
) -> list[jax.Array]:
    """Outputs `[B, T, N, 64]` and denominators `[B, N, T]`, given the states before.

    ``pairs`` are key and value in the causal form, otherwise None.
    """
    causal = [] if pairs is None else list(pairs)
    causal += [] if mask is None or pairs is None else [mask]
    kernel = functools.partial(_outputs, program, len(causal))
    terms = program.spec.terms
    tiles = 1 + 2 * terms + (terms + 1 if causal else 0)
    scratch = [program.tile_memory() for _ in range(tiles)]
    scratch += [program.vector_memory() for _ in range(1 + terms)]
    arrays = [query, scale, *starts, *causal]
    return program.run(kernel, arrays, [program.rows(), program.line()], scratch)


def values(program: Program, tile: Any, stage: Any, valid: Any) -> Any:
    """The tile of values for products, in which hidden rows are replaced by zeros."""
    if valid is None:
        return tile
    x = program.ops.tile(tile)
    seen = program.ops.down(valid) > 0
    stage[...] = jnp.where(seen, x, jnp.zeros((), x.dtype))
    return stage


def grown(program: Program, state: Any, staged: list[Any], value: Any) -> tuple:
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


def walk_with_state(
    program: Program,
    body: Any,
    inputs: Sequence[tuple[str, Any]],
    starts: list[Any],
    states: Any,
    total: Any,
    causal: bool,
) -> None:
    """Walks over the chunks with the segment's state, or with the whole sums.

    The total is in shared memory, and so is the state if it does not change.
    """
    state, sums = program.read(starts[0], starts[1], program.here()[2] if causal else 0)
    program.put(total, sums)
    if not causal:
        program.stage(states, state)
    plgpu.commit_smem()
    program.walk(body, inputs, state)
    plgpu.wait_smem_to_gmem(0)


def _sums(program: Program, masked: bool, *refs: Any) -> None:
    (key, value, scale), rest = refs[:3], refs[3 + masked :]
    state_ref, total_ref, value_stage, *stages = rest
    inputs = [("key", key), ("value", value)]
    inputs += [("mask", refs[3])] if masked else []

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        weights = program.weights(first, scale)
        value = stage_pairs(program, tiles, weights, stages, value_stage)
        state, total = carry
        state = grown(program, state, stages, value)
        return state, add_up(program, total, stages)

    sums = program.walk(body, inputs, program.nothing())
    program.write((state_ref, total_ref), sums)


def _outputs(program: LinearProgram, causal: int, *refs: Any) -> None:
    terms = program.spec.terms
    query, scale, *starts = refs[:4]
    pairs, rest = refs[4 : 4 + causal], refs[4 + causal :]
    (out, den_out, out_stage, *stages), total = rest[:-terms], rest[-terms:]
    *stages, den_stage = stages
    ops = program.ops
    batch, head, _ = program.here()
    states, query_stages = stages[:terms], stages[terms : 2 * terms]
    key_stages = stages[2 * terms : 3 * terms]
    names = ("query", "key", "value", "mask")
    inputs = list(zip(names, (query, *pairs), strict=False))

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
        if causal:
            program.stage(states, state)
            value = stage_pairs(program, tiles, weights, key_stages, stages[-1])
            scores = _lower(program, query_stages, key_stages)
            products.append((scores, value))
            dens.append(scores.astype(jnp.float32).sum(1))
            after = grown(program, state, key_stages, value)
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

    walk_with_state(program, body, inputs, starts, states, total, bool(causal))


def _lower(program: Program, query: list[Any], key_stages: list[Any]) -> jax.Array:
    """The lower triangle of a chunk's weights, in the arrays' dtype."""
    ops = program.ops
    scores = ops.product(
        *((q, ops.transpose(k)) for q, k in zip(query, key_stages, strict=True))
    )
    return jnp.where(program.visible(True), scores, 0.0).astype(program.dtype)
