"""The backward kernels for Hopper GPUs.

With the gradient ``do`` of the output, ``g_i = do_i / den_i`` is that of a numerator
and ``d_i = -do_i . o_i / den_i`` that of a denominator; 1 / den and d are passed as
lines `[B, N, T]`. One kernel walks forward and computes the queries' gradients from the
states before each chunk; another walks backward and computes the keys' and values'
gradients from the mirrored states, the sums of ``phi(q_i) g_i^T`` and ``phi(q_i) d_i``
over later positions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.forward import (
    add_up,
    grown,
    stage_pairs,
    values,
    walk_with_state,
)
from lra_jax.kernels.hopper.parts import Program, send

Lines = tuple[jax.Array, jax.Array]


def mirrored_sums(
    program: Program,
    query: jax.Array,
    of_out: jax.Array,
    lines: Lines,
    scale: jax.Array,
) -> list[jax.Array]:
    """``sum_i phi(q_i) g_i^T`` and ``sum_i phi(q_i) d_i`` of each segment."""
    kernel = functools.partial(_mirrored_sums, program)
    scratch = [program.tile_memory() for _ in range(program.spec.terms + 1)]
    arrays = [query, of_out, *lines, scale]
    return program.run(kernel, arrays, list(program.states()), scratch)


def queries(
    program: Program,
    query: jax.Array,
    of_out: jax.Array,
    lines: Lines,
    pairs: tuple[jax.Array, jax.Array] | None,
    mask: jax.Array | None,
    scale: jax.Array,
    starts: list[jax.Array],
) -> jax.Array:
    """The queries' gradient; ``pairs`` are key and value in the causal form."""
    causal = [] if pairs is None else list(pairs)
    causal += [] if mask is None or pairs is None else [mask]
    kernel = functools.partial(_queries, program, len(causal))
    terms = program.spec.terms
    tiles = 2 + terms + (terms + 1 if causal else 0)
    scratch = [program.tile_memory() for _ in range(tiles)]
    scratch += [program.vector_memory() for _ in range(terms)]
    arrays = [query, of_out, *lines, scale, *starts, *causal]
    return program.run(kernel, arrays, [program.rows()], scratch)[0]


def pairs(
    program: Program,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    laters: list[jax.Array],
    later_arrays: list[jax.Array],
) -> list[jax.Array]:
    """The gradients of keys and values.

    ``later_arrays`` are query, of_out and the lines in the causal form, otherwise
    empty.
    """
    masked = [] if mask is None else [mask]
    kernel = functools.partial(_pairs, program, len(masked), len(later_arrays))
    terms = program.spec.terms
    tiles = 3 + 2 * terms + (terms + 1 if later_arrays else 0)
    scratch = [program.tile_memory() for _ in range(tiles)]
    scratch += [program.vector_memory() for _ in range(terms)]
    arrays = [key, value, scale, *laters, *masked, *later_arrays]
    outputs = [program.rows(), program.rows()]
    return program.run(kernel, arrays, outputs, scratch)


def _upstream(program: Program, tiles: dict[str, Any]) -> jax.Array:
    """g of a chunk, in the arrays' dtype."""
    ops = program.ops
    of_out = ops.tile(tiles["of_out"]).astype(jnp.float32)
    return (of_out * ops.down(ops.by_row(tiles["inverse"]))).astype(program.dtype)


_LATER = ("query", "of_out", "inverse", "of_den")


def _mirrored_sums(program: Program, *refs: Any) -> None:
    scale, state_ref, total_ref, up_stage, *stages = refs[4:]
    inputs = list(zip(_LATER, refs[:4], strict=True))

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        terms, _ = program.features(tiles["query"], program.weights(first, scale))
        program.stage(stages, terms)
        up_stage[...] = _upstream(program, tiles)
        plgpu.commit_smem()
        state, total = carry
        of_den = program.ops.by_row(tiles["of_den"])
        state = grown(program, state, stages, up_stage)
        return state, add_up(program, total, stages, of_den)

    sums = program.walk(body, inputs, program.nothing())
    program.write((state_ref, total_ref), sums)


def _queries(program: Program, causal: int, *refs: Any) -> None:
    scale, *starts = refs[4:7]
    terms, ops = program.spec.terms, program.ops
    out, out_stage, up_stage, *stages = refs[7 + causal : -terms]
    total = refs[-terms:]
    batch, head, _ = program.here()
    states, key_stages = stages[:terms], stages[terms : 2 * terms]
    names = (*_LATER, "key", "value", "mask")
    inputs = list(zip(names, (*refs[:4], *refs[7 : 7 + causal]), strict=False))

    def body(first: Any, tiles: dict[str, Any], state: tuple) -> tuple:
        weights = program.weights(first, scale)
        up_stage[...] = _upstream(program, tiles)
        of_den = ops.by_row(tiles["of_den"])
        after, within = state, [[] for _ in states]
        if causal:
            program.stage(states, state)
            value = stage_pairs(program, tiles, weights, key_stages, stages[-1])
            after = grown(program, state, key_stages, value)
            of_scores = ops.product((up_stage, ops.transpose(value)))
            of_scores = of_scores + ops.down(of_den)
            of_scores = jnp.where(program.visible(True), of_scores, 0.0)
            of_scores = of_scores.astype(program.dtype)
            within = [[(of_scores, stage)] for stage in key_stages]
        else:
            plgpu.commit_smem()
        slopes = (
            ops.product((up_stage, ops.transpose(states[t])), *within[t])
            + ops.down(of_den) * ops.across(z)
            for t, z in enumerate(program.columns(total))
        )
        plgpu.wait_smem_to_gmem(0)
        out_stage[...] = program.pulled_back(slopes, tiles["query"], weights)
        if causal:
            sums = add_up(program, program.columns(total), key_stages)
            program.put(total, sums)
        plgpu.commit_smem()
        send(first, [(out_stage, out)], (batch, head))
        return after

    walk_with_state(program, body, inputs, starts, states, total, bool(causal))


def _pairs(program: Program, masked: int, causal: int, *refs: Any) -> None:
    key, value, scale, *laters = refs[:5]
    terms, ops = program.spec.terms, program.ops
    rest, total = refs[5 + masked + causal : -terms], refs[-terms:]
    of_key, of_value, key_stage, value_stage, hidden_stage, *stages = rest
    batch, head, _ = program.here()
    states, key_stages = stages[:terms], stages[terms : 2 * terms]
    query_stages = stages[2 * terms : 3 * terms]
    names = ("key", "value", *(("mask",) if masked else ()), *_LATER[:causal])
    inputs = list(zip(names, (key, value, *refs[5 : 5 + masked + causal]), strict=True))

    def body(first: Any, tiles: dict[str, Any], state: tuple) -> tuple:
        valid = ops.by_row(tiles["mask"]) if masked else None
        weights = program.weights(first, scale)
        # Features in shared memory need not stay in registers.
        k, _ = program.features(tiles["key"], weights, valid)
        program.stage(key_stages, k)
        v = values(program, tiles["value"], hidden_stage, valid)
        of_v = list(zip(key_stages, states, strict=True))
        of_k, after = [[] for _ in key_stages], state
        if causal:
            q, _ = program.features(tiles["query"], weights)
            program.stage(query_stages, q)
            program.stage(states, state)
            stages[-1][...] = _upstream(program, tiles)
            plgpu.commit_smem()
            of_v.append((_scores(program, key_stages, query_stages), stages[-1]))
        else:
            plgpu.commit_smem()
        slope = ops.product(*of_v)
        if valid is not None:
            slope = jnp.where(ops.down(valid) > 0, slope, 0.0)
        plgpu.wait_smem_to_gmem(0)
        value_stage[...] = slope.astype(program.dtype)
        if causal:
            of_scores = _of_scores(program, v, stages[-1], tiles)
            of_k = [[(of_scores, stage)] for stage in query_stages]
            after = grown(program, state, query_stages, stages[-1])
        slopes = (
            ops.product((v, ops.transpose(states[t])), *of_k[t]) + ops.across(z)
            for t, z in enumerate(program.columns(total))
        )
        key_stage[...] = program.pulled_back(slopes, tiles["key"], weights, valid)
        if causal:
            of_den = ops.by_row(tiles["of_den"])
            sums = add_up(program, program.columns(total), query_stages, of_den)
            program.put(total, sums)
        plgpu.commit_smem()
        send(first, [(key_stage, of_key), (value_stage, of_value)], (batch, head))
        return after

    walk_with_state(program, body, inputs, laters, states, total, bool(causal))


def _scores(program: Program, keys: list[Any], queries: list[Any]) -> jax.Array:
    """A chunk's weights, transposed: a row is a key."""
    ops = program.ops
    pairs = ((k, ops.transpose(q)) for k, q in zip(keys, queries, strict=True))
    return _upper(program, ops.product(*pairs))


def _of_scores(
    program: Program, value: Any, up_stage: Any, tiles: dict[str, Any]
) -> jax.Array:
    """The gradients of a chunk's weights, also transposed."""
    ops = program.ops
    of_den = ops.across(ops.by_column(tiles["of_den"]))
    return _upper(program, ops.product((value, ops.transpose(up_stage))) + of_den)


def _upper(program: Program, pairs: jax.Array) -> jax.Array:
    return jnp.where(program.visible(False), pairs, 0.0).astype(program.dtype)
