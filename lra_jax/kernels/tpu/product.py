"""Non-causal linear attention on TPUs: every array is read once in each direction.

Forward, one kernel sums ``phi(k_j) v_j^T`` and ``phi(k_j)`` over the keys, another
applies the sums to the queries. Backward mirrors it: the queries' kernel makes their
gradient and sums ``phi(q_i) g_i^T``, where g is the gradient of the numerator; the
keys' kernel applies those sums. The two lengths may differ. Features, doubled or not,
exist in VMEM only; what passes between the kernels is a state for each head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lra_jax.kernels.spec import Spec, plus
from lra_jax.kernels.tpu.layout import LinearCall, layout
from lra_jax.kernels.tpu.parts import (
    Terms,
    read,
    start,
    valid_rows,
    write,
)


def forward(
    spec: Spec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    save: bool,
) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    over_keys, over_queries = _calls(spec, query, key, value)
    lay = over_keys.layout.lay
    hidden = [] if mask is None else [(mask, over_keys.mask)]
    angles = over_keys.angles(scale)
    arrays = [(lay(key), over_keys.keys), (lay(value), over_keys.values), *hidden]
    rows, columns = arrays[0][0].shape[0], arrays[1][0].shape[2]
    kernel = functools.partial(_sum_kernel, over_keys, mask is not None)
    sums = over_keys.run(kernel, [angles, *arrays], _states(over_keys, rows))
    out_shape = jax.ShapeDtypeStruct((rows, query.shape[1], columns), query.dtype)
    arrays = [angles, (lay(query), over_queries.keys), *_given(over_queries, sums)]
    kernel = functools.partial(_apply_kernel, over_queries)
    outputs = [(out_shape, over_queries.values)]
    (out,) = over_queries.run(kernel, arrays, outputs)
    return over_keys.layout.unlay(out, query.shape[2]), sums if save else []


def backward(
    spec: Spec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    saved: Any,
    of_out: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value."""
    over_keys, over_queries = _calls(spec, query, key, value)
    lay, angles = over_keys.layout.lay, over_keys.angles(scale)
    arrays = [(lay(query), over_queries.keys), (lay(of_out), over_queries.values)]
    of_query = (_like(arrays[0][0]), over_queries.keys)
    outputs = [of_query, *_states(over_queries, arrays[0][0].shape[0])]
    kernel = functools.partial(_queries_kernel, over_queries)
    arrays += _given(over_queries, saved)
    of_query, *later = over_queries.run(kernel, [angles, *arrays], outputs)
    hidden = [] if mask is None else [(mask, over_keys.mask)]
    arrays = [(lay(key), over_keys.keys), (lay(value), over_keys.values), *hidden]
    outputs = [(_like(x), spec) for x, spec in arrays[:2]]
    arrays += _given(over_keys, later)
    kernel = functools.partial(_keys_kernel, over_keys, mask is not None)
    of_key, of_value = over_keys.run(kernel, [angles, *arrays], outputs)
    unlay = functools.partial(over_keys.layout.unlay, heads=query.shape[2])
    return unlay(of_query), unlay(of_key), unlay(of_value)


def _calls(
    spec: Spec, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[LinearCall, LinearCall]:
    found = layout(query.shape[2], query.shape[3], value.shape[3])
    over_keys, over_queries = (
        LinearCall(spec, found, x.shape[1], query.dtype) for x in (key, query)
    )
    return over_keys, over_queries


def _like(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _states(
    call: LinearCall, rows: int
) -> list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]]:
    """State and total as outputs, one for each group of heads."""
    return [
        (
            jax.ShapeDtypeStruct((rows, call.layout.groups, *sizes), jnp.float32),
            call.of_group(*sizes),
        )
        for sizes in call.state_shapes
    ]


def _given(call: LinearCall, sums: Any) -> list[tuple[jax.Array, pl.BlockSpec]]:
    """State and total as inputs."""
    shapes = zip(sums, call.state_shapes, strict=True)
    return [(x, call.of_group(*sizes)) for x, sizes in shapes]


class _Rows:
    """A block's chunks of one array of features."""

    def __init__(self, call: LinearCall, scale: Any, ref: Any, mask: Any = None):
        size, self.chunk, self.ref = call.spec.chunk, call.chunk, ref
        self.call, self.mask, self.scale = call, mask, scale
        self.parts = [slice(at, at + size) for at in range(0, call.spec.block, size)]

    def __iter__(self) -> Any:
        """Yields slice, valid rows, terms and the function that pulls back to x."""
        size = self.call.spec.chunk
        for part in self.parts:
            first = pl.program_id(2) * self.call.spec.block + part.start
            hidden = None if self.mask is None else self.mask[:, part]
            valid = valid_rows(first, size, self.call.length, hidden)
            weights = self.chunk.weights(first, size, self.scale)
            terms, slope = self.chunk.features(self.ref[part], valid, weights)
            pull = functools.partial(
                self.chunk.pulled_back, slope=slope, weights=weights
            )
            yield part, valid, terms, pull


def _hidden(x: jax.Array, valid: jax.Array) -> jax.Array:
    return jnp.where(valid, x, jnp.zeros((), x.dtype))


def _sum_kernel(call: LinearCall, masked: bool, *refs: Any) -> None:
    scale, key, value = refs[:3]
    mask, (state_ref, total_ref) = refs[3] if masked else None, refs[-2:]
    start(state_ref, total_ref)
    state, total = read(call.spec.terms, state_ref, total_ref)
    for part, valid, terms, _ in _Rows(call, call.scale(scale), key, mask):
        seen = _hidden(value[part], valid)
        state, total = call.chunk.grown(terms, seen, state, total)
    write(state_ref, total_ref, state, total)


def _apply_kernel(call: LinearCall, *refs: Any) -> None:
    scale, query, state_ref, total_ref, out = refs
    sums = read(call.spec.terms, state_ref, total_ref)
    for part, _, terms, _ in _Rows(call, call.scale(scale), query):
        found = call.chunk.divided(*call.chunk.past(terms, *sums))[0]
        out[part] = found.astype(out.dtype)


def _queries_kernel(call: LinearCall, *refs: Any) -> None:
    scale, query, of_out, state_ref, total_ref, of_query, *later_refs = refs
    chunk, group = call.chunk, call.layout.group
    later_state, later_total = later_refs
    start(later_state, later_total)
    state, total = read(call.spec.terms, state_ref, total_ref)
    later: tuple[Terms, Terms] = read(call.spec.terms, later_state, later_total)
    for part, valid, terms, pull in _Rows(call, call.scale(scale), query):
        num, dens = chunk.past(terms, state, total)
        of_num, of_dens = chunk.slopes(num, dens, _hidden(of_out[part], valid))
        of_den = group.spread(of_dens, group.width)
        slopes = [
            chunk.dot(of_num, s, "nt") + of_den * z
            for s, z in zip(state, total, strict=True)
        ]
        of_query[part] = pull(slopes).astype(of_query.dtype)
        later = chunk.mirrored(terms, of_num, of_den, *later)
    write(later_state, later_total, *later)


def _keys_kernel(call: LinearCall, masked: bool, *refs: Any) -> None:
    scale, key, value = refs[:3]
    mask = refs[3] if masked else None
    state_ref, total_ref, of_key, of_value = refs[-4:]
    chunk = call.chunk
    state, total = read(call.spec.terms, state_ref, total_ref)
    for part, valid, terms, pull in _Rows(call, call.scale(scale), key, mask):
        seen = _hidden(value[part], valid)
        slopes = [
            chunk.dot(seen, s, "nt") + z for s, z in zip(state, total, strict=True)
        ]
        of_key[part] = pull(slopes).astype(of_key.dtype)
        found = plus(chunk.dot(k, s) for k, s in zip(terms, state, strict=True))
        of_value[part] = _hidden(found, valid).astype(of_value.dtype)
