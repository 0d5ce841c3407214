"""Flow-Attention by the C++ kernels; see flow.h and flow_whole.h.

The flows, the competition and the allocation are numbers of one position and head. The
causal form computes them in one pass with running sums, the other form in three, each
of which needs the sums of the one before. Then the output is that of plain linear
attention with weighted values, ``(a_i / I_i) sum_j phi(q_i) . phi(k_j) c_j v_j``, by
the kernel of linear attention. The gradient passes through the same two steps.
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


def forward(spec: FlowSpec, given: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    unit = _unit(spec, given)
    rows, columns = given.query.shape[:3], given.key.shape[:3]
    shapes, sums = [rows] * 7, []
    if not spec.is_causal:
        width = programs.padded(given.query.shape[3]) + library.lanes()
        flow_sums = (rows[0], rows[2], 4 * width)
        shapes = [rows, rows, columns, columns, flow_sums, columns, rows]
        sums = [programs.sums_shape(spec, given.query, given.value)]
    *terms, competition, factor = programs.call(
        _name(spec, "flow_terms"), shapes, _arrays(given, unit), **_attributes(spec)
    )
    out, _, *sums = programs.call(
        _name(spec, "forward"),
        [(*rows, given.value.shape[3]), (0,), *sums],
        [*_product_arrays(given, unit, competition), factor],
        **_product_attributes(spec),
    )
    return out, ((out, factor, sums, unit, terms, competition) if save else ())


def backward(spec: FlowSpec, given: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    out, factor, sums, unit, terms, competition = saved
    # `through` is the gradient of the logarithm of a / I.
    of_query, of_key, of_value, of_competition, through = programs.call(
        _name(spec, "backward"),
        [*(x.shape for x in given[:3]), competition.shape, factor.shape],
        [*_product_arrays(given, unit, competition), out, factor, *sums, of_out],
        **_product_attributes(spec),
    )
    arrays = [*_arrays(given, unit), *terms, competition, through, of_competition]
    of_query, of_key = programs.call(
        _name(spec, "flow_backward"),
        [of_query.shape, of_key.shape],
        arrays,
        added_to=(of_query, of_key),
        **_attributes(spec),
    )
    return of_query, of_key, of_value


def _name(spec: FlowSpec, step: str) -> str:
    return f"lra_{'causal' if spec.is_causal else 'whole'}_{step}"


def _unit(spec: FlowSpec, given: Inputs) -> jax.Array:
    """The power of two by which features are divided, `[B]`.

    Flows are sums of products of two features, which overflow float32 if features are
    beyond 1e18. The unit cancels; `lra_jax.attention.flow.causal.unit_of` has the same,
    which kernels may not import.
    """
    if spec.feature_map == "sigmoid":
        return programs.units(given.query)
    phi = MAPS[spec.feature_map]
    largest = jnp.maximum(
        *(jnp.abs(phi(x)[0]).max((1, 2, 3)) for x in (given.query, given.key))
    )
    _, exponent = jnp.frexp(largest)
    power = jnp.clip(exponent - _ROOM, 0, _LARGEST - _ROOM)
    unit = jnp.ldexp(jnp.ones_like(largest), power)
    return jnp.where(jnp.isfinite(largest), unit, 1.0)


def _arrays(given: Inputs, unit: jax.Array) -> list[jax.Array]:
    masks = (programs.mask_of(x) for x in (given.mask, given.query_mask))
    return [given.query, given.key, *masks, unit]


def _product_arrays(
    given: Inputs, unit: jax.Array, competition: jax.Array
) -> list[jax.Array]:
    return [*given[:3], programs.mask_of(given.mask), unit, unit, competition]


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
        "denominator": programs.denominator("given"),
        "eps": np.float32(0),
    }
