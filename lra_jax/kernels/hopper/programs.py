"""Linear attention on Hopper GPUs: segments in parallel, chunks in order inside.

A program takes one segment of one head and walks over its chunks of 64 positions with
the state in registers. Where samples and heads alone do not fill the device, a sequence
has several segments; the sums of each are made first, by a pass over keys and values
(in the backward pass, over queries and the output's gradient), and added up here.

Without causality the sums over all keys come from the same pass, and the other kernels
apply them.

Heads are padded to 64 columns and sequences to whole segments here; what is padded has
features of zero.
"""

from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.kernels.hopper import backward as slopes
from lra_jax.kernels.hopper import forward as products
from lra_jax.kernels.hopper.parts import LinearProgram, whole
from lra_jax.kernels.spec import Spec


def forward(
    spec: Spec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    scale: jax.Array,
    save: bool,
) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and what `backward` needs."""
    length, width = query.shape[1], value.shape[3]
    q, k, v, mask = _padded(spec, query, key, value, mask)
    over_queries, over_keys = _program(spec, q), _program(spec, k)
    if _one_segment(over_keys):
        starts = [jnp.zeros(x.shape, x.dtype) for x in over_keys.states()]
    else:
        starts = _before(spec, products.sums(over_keys, k, v, mask, scale))
    pairs = (k, v) if spec.is_causal else None
    out, den = products.outputs(over_queries, q, pairs, mask, scale, starts)
    out = out[:, :length, :, :width]
    return out, ((out, den, starts) if save else ())


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
    out, den, starts = saved
    q, k, v, mask = _padded(spec, query, key, value, mask)
    up = whole(spec, of_out)
    lines = _lines(spec, out, den, of_out)
    over_queries = _program(spec, q)
    pairs = (k, v) if spec.is_causal else None
    arrays = (over_queries, q, up, lines)
    of_query = slopes.queries(*arrays, pairs, mask, scale, starts)
    if _one_segment(over_queries):
        laters = [jnp.zeros(x.shape, x.dtype) for x in over_queries.states()]
    else:
        laters = _after(spec, slopes.mirrored_sums(*arrays, scale))
    over_keys = _program(spec, k, backward=True)
    later_arrays = [q, up, *lines] if spec.is_causal else []
    of_key, of_value = slopes.pairs(over_keys, k, v, mask, scale, laters, later_arrays)
    of_query, of_key, of_value = (
        x[:, : like.shape[1], :, : like.shape[3]]
        for x, like in ((of_query, query), (of_key, key), (of_value, value))
    )
    return of_query, of_key, of_value


def _program(spec: Spec, x: jax.Array, backward: bool = False) -> LinearProgram:
    batch, length, heads, _ = x.shape
    return LinearProgram(spec, (batch, heads, length), x.dtype, backward)


def _one_segment(program: LinearProgram) -> bool:
    """Whether nothing lies outside the program's own walk."""
    return program.spec.is_causal and program.segments == 1


def _padded(
    spec: Spec,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    query, key = (whole(spec, x, alive=False) for x in (query, key))
    value = whole(spec, value)
    if mask is not None:
        mask = mask[:, 0]
        mask = jnp.pad(mask, [(0, 0), (0, key.shape[1] - mask.shape[1])])
    return query, key, value, mask


def _before(spec: Spec, sums: list[jax.Array]) -> list[jax.Array]:
    """The sum before each segment `[B, N, G, ...]`; the whole sum if not causal."""
    if not spec.is_causal:
        return [x.sum(2, keepdims=True) for x in sums]
    return [jnp.cumsum(x, 2) - x for x in sums]


def _after(spec: Spec, sums: list[jax.Array]) -> list[jax.Array]:
    if not spec.is_causal:
        return _before(spec, sums)
    return [jnp.flip(jnp.cumsum(jnp.flip(x, 2), 2), 2) - x for x in sums]


def _lines(
    spec: Spec, out: jax.Array, den: jax.Array, of_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """1 / den and the denominators' gradients, `[B, N, T]`."""
    inverse = 1.0 / spec.bounded(den)
    product = out.astype(jnp.float32) * of_out.astype(jnp.float32)
    both = jnp.swapaxes(product.sum(3), 1, 2)
    both = jnp.pad(both, [(0, 0), (0, 0), (0, den.shape[2] - both.shape[2])])
    return inverse, -both * inverse * spec.passes(den)
