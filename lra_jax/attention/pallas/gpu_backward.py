"""The backward kernels for Hopper GPUs.

With the gradient ``do`` of the output, ``g_i = do_i / den_i`` is that of a numerator
and ``d_i = -do_i . o_i / den_i`` that of a denominator; 1 / den and d come as lines
`[B, N, T]`. One kernel walks forward and makes the queries' gradients from the states
before each chunk, another walks backward and makes the keys' and the values' from the
mirrored states, the sums of ``phi(q_i) g_i^T`` and ``phi(q_i) d_i`` over later
positions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.attention.pallas.gpu_forward import grown, values
from lra_jax.attention.pallas.gpu_parts import Program, send

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
    """The queries' gradient; ``pairs`` are key and value of the causal form."""
    causal = [] if pairs is None else list(pairs)
    causal += [] if mask is None or pairs is None else [mask]
    kernel = functools.partial(_queries, program, len(causal))
    terms = program.spec.terms
    tiles = 1 + terms + (terms + 1 if causal else 0)
    scratch = [program.tile_memory() for _ in range(tiles)]
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

    ``later_arrays`` are query, of_out and the lines of the causal form, none in the
    other.
    """
    masked = [] if mask is None else [mask]
    kernel = functools.partial(_pairs, program, len(masked), len(later_arrays))
    terms = program.spec.terms
    tiles = 2 + terms + (terms + 1 if later_arrays else 0)
    scratch = [program.tile_memory() for _ in range(tiles)]
    arrays = [key, value, scale, *laters, *masked, *later_arrays]
    outputs = [program.rows(), program.rows()]
    return program.run(kernel, arrays, outputs, scratch)


def _upstream(program: Program, tiles: dict[str, Any]) -> jax.Array:
    """g of a chunk, in the arrays' dtype."""
    ops = program.ops
    of_out = ops.tile(tiles["of_out"]).astype(jnp.float32)
    return (of_out * ops.down(ops.by_row(tiles["inverse"]))).astype(program.dtype)


def _mirror(
    program: Program, carry: tuple, stages: list[Any], terms: Any, tiles: Any, up: Any
) -> tuple:
    """The mirrored state and total with a chunk added."""
    ops = program.ops
    of_den = ops.down(ops.by_row(tiles["of_den"]))
    weighted = [term.astype(jnp.float32) * of_den for term in terms]
    return grown(program, carry, stages, weighted, up)


_LATER = ("query", "of_out", "inverse", "of_den")


def _mirrored_sums(program: Program, *refs: Any) -> None:
    scale, state_ref, total_ref, up_stage, *stages = refs[4:]
    inputs = list(zip(_LATER, refs[:4], strict=True))

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        terms, _ = program.features(tiles["query"], program.weights(first, scale))
        program.stage(stages, terms)
        up_stage[...] = _upstream(program, tiles)
        plgpu.commit_smem()
        return _mirror(program, carry, stages, terms, tiles, up_stage)

    found = program.walk(body, inputs, program.nothing())
    program.write((state_ref, total_ref), found)


def _queries(program: Program, causal: int, *refs: Any) -> None:
    scale, *starts = refs[4:7]
    out, out_stage, *stages = refs[7 + causal :]
    terms, ops = program.spec.terms, program.ops
    batch, head, segment = program.here()
    states, key_stages = stages[:terms], stages[terms : 2 * terms]
    names = (*_LATER, "key", "value", "mask")
    inputs = list(zip(names, (*refs[:4], *refs[7 : 7 + causal]), strict=False))

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        weights = program.weights(first, scale)
        _, slope = program.features(tiles["query"], weights)
        up, of_den = _upstream(program, tiles), ops.by_row(tiles["of_den"])
        after, within = carry, [[] for _ in states]
        if causal:
            valid = ops.by_row(tiles["mask"]) if "mask" in tiles else None
            k, _ = program.features(tiles["key"], weights, valid)
            program.stage(key_stages, k)
            program.stage(states, carry[0])
            value = values(program, tiles["value"], stages[-1], valid)
            plgpu.commit_smem()
            after = grown(program, carry, key_stages, k, value)
            of_scores = ops.product((up, ops.transposed(value))) + ops.down(of_den)
            visible = ops.index(1) <= ops.index(0)
            of_scores = jnp.where(visible, of_scores, 0.0).astype(program.dtype)
            within = [[(of_scores, stage)] for stage in key_stages]
        slopes = [
            ops.product((up, ops.transposed(states[t])), *within[t])
            + ops.down(of_den) * ops.across(carry[1][t])
            for t in program.terms
        ]
        plgpu.wait_smem_to_gmem(0)
        out_stage[...] = program.pulled_back(slopes, slope, weights)
        plgpu.commit_smem()
        send(first, [(out_stage, out)], (batch, head))
        return after

    start = program.read(starts[0], starts[1], segment if causal else 0)
    if not causal:
        program.stage(states, start[0])
        plgpu.commit_smem()
    program.walk(body, inputs, start)
    plgpu.wait_smem_to_gmem(0)


def _pairs(program: Program, masked: int, causal: int, *refs: Any) -> None:
    key, value, scale, *laters = refs[:5]
    rest = refs[5 + masked + causal :]
    of_key, of_value, key_stage, value_stage, *stages = rest
    terms, ops = program.spec.terms, program.ops
    batch, head, segment = program.here()
    states, query_stages = stages[:terms], stages[terms : 2 * terms]
    names = ("key", "value", *(("mask",) if masked else ()), *_LATER[:causal])
    inputs = list(zip(names, (key, value, *refs[5 : 5 + masked + causal]), strict=True))

    def body(first: Any, tiles: dict[str, Any], carry: tuple) -> tuple:
        valid = ops.by_row(tiles["mask"]) if masked else None
        weights = program.weights(first, scale)
        k, slope = program.features(tiles["key"], weights, valid)
        v = ops.tile(tiles["value"])
        seen = None if valid is None else ops.down(valid) > 0
        if seen is not None:
            v = jnp.where(seen, v, jnp.zeros((), v.dtype))
        of_v, of_k = [(k[t], states[t]) for t in program.terms], [[] for _ in k]
        after = carry
        if causal:
            q, _ = program.features(tiles["query"], weights)
            program.stage(query_stages, q)
            program.stage(states, carry[0])
            stages[-1][...] = _upstream(program, tiles)
            plgpu.commit_smem()
            scores, of_scores = _within(program, k, v, query_stages, stages[-1], tiles)
            of_v.append((scores, stages[-1]))
            of_k = [[(of_scores, stage)] for stage in query_stages]
            after = _mirror(program, carry, query_stages, q, tiles, stages[-1])
        slopes = [
            ops.product((v, ops.transposed(states[t])), *of_k[t])
            + ops.across(carry[1][t])
            for t in program.terms
        ]
        found = ops.product(*of_v)
        found = found if seen is None else jnp.where(seen, found, 0.0)
        plgpu.wait_smem_to_gmem(0)
        key_stage[...] = program.pulled_back(slopes, slope, weights)
        value_stage[...] = found.astype(program.dtype)
        plgpu.commit_smem()
        send(first, [(key_stage, of_key), (value_stage, of_value)], (batch, head))
        return after

    start = program.read(laters[0], laters[1], segment if causal else 0)
    if not causal:
        program.stage(states, start[0])
        plgpu.commit_smem()
    program.walk(body, inputs, start)
    plgpu.wait_smem_to_gmem(0)


def _within(
    program: Program, k: Any, v: Any, query_stages: Any, up_stage: Any, tiles: Any
) -> tuple[jax.Array, jax.Array]:
    """A chunk's weights and their gradients, both transposed: a row is a key."""
    ops = program.ops
    visible = ops.index(0) <= ops.index(1)
    scores = ops.product(
        *((x, ops.transposed(q)) for x, q in zip(k, query_stages, strict=True))
    )
    of_den = ops.across(ops.by_column(tiles["of_den"]))
    of_scores = ops.product((v, ops.transposed(up_stage))) + of_den
    scores, of_scores = (
        jnp.where(visible, x, 0.0).astype(program.dtype) for x in (scores, of_scores)
    )
    return scores, of_scores
