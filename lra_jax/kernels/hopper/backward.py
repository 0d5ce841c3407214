"""The backward kernels for Hopper GPUs.

With the gradient ``do`` of the output, ``g_i = do_i / den_i`` is that of a numerator
and ``d_i = -do_i . o_i / den_i`` that of a denominator; 1 / den and d are passed as
lines `[B, N, T]`. One kernel walks forward and computes the queries' gradients from the
states before each chunk; another walks backward and computes the keys' and values'
gradients from the mirrored states, the sums of ``phi(q_i) g_i^T`` and ``phi(q_i) d_i``
over later positions (`stage_upstream`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.forward import (
    Arrays,
    add_up,
    grow,
    stage_pairs,
    values,
    walk_with_state,
)
from lra_jax.kernels.hopper.parts import Program, Terms, send


def queries(
    program: Program, later: Arrays, pairs: Arrays, scale: jax.Array, starts: list
) -> jax.Array:
    """The queries' gradient.

    ``later`` are query, of_out, inverse and of_den; ``pairs`` are key, value and mask
    in the causal form, otherwise empty.
    """
    terms = program.spec.terms
    (of_query,) = program.run(
        functools.partial(_queries, program),
        later | pairs,
        [scale, *starts],
        [program.rows()],
        tiles=2 + terms + (terms + 1 if pairs else 0),
        vectors=terms,
    )
    return of_query


def pairs(
    program: Program, pairs: Arrays, later: Arrays, scale: jax.Array, laters: list
) -> list[jax.Array]:
    """The gradients of keys and values; ``later`` is empty unless causal."""
    terms = program.spec.terms
    return program.run(
        functools.partial(_pairs, program),
        pairs | later,
        [scale, *laters],
        [program.rows(), program.rows()],
        tiles=3 + 2 * terms + (terms + 1 if later else 0),
        vectors=terms,
    )


def stage_upstream(
    program: Program,
    tiles: dict[str, Any],
    weights: Terms | None,
    stages: list[Any],
    up_stage: Any,
) -> Any:
    """Puts a chunk's query terms and g into shared memory, for the mirrored sums."""
    terms, _ = program.features(tiles["query"], weights)
    program.stage(stages, terms)
    up_stage[...] = _upstream(program, tiles)
    plgpu.commit_smem()
    return up_stage


def _upstream(program: Program, tiles: dict[str, Any]) -> jax.Array:
    """g of a chunk, in the arrays' dtype."""
    ops = program.ops
    of_out = ops.tile(tiles["of_out"]).astype(jnp.float32)
    return (of_out * ops.down(ops.by_row(tiles["inverse"]))).astype(program.dtype)


def _queries(
    program: Program,
    inputs: dict[str, Any],
    others: list[Any],
    outputs: list[Any],
    tiles: list[Any],
    total: list[Any],
) -> None:
    (scale, *starts), (out,), (out_stage, up_stage, *stages) = others, outputs, tiles
    terms, ops, causal = program.spec.terms, program.ops, program.spec.is_causal
    batch, head, _ = program.here()
    states, key_stages = stages[:terms], stages[terms : 2 * terms]

    def body(first: Any, tiles: dict[str, Any], state: tuple) -> tuple:
        weights = program.weights(first, scale)
        up_stage[...] = _upstream(program, tiles)
        of_den = ops.by_row(tiles["of_den"])
        after, within = state, [[] for _ in states]
        if causal:
            program.stage(states, state)
            value = stage_pairs(program, tiles, weights, key_stages, stages[-1])
            after = grow(program, state, key_stages, value)
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
        out_stage[...] = program.pull_back(slopes, tiles["query"], weights)
        if causal:
            sums = add_up(program, program.columns(total), key_stages)
            program.put(total, sums)
        plgpu.commit_smem()
        send(first, [(out_stage, out)], (batch, head))
        return after

    walk_with_state(program, body, inputs, starts, states, total)


def _pairs(
    program: Program,
    inputs: dict[str, Any],
    others: list[Any],
    outputs: list[Any],
    tiles: list[Any],
    total: list[Any],
) -> None:
    (scale, *laters), (of_key, of_value) = others, outputs
    key_stage, value_stage, hidden_stage, *stages = tiles
    terms, ops, causal = program.spec.terms, program.ops, program.spec.is_causal
    batch, head, _ = program.here()
    states, key_stages = stages[:terms], stages[terms : 2 * terms]
    query_stages = stages[2 * terms : 3 * terms]

    def body(first: Any, tiles: dict[str, Any], state: tuple) -> tuple:
        valid = ops.by_row(tiles["mask"]) if "mask" in tiles else None
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
            after = grow(program, state, query_stages, stages[-1])
        slopes = (
            ops.product((v, ops.transpose(states[t])), *of_k[t]) + ops.across(z)
            for t, z in enumerate(program.columns(total))
        )
        key_stage[...] = program.pull_back(slopes, tiles["key"], weights, valid)
        if causal:
            of_den = ops.by_row(tiles["of_den"])
            sums = add_up(program, program.columns(total), query_stages, of_den)
            program.put(total, sums)
        plgpu.commit_smem()
        send(first, [(key_stage, of_key), (value_stage, of_value)], (batch, head))
        return after

    walk_with_state(program, body, inputs, laters, states, total)


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
