"""The gradients of query and key of wide heads on Hopper GPUs.

A program owns a panel of one of them and sums over all panels of the values, so there
are no partial sums. The keys' gradient is the mirror image of the queries', except for
the denominators: their gradients ``d_i`` belong to queries, which are rows in one and
columns in the other.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.forward import summed
from lra_jax.kernels.hopper.parts import Terms, send
from lra_jax.kernels.hopper.wide_parts import Named, Tiles, WideProgram
from lra_jax.kernels.spec import plus


def slopes(
    program: WideProgram, arrays: Named, starts: list[jax.Array]
) -> jax.Array:
    """The gradient of the program's rows; a program per panel of features."""
    causal, terms = program.spec.is_causal, program.spec.terms
    names = [program.row_array, program.factor_array, "scale"]
    names += [program.column_array, program.summand_array] if causal else []
    names += ["of_den"] if causal or not program.backward else []
    needed = program.needed(arrays, *names)
    needed |= dict(zip(("states", "totals"), starts, strict=True))
    stages = {"out": 1, "state": terms * (1 if causal else program.value_panels)}
    if causal:
        stages |= {"column": terms, "value": program.stages_summand(needed)}
    outputs = {"out": program.result(program.feature_panels)}
    stages = stages, {"total": terms}
    return program.launch(_slopes, needed, outputs, stages, program.feature_panels)[0]


def _slopes(program: WideProgram, given: Named, stages: Tiles) -> None:
    ops, causal, count = program.ops, program.spec.is_causal, program.spec.terms
    batch, head, _ = program.here()
    first_term = program.panel * count
    own = [first_term + t for t in range(count)]
    places = [(w, t) for w in range(program.value_panels) for t in own]
    start = program.start(given, stages, places)
    program.start_totals(given, stages, first_term)

    def body(first: Any, tiles: Tiles, state: tuple) -> tuple:
        weights = program.weights(first, given["scale"])
        if causal:
            terms = program.panel_terms(program.column_array, tiles, weights)
            program.stage(stages["column"], terms)
        found, after = _over_values(program, tiles, weights, state, stages)
        found = found + _of_denominators(program, tiles, weights, stages)
        valid = program.valid(tiles) if program.row_array == "key" else None
        plgpu.wait_smem_to_gmem(0)
        stages["out"][0][...] = program.pulled_back(
            [found], tiles[program.row_array][0], None, valid
        )
        if causal:
            of_den = ops.by_row(tiles["of_den"][0]) if program.backward else None
            total = program.columns(stages["total"])
            total = summed(program, total, stages["column"], of_den)
            program.put(stages["total"], total)
        plgpu.commit_smem()
        panel = (batch, head, program.panel)
        send(first, [(stages["out"][0], given["out"])], panel)
        return after

    panels = {program.row_array: program.panel, program.column_array: program.panel}
    fixed = ("scale", "states", "totals", "out")
    walked = {name: ref for name, ref in given.items() if name not in fixed}
    program.walk_panels(body, walked, panels, tuple(start))
    plgpu.wait_smem_to_gmem(0)


def _over_values(
    program: WideProgram,
    tiles: Tiles,
    weights: Terms | None,
    state: tuple,
    stages: Tiles,
) -> tuple[jax.Array, tuple]:
    """The slopes of the rows' features, summed over the terms, and the new states."""
    ops, causal, count = program.ops, program.spec.is_causal, program.spec.terms
    found, after = ops.zero_tile(), []
    scores = found
    for at in range(program.value_panels):
        these = slice(at * count, (at + 1) * count)
        factor = program.factor(program.factor_array, tiles, at)
        turned = _turned(program, factor, weights)
        if not causal:
            pairs = _with_transposed(program, turned, stages["state"][these])
            (found,) = ops.added((found, pairs))
            continue
        summand = program.summand(tiles, at, stages["value"])
        program.stage(stages["state"], state[these])
        plgpu.commit_smem()
        found, scores, *new = ops.added(
            (found, _with_transposed(program, turned, stages["state"])),
            (scores, _with_transposed(program, [factor], [summand])),
            *(
                (s, [(ops.transposed(ref), summand)])
                for s, ref in zip(state[these], stages["column"], strict=True)
            ),
        )
        after += new
    if causal:
        scores = _turned(program, _of_scores(program, scores, tiles), weights)
        (found,) = ops.added((found, list(zip(scores, stages["column"], strict=True))))
    return found, tuple(after)


def _of_scores(program: WideProgram, scores: jax.Array, tiles: Tiles) -> jax.Array:
    """The gradients of a chunk's weights, a row for each of the program's rows."""
    ops, of_den = program.ops, tiles["of_den"][0]
    if program.backward:
        scores = scores + ops.across(ops.by_column(of_den))
    else:
        scores = scores + ops.down(ops.by_row(of_den))
    return jnp.where(program.seen(not program.backward), scores, 0.0)


def _of_denominators(
    program: WideProgram, tiles: Tiles, weights: Terms | None, stages: Tiles
) -> jax.Array:
    """What the denominators of other chunks contribute."""
    ops, totals = program.ops, program.columns(stages["total"])
    if program.backward:
        scales = [None] if weights is None else weights
    else:
        of_den = ops.by_row(tiles["of_den"][0])
        scales = [of_den] if weights is None else [of_den * w for w in weights]
    return plus(
        ops.across(z) if scale is None else ops.down(scale) * ops.across(z)
        for scale, z in zip(scales, totals, strict=True)
    )


def _turned(program: WideProgram, x: jax.Array, weights: Terms | None) -> Terms:
    """The tile times each of its rows' cosine and sine, for products.

    Turning the factors gives the sum over a panel's terms in one accumulator.
    """
    if weights is None:
        return [x.astype(program.dtype)]
    x = x.astype(jnp.float32)
    return [(x * program.ops.down(w)).astype(program.dtype) for w in weights]


def _with_transposed(program: WideProgram, a: list, b: list) -> list[tuple[Any, Any]]:
    turned = (program.ops.transposed(x) for x in b)
    return list(zip(a, turned, strict=True))
