"""Non-causal Flow-Attention on TPUs: one kernel forward, one backward.

The flows are sums over sums: phi(k) has to be summed before a query's incoming flow is
known, that before the keys' conserved flow, that before the competition's sum, that
before an output. So forward walks over keys, queries, keys and queries, and backward
over queries, keys, queries and keys (`lra_jax.kernels.tpu.sweeps`; what they
compute is in `lra_jax.kernels.tpu.flow_kernels`).

What a position has is computed anew in every sweep; between forward and backward only
the sums are kept.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.kernels.spec import FlowSpec
from lra_jax.kernels.tpu.flow_kernels import (
    LINES,
    backward_kernel,
    forward_kernel,
)
from lra_jax.kernels.tpu.layout import LANES, layout
from lra_jax.kernels.tpu.sweeps import Side, sides

Masks = tuple[jax.Array | None, jax.Array | None]


def forward(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: Masks,
    save: bool,
) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, the sums for `backward`.

    ``masks`` are of the keys `[B, 1, S]` and of the queries `[B, 1, T]`, float32.
    """
    queries, keys = _sides(spec, query, key, value, (1, 1), (1, 1), "kqkq")
    lay, group = keys.layout.lay, keys.layout.group
    values = keys.only(1).values
    pairs = [(lay(query), queries.keys), (lay(key), keys.keys), (lay(value), values)]
    rows, columns = pairs[0][0].shape[0], pairs[2][0].shape[2]
    out = jax.ShapeDtypeStruct((rows, query.shape[1], columns), query.dtype)
    outputs = [(out, queries.only(1).values)]
    sums = (LINES, group.columns), (group.columns, group.value_columns)
    if save:
        for shape in sums:
            kept = jax.ShapeDtypeStruct((rows, keys.layout.groups, *shape), jnp.float32)
            outputs.append((kept, keys.of_group(*shape)))
    kernel = functools.partial(forward_kernel, queries, keys, _given(masks))
    pairs += _hidden(masks, keys, queries)
    out, *saved = keys.run(kernel, pairs, outputs, () if save else sums)
    return keys.layout.unlay(out, query.shape[2]), saved


def backward(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: Masks,
    saved: Any,
    of_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value."""
    queries, keys = _sides(spec, query, key, value, (2, 1), (2, 2), "qkqk")
    lay, group = keys.layout.lay, keys.layout.group
    pairs = [(lay(query), queries.keys), (lay(key), keys.keys)]
    pairs += [(lay(value), keys.values)]
    places = queries.only(1).keys, keys.only(1).keys, keys.only(0).values
    outputs = [
        (jax.ShapeDtypeStruct(x.shape, x.dtype), place)
        for (x, _), place in zip(pairs, places, strict=True)
    ]
    sums = (LINES, group.columns), (group.columns, group.value_columns)
    pairs += _hidden(masks, keys, queries)
    pairs += [(lay(of_out), queries.values)]
    pairs += [(x, keys.of_group(*shape)) for x, shape in zip(saved, sums, strict=True)]
    kernel = functools.partial(backward_kernel, queries, keys, _given(masks))
    slopes = keys.run(kernel, pairs, outputs, sums)
    of_query, of_key, of_value = (keys.layout.unlay(x, query.shape[2]) for x in slopes)
    return of_query, of_key, of_value


def _sides(
    spec: FlowSpec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    of_query: tuple[int, int],
    of_key: tuple[int, int],
    order: str,
) -> tuple[Side, Side]:
    """The sides of a kernel that holds so many arrays of widths H and Hv."""
    found = layout(query.shape[2], query.shape[3], value.shape[3])
    group = found.group
    columns = (-(-x // LANES) * LANES for x in (group.columns, group.value_columns))
    wide, value_wide = columns
    widths = [a * wide + b * value_wide for a, b in (of_query, of_key)]
    lengths = query.shape[1], key.shape[1]
    return sides(spec, found, lengths, (widths[0], widths[1]), query.dtype, order)


def _given(masks: Masks) -> tuple[bool, bool]:
    return masks[0] is not None, masks[1] is not None


def _hidden(masks: Masks, keys: Side, queries: Side) -> list[tuple[jax.Array, Any]]:
    places = keys.mask, queries.mask
    return [(x, y) for x, y in zip(masks, places, strict=True) if x is not None]
