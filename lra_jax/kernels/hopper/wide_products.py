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
from lra_jax.kernels.hopper.parts import send
from lra_jax.kernels.hopper.wide_parts import Named, Tiles, WideProgram


def sums(program: WideProgram, arrays: Named) -> list[jax.Array]:
    """The states and totals of each segment; a program per pair of panels."""
    names = [program.column_array, program.summand_array, "scale"]
    names += ["of_den"] if program.backward else []
    needed = program.needed(arrays, *names)
    stages = {
        "column": program.spec.terms,
        "value": program.stages_summand(needed),
    }
    outputs = dict(zip(("states", "totals"), program.states(), strict=True))
    panels = program.feature_panels * program.value_panels
    return program.launch(_sums, needed, outputs, (stages, {}), panels)


def products(
    program: WideProgram, arrays: Named, starts: list[jax.Array]
) -> list[jax.Array]:
    """Outputs `[B, T, N, Hv]` and denominators `[B, N, T]`; a program per panel.

    A mirrored program gives the values' gradient alone.
    """
    causal, terms = program.spec.is_causal, len(program.terms)
    names = [program.row_array, *([program.column_array, program.summand_array] if causal else [])]
    needed = program.needed(arrays, *names, "scale")
    needed |= dict(zip(("states", "totals"), starts, strict=True))
    stages = {"out": 1, "state": 1 if causal else terms}
    if causal:
        stages |= {"column": 1, "value": program.stages_summand(needed)}
    outputs, vectors = {"out": program.result(program.value_panels)}, {}
    if not program.backward:
        outputs["den"], vectors = program.line(), {"total": terms, "den": 1}
    panels = program.value_panels
    return program.launch(_products, needed, outputs, (stages, vectors), panels)


def _sums(program: WideProgram, given: Named, stages: Tiles) -> None:
    ops, count = program.ops, program.spec.terms
    panel = lax.div(program.panel, program.value_panels)
    of_value = lax.rem(program.panel, program.value_panels)
    panels = {program.column_array: panel, program.summand_array: of_value}

    def body(first: Any, tiles: Tiles, carry: tuple) -> tuple:
        state, total = carry
        weights = program.weights(first, given["scale"])
        program.stage(
            stages["column"], program.panel_terms(program.column_array, tiles, weights)
        )
        value = program.summand(tiles, 0, stages["value"])
        plgpu.commit_smem()
        state = ops.added(
            *(
                (s, [(ops.transposed(ref), value)])
                for s, ref in zip(state, stages["column"], strict=True)
            )
        )
        of_den = ops.by_row(tiles["of_den"][0]) if program.backward else None
        return tuple(state), summed(program, total, stages["column"], of_den)

    nothing = (
        tuple(make() for _ in range(count)) for make in (ops.zero_tile, ops.zero_columns)
    )
    found = program.walk_panels(body, _walked(given), panels, tuple(nothing))
    for name, parts in zip(("states", "totals"), found, strict=True):
        for term, part in enumerate(parts):
            at = (*program.here(), of_value, panel * count + term)
            given[name].at[*at][...] = part


def _products(program: WideProgram, given: Named, stages: Tiles) -> None:
    ops, causal = program.ops, program.spec.is_causal
    batch, head, _ = program.here()
    panel, forward = program.panel, not program.backward
    start = program.start(given, stages, [(panel, t) for t in program.terms])
    if forward:
        program.start_totals(given, stages, 0)

    def body(first: Any, tiles: Tiles, state: tuple) -> tuple:
        weights = program.weights(first, given["scale"])
        value = program.summand(tiles, 0, stages["value"]) if causal else None
        num, after = ops.zero_tile(), []
        scores, den = num, ops.zero_rows()
        columns = program.panel_terms(program.column_array, tiles, weights)
        for t, x in enumerate(program.panel_terms(program.row_array, tiles, weights)):
            z = ops.by_column(stages["total"][t]) if forward else None
            if z is not None:
                den = den + (x.astype(jnp.float32) * ops.across(z)).sum(1)
            if not causal:
                (num,) = ops.added((num, [(x, stages["state"][t])]))
                continue
            y = next(columns)
            stages["column"][0][...] = y
            stages["state"][0][...] = state[t].astype(program.dtype)
            plgpu.commit_smem()
            turned = ops.transposed(stages["column"][0])
            num, scores, new = ops.added(
                (num, [(x, stages["state"][0])]),
                (scores, [(x, turned)]),
                (state[t], [(turned, value)]),
            )
            after.append(new)
            if z is not None:
                stages["total"][t][...] = z + y.astype(jnp.float32).sum(0)
        if causal:
            scores = jnp.where(program.seen(forward), scores, 0.0).astype(program.dtype)
            den = den + scores.astype(jnp.float32).sum(1)
            (num,) = ops.added((num, [(scores, value)]))
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

        return tuple(after)

    panels = {program.summand_array: panel}
    program.walk_panels(body, _walked(given), panels, tuple(start))
    plgpu.wait_smem_to_gmem(0)


def _walked(given: Named) -> Named:
    fixed = ("scale", "states", "totals", "out", "den")
    return {name: ref for name, ref in given.items() if name not in fixed}
