"""The gradients of query and key of wide heads on Hopper GPUs.

A program owns a panel of one of them and sums over all panels of the values, so there
are no partial sums. The keys' gradient is the mirror image of the queries', except for
the denominators: their gradients ``d_i`` belong to queries, which are rows in one and
columns in the other.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.forward import summed
from lra_jax.kernels.hopper.parts import Terms, send
from lra_jax.kernels.hopper.wide_parts import Named, Tiles, WideProgram


def slopes(program: WideProgram, arrays: Named, starts: list[jax.Array]) -> jax.Array:
    """The gradient of the program's rows; a program per panel of features."""
    causal, terms = program.spec.is_causal, program.spec.terms
    names = [program.row_array, program.factor_array, "scale"]
    names += [program.column_array, program.summand_array] if causal else []
    names += ["of_den"] if causal or not program.backward else []
    needed = program.needed(arrays, *names)
    needed |= dict(zip(("states", "totals"), starts, strict=True))
    tiles = {"out": 1, "state": terms * program.value_panels}
    if causal:
        tiles["column sines"] = terms - 1
    outputs = {"out": program.result(program.feature_panels)}
    stages = tiles, {"total": terms}
    return program.launch(_slopes, needed, outputs, stages, program.feature_panels)[0]


def _slopes(program: WideProgram, given: Named, stages: Tiles) -> None:
    ops, count = program.ops, program.spec.terms
    batch, head, _ = program.here()
    first_term = program.panel * count
    own = [first_term + t for t in range(count)]
    places = [(w, t) for w in range(program.value_panels) for t in own]
    start = program.start(given, stages, places)
    program.start_totals(given, stages, first_term)

    def body(first: Any, tiles: Tiles, state: tuple) -> tuple:
        weights = program.weights(first, given["scale"])
        valid = program.valid(tiles) if program.row_array == "key" else None
        program.put_values(program.factor_array, tiles)
        scores, columns = None, []
        if program.spec.is_causal:
            scores, columns, state = _grown(program, tiles, weights, state, stages)
        else:
            plgpu.commit_smem()
        found = _of_terms(program, tiles, scores, columns, stages)
        plgpu.wait_smem_to_gmem(0)
        stages["out"][0][...] = program.pulled_back(
            found, tiles[program.row_array][0], weights, valid
        )
        if columns:
            of_den = ops.by_row(tiles["of_den"][0]) if program.backward else None
            total = program.columns(stages["total"])
            total = summed(program, total, columns, of_den)
            program.put(stages["total"], total)
        plgpu.commit_smem()
        at = (batch, head, program.panel)
        send(first, [(stages["out"][0], given["out"])], at)
        return state

    panels = {program.row_array: program.panel, program.column_array: program.panel}
    program.walk_panels(body, given, panels, tuple(start))
    plgpu.wait_smem_to_gmem(0)


def _grown(
    program: WideProgram,
    tiles: Tiles,
    weights: Terms | None,
    state: tuple,
    stages: Tiles,
) -> tuple[jax.Array, list[Any], tuple]:
    """The gradients of a chunk's weights, a row for each of the program's rows.

    Also the places of the columns' terms, and the new states.
    """
    ops, name = program.ops, program.column_array
    put = program.put_features(name, tiles, weights, stages["column sines"])
    ((columns, _),) = put
    program.put_values(program.summand_array, tiles)
    program.stage(stages["state"], state)
    plgpu.commit_smem()
    factors, summands = tiles[program.factor_array], tiles[program.summand_array]
    turned = [(ops.transposed(ref), value) for value in summands for ref in columns]
    scores, *after = ops.added(
        (ops.zero_tile(), _with_transposed(program, factors, summands)),
        *((s, [pair]) for s, pair in zip(state, turned, strict=True)),
    )
    if program.backward:
        of_den = ops.across(ops.by_column(tiles["of_den"][0]))
    else:
        of_den = ops.down(ops.by_row(tiles["of_den"][0]))
    scores = jnp.where(program.seen(not program.backward), scores + of_den, 0.0)
    return scores.astype(program.dtype), columns, tuple(after)


def _of_terms(
    program: WideProgram,
    tiles: Tiles,
    scores: jax.Array | None,
    columns: list[Any],
    stages: Tiles,
) -> Iterator[jax.Array]:
    """The gradients of the rows' terms."""
    ops, count = program.ops, program.spec.terms
    for term, z in enumerate(program.columns(stages["total"])):
        states = stages["state"][term::count]
        pairs = _with_transposed(program, tiles[program.factor_array], states)
        if scores is not None:
            pairs.append((scores, columns[term]))
        found, of_total = ops.product(*pairs), ops.across(z)
        if not program.backward:
            of_total = ops.down(ops.by_row(tiles["of_den"][0])) * of_total
        yield found + of_total


def _with_transposed(
    program: WideProgram, a: list[Any], b: list[Any]
) -> list[tuple[Any, Any]]:
    return list(zip(a, (program.ops.transposed(x) for x in b), strict=True))
