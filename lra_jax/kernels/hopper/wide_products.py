"""Sums and outputs of wide heads on Hopper GPUs, and the values' gradient.

The latter is the mirror image of an output: ``sum_i w_ij g_i`` over later positions i.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lra_jax.kernels.hopper.forward import summed
from lra_jax.kernels.hopper.parts import Terms, send
from lra_jax.kernels.hopper.wide_parts import Named, Tiles, WideProgram


def sums(program: WideProgram, arrays: Named) -> list[jax.Array]:
    """The states and totals of each segment; a program per pair of panels."""
    names = [program.column_array, program.summand_array, "scale"]
    names += ["of_den"] if program.backward else []
    needed = program.needed(arrays, *names)
    states, totals = program.states()
    outputs = {"states": states, "totals": totals}
    stages = {"column sines": program.spec.terms - 1}, {}
    panels = program.feature_panels * program.value_panels
    return program.launch(_sums, needed, outputs, stages, panels)


def products(
    program: WideProgram, arrays: Named, starts: list[jax.Array]
) -> list[jax.Array]:
    """Outputs `[B, T, N, Hv]` and denominators `[B, N, T]`; a program per panel.

    A mirrored program gives the values' gradient alone.
    """
    names = [program.row_array, "scale"]
    if program.spec.is_causal:
        names += [program.column_array, program.summand_array]
    needed = program.needed(arrays, *names)
    needed |= dict(zip(("states", "totals"), starts, strict=True))
    terms = len(program.terms)
    sines = terms - program.feature_panels
    tiles = {"out": 1, "state": terms, "row sines": sines}
    if program.spec.is_causal:
        tiles["column sines"] = sines
    outputs, vectors = {"out": program.result(program.value_panels)}, {}
    if not program.backward:
        outputs["den"], vectors = program.line(), {"total": terms, "den": 1}
    stages = tiles, vectors
    return program.launch(_products, needed, outputs, stages, program.value_panels)


def _sums(program: WideProgram, given: Named, stages: Tiles) -> None:
    ops, count = program.ops, program.spec.terms
    panel = lax.div(program.panel, program.value_panels)
    of_value = lax.rem(program.panel, program.value_panels)
    panels = {program.column_array: panel, program.summand_array: of_value}

    def body(first: Any, tiles: Tiles, carry: tuple) -> tuple:
        state, total = carry
        weights = program.weights(first, given["scale"])
        name, sines = program.column_array, stages["column sines"]
        ((columns, _),) = program.put_features(name, tiles, weights, sines)
        program.put_values(program.summand_array, tiles)
        plgpu.commit_smem()
        (value,) = tiles[program.summand_array]
        state = ops.added(
            *(
                (s, [(ops.transposed(ref), value)])
                for s, ref in zip(state, columns, strict=True)
            )
        )
        of_den = ops.by_row(tiles["of_den"][0]) if program.backward else None
        return tuple(state), summed(program, total, columns, of_den)

    zeros = (ops.zero_tile, ops.zero_columns)
    nothing = (tuple(zero() for _ in range(count)) for zero in zeros)
    found = program.walk_panels(body, given, panels, tuple(nothing))
    for name, parts in zip(("states", "totals"), found, strict=True):
        for term, part in enumerate(parts):
            at = (*program.here(), of_value, panel * count + term)
            given[name].at[*at][...] = part


def _products(program: WideProgram, given: Named, stages: Tiles) -> None:
    ops, causal, forward = program.ops, program.spec.is_causal, not program.backward
    batch, head, _ = program.here()
    panel = program.panel
    start = program.start(given, stages, [(panel, t) for t in program.terms])
    if forward:
        program.start_totals(given, stages, 0)

    def body(first: Any, tiles: Tiles, state: tuple) -> tuple:
        weights = program.weights(first, given["scale"])
        rows, den = _rows(program, tiles, weights, stages)
        pairs = list(zip(rows, stages["state"], strict=True))
        if causal:
            scores, state = _grown(program, tiles, weights, state, rows, stages)
            pairs.append((scores, tiles[program.summand_array][0]))
            den = den + scores.astype(jnp.float32).sum(1)
        else:
            plgpu.commit_smem()
        num = ops.product(*pairs)
        if forward and program.spec.denominator != "none":
            num = num / ops.down(program.spec.bounded(den))
        plgpu.wait_smem_to_gmem(0)
        stages["out"][0][...] = num.astype(program.dtype)
        if forward:
            stages["den"][0][...] = den
        plgpu.commit_smem()
        send(first, [(stages["out"][0], given["out"])], (batch, head, panel))
        if forward:
            # Every panel's program has the same denominators.
            @pl.when(panel == 0)
            def _():
                send(first, [(stages["den"][0], given["den"])], (batch, head))

        return state

    panels = {program.summand_array: panel}
    program.walk_panels(body, given, panels, tuple(start))
    plgpu.wait_smem_to_gmem(0)


def _rows(
    program: WideProgram, tiles: Tiles, weights: Terms | None, stages: Tiles
) -> tuple[list[Any], jax.Array]:
    """The places of the rows' terms, and what denominators owe to other chunks."""
    ops, found, den = program.ops, [], program.ops.zero_rows()
    put = program.put_features(program.row_array, tiles, weights, stages["row sines"])
    for places, _ in put:
        totals = stages.get("total", [])[len(found) : len(found) + len(places)]
        # Read again, so that the terms need not stay in registers.
        for ref, z in zip(places, program.columns(totals), strict=False):
            den = den + (ops.tile(ref).astype(jnp.float32) * ops.across(z)).sum(1)
        found += places
    return found, den


def _grown(
    program: WideProgram,
    tiles: Tiles,
    weights: Terms | None,
    state: tuple,
    rows: list[Any],
    stages: Tiles,
) -> tuple[jax.Array, tuple]:
    """A chunk's weights, a row for each of the program's rows, and the new states."""
    ops, columns = program.ops, []
    sines = stages["column sines"]
    for places, terms in program.put_features(
        program.column_array, tiles, weights, sines
    ):
        totals = stages.get("total", [])[len(columns) : len(columns) + len(terms)]
        for total, term in zip(totals, terms, strict=False):
            total[...] = ops.by_column(total) + term.astype(jnp.float32).sum(0)
        columns += places
    program.put_values(program.summand_array, tiles)
    program.stage(stages["state"], state)
    plgpu.commit_smem()
    turned = [ops.transposed(ref) for ref in columns]
    (value,) = tiles[program.summand_array]
    scores, *after = ops.added(
        (ops.zero_tile(), list(zip(rows, turned, strict=True))),
        *((s, [(ref, value)]) for s, ref in zip(state, turned, strict=True)),
    )
    scores = jnp.where(program.seen(not program.backward), scores, 0.0)
    return scores.astype(program.dtype), tuple(after)
