"""Flow-Attention by the C++ kernels; see flow.h, flow_whole.h and flow_packed.h.

The flows, the competition and the allocation are numbers of one position and head, from
which the output is that of plain linear attention with weighted values,
``(a_i / I_i) sum_j phi(q_i) . phi(k_j) c_j v_j``. The causal form computes them in one
pass with running sums, and then calls the kernel of linear attention. The other form
makes all of its sums in one call: it sweeps over keys, queries, keys and queries, and
backward over queries, keys, queries and keys, as each sum needs the one before. In
packed rows it does so for each document, and keeps nothing for the gradient.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.kernels.cpu import library, programs
from lra_jax.kernels.spec import MAPS, FlowSpec, Gradients, Inputs

# Powers of two: 1e12, below which features keep their unit, and 1e18.
_ROOM, _LARGEST = 40, 60


def forward(spec: FlowSpec, operands: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    unit = _unit(spec, operands)
    run = _causal_forward if spec.is_causal else _whole_forward
    out, saved = run(spec, operands, unit)
    return out, ((unit, *saved) if save else ())


def backward(
    spec: FlowSpec, operands: Inputs, saved: Any, of_out: jax.Array
) -> Gradients:
    """The gradients of query, key and value."""
    run = _causal_backward if spec.is_causal else _whole_backward
    return run(spec, operands, saved, of_out)


def _causal_forward(spec: FlowSpec, operands: Inputs, unit: jax.Array) -> tuple:
    rows = operands.query.shape[:3]
    *terms, competition, factor = programs.call(
        "lra_causal_flow_terms",
        [rows] * 7,
        [operands.query, operands.key, *_masks(operands), unit, _documents(operands)],
        **_attributes(spec),
    )
    out, _ = programs.call(
        "lra_causal_forward",
        [(*rows, operands.value.shape[3]), (0,)],
        [*_product_arrays(operands, unit, competition), factor],
        **_product_attributes(spec),
    )
    return out, (out, factor, terms, competition)


def _causal_backward(
    spec: FlowSpec, operands: Inputs, saved: Any, of_out: jax.Array
) -> Gradients:
    unit, out, factor, terms, competition = saved
    # `through` is the gradient of the logarithm of a / I.
    of_query, of_key, of_value, of_competition, through = programs.call(
        "lra_causal_backward",
        [*(x.shape for x in operands[:3]), competition.shape, factor.shape],
        [*_product_arrays(operands, unit, competition), out, factor, of_out],
        **_product_attributes(spec),
    )
    arrays = [
        operands.query,
        operands.key,
        *_masks(operands),
        unit,
        _documents(operands),
    ]
    of_query, of_key = programs.call(
        "lra_causal_flow_backward",
        [of_query.shape, of_key.shape],
        [*arrays, *terms, competition, through, of_competition],
        added_to=(of_query, of_key),
        **_attributes(spec),
    )
    return of_query, of_key, of_value


def _whole_forward(spec: FlowSpec, operands: Inputs, unit: jax.Array) -> tuple:
    batch, length, heads, width = operands.query.shape
    shapes: list[tuple[int, ...]]
    shapes = [(batch, length, heads, operands.value.shape[3])]
    arrays = [*operands[:3], *_masks(operands), unit]
    if operands.documents is not None:
        arrays.append(operands.documents)
        name = "lra_packed_flow_forward"
        return programs.call(name, shapes, arrays, **_attributes(spec))[0], ()
    # The numbers of one head are neighbours, as a thread has one head at a time.
    rows, columns = (batch, heads, length), (batch, heads, operands.key.shape[1])
    width = programs.round_up(width) + library.lanes()
    flow_sums = (batch, heads, 4 * width)
    shapes += [rows, rows, columns, columns, flow_sums, columns, rows]
    shapes.append(programs.sums_shape(operands.query, operands.value))
    name = "lra_whole_flow_forward"
    saved = programs.call(name, shapes, arrays, **_attributes(spec))
    return saved[0], saved


def _whole_backward(
    spec: FlowSpec, operands: Inputs, saved: Any, of_out: jax.Array
) -> Gradients:
    packed = operands.documents is not None
    documents = [operands.documents] if packed else []
    of_query, of_key, of_value = programs.call(
        "lra_packed_flow_backward" if packed else "lra_whole_flow_backward",
        [x.shape for x in operands[:3]],
        [*operands[:3], *_masks(operands), saved[0], *documents, *saved[1:], of_out],
        **_attributes(spec),
    )
    return of_query, of_key, of_value


def _unit(spec: FlowSpec, operands: Inputs) -> jax.Array:
    """The power of two by which features are divided, `[B]`.

    Flows are sums of products of two features, which overflow float32 if features are
    beyond 1e18. The unit cancels; `lra_jax.attention.flow.causal.unit_of` has the same,
    which kernels may not import.
    """
    if spec.feature_map == "sigmoid":
        return programs.units(operands.query)
    phi = MAPS[spec.feature_map]

    def largest_of(x: jax.Array, mask: jax.Array | None) -> jax.Array:
        features = jnp.abs(phi(x)[0])
        if mask is not None:
            features = jnp.where(mask[:, 0, :, None, None] > 0, features, 0)
        return features.max((1, 2, 3), initial=0)

    largest = jnp.maximum(
        largest_of(operands.query, operands.query_mask),
        largest_of(operands.key, operands.mask),
    )
    _, exponent = jnp.frexp(largest)
    power = jnp.clip(exponent - _ROOM, 0, _LARGEST - _ROOM)
    unit = jnp.ldexp(jnp.ones_like(largest), power)
    return jnp.where(jnp.isfinite(largest), unit, 1.0)


def _masks(operands: Inputs) -> list[jax.Array]:
    """The masks of the keys and of the queries."""
    return [programs.mask_of(x) for x in (operands.mask, operands.query_mask)]


def _product_arrays(
    operands: Inputs, unit: jax.Array, competition: jax.Array
) -> list[jax.Array]:
    # There are no slopes.
    others = programs.absent(), _documents(operands), competition
    return [*operands[:3], programs.mask_of(operands.mask), unit, unit, *others]


def _documents(operands: Inputs) -> jax.Array:
    return programs.absent() if operands.documents is None else operands.documents


def _attributes(spec: FlowSpec) -> dict[str, Any]:
    return {
        "map": programs.number(spec.feature_map),
        "clip": np.float32(math.inf if spec.clip is None else spec.clip),
        "eps": np.float32(spec.eps),
        "extra_eps": np.float32(spec.extra_eps),
    }


def _product_attributes(spec: FlowSpec) -> dict[str, Any]:
    return {
        "map": programs.number(spec.feature_map),
        "turned": False,
        "denominator": programs.denominator("argument"),
        "eps": np.float32(0),
        "both_sides": False,
    }
