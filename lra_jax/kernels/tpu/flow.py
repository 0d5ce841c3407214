"""Non-causal Flow-Attention on TPUs: one kernel forward, one backward.

The flows are sums over sums: a query's incoming flow needs the sum of phi(k), the keys'
conserved flow needs the incoming flows, the competition's sum needs the conserved flow,
and the output needs that sum. So forward walks over keys, queries, keys and queries,
and backward over queries, keys, queries and keys (`lra_jax.kernels.tpu.sweeps`); the
computations are in `lra_jax.kernels.tpu.flow_kernels`.

Per-position values are recomputed in every sweep; between forward and backward only the
sums are kept.
"""

import functools
from typing import Any

import jax

from lra_jax.kernels.spec import FlowSpec, Gradients, Inputs
from lra_jax.kernels.tpu.flow_kernels import (
    LINES,
    backward_kernel,
    forward_kernel,
)
from lra_jax.kernels.tpu.layout import LANES, layout, like
from lra_jax.kernels.tpu.sweeps import Side, sides


def forward(spec: FlowSpec, given: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, the sums for `backward`."""
    queries, keys = _sides(spec, given, (1, 1), (1, 1), "kqkq")
    lay, group = keys.layout.lay, keys.layout.group
    query, key, value = given[:3]
    values = keys.only(1).values
    pairs = [(lay(query), queries.keys), (lay(key), keys.keys), (lay(value), values)]
    rows, columns = pairs[0][0].shape[0], pairs[2][0].shape[2]
    out = jax.ShapeDtypeStruct((rows, query.shape[1], columns), query.dtype)
    outputs = [(out, queries.only(1).values)]
    sums = (LINES, group.columns), (group.columns, group.value_columns)
    outputs += keys.sums(rows, sums) if save else []
    kernel = functools.partial(forward_kernel, queries, keys, _masked(given))
    pairs += _hidden(given, keys, queries)
    out, *saved = keys.run(kernel, pairs, outputs, () if save else sums)
    return keys.layout.unlay(out), saved


def backward(spec: FlowSpec, given: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    queries, keys = _sides(spec, given, (2, 1), (2, 2), "qkqk")
    lay, group = keys.layout.lay, keys.layout.group
    query, key, value = given[:3]
    pairs = [(lay(query), queries.keys), (lay(key), keys.keys)]
    pairs += [(lay(value), keys.values)]
    places = queries.only(1).keys, keys.only(1).keys, keys.only(0).values
    outputs = [(like(x), place) for (x, _), place in zip(pairs, places, strict=True)]
    sums = (LINES, group.columns), (group.columns, group.value_columns)
    pairs += _hidden(given, keys, queries)
    pairs += [(lay(of_out), queries.values)]
    pairs += keys.placed(saved)
    kernel = functools.partial(backward_kernel, queries, keys, _masked(given))
    return keys.layout.gradients(keys.run(kernel, pairs, outputs, sums))


def _sides(
    spec: FlowSpec,
    given: Inputs,
    of_query: tuple[int, int],
    of_key: tuple[int, int],
    order: str,
) -> tuple[Side, Side]:
    """The sides of a kernel that holds this many arrays of widths H and Hv."""
    query, found = given.query, layout(given)
    group = found.group
    columns = (-(-x // LANES) * LANES for x in (group.columns, group.value_columns))
    wide, value_wide = columns
    widths = [a * wide + b * value_wide for a, b in (of_query, of_key)]
    lengths = query.shape[1], given.key.shape[1]
    return sides(spec, found, lengths, (widths[0], widths[1]), query.dtype, order)


def _masked(given: Inputs) -> tuple[bool, bool]:
    return given.mask is not None, given.query_mask is not None


def _hidden(given: Inputs, keys: Side, queries: Side) -> list[tuple[jax.Array, Any]]:
    pairs = (given.mask, keys.mask), (given.query_mask, queries.mask)
    return [(mask, place) for mask, place in pairs if mask is not None]
