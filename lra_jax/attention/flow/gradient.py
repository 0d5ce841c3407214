"""The explicit gradient of a segment of causal Flow-Attention.

With ``S = phi(q) phi(k)^T`` for a chunk, E its lower triangle and L its upper one, the
forward pass is

- ``I = E 1``, ``O = L^T 1``, ``I' = E (n / O) / n``, ``O' = L^T (n / I) / n``;
- ``c = n exp(O') / Z``, Z the sums of exp(O') so far, and
  ``out = (a / I) (E (c v))`` with ``a = sigmoid(I')``,

each plus eps and the contribution from before the chunk, with phi in the tables' unit.
So the gradient of S consists of one matrix product G and four outer products,

``dS = tril(G + x (n / O)^T + dI 1^T) + triu((n / I) y^T + 1 dO^T)``,

with ``G = dnum (c v)^T`` and x, y the gradients of ``E (n / O)`` and ``L^T (n / I)``.
These are the products of plain linear attention, and little more. Automatic
differentiation takes many passes over `[C, C]` matrices (docs/performance.md).

No formula is new here: this is the chain rule for `lra_jax.attention.flow.causal`, and
the tests compare it with automatic differentiation.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps
from lra_jax.attention.causal.prefix import (
    from_here,
    hidden,
    prefix,
    prefix_pullback,
    triangle,
)
from lra_jax.attention.flow import causal
from lra_jax.attention.flow.causal import Flows, FlowSums, Options, Tables

_Pair = tuple[jax.Array, jax.Array]


class _Slopes(NamedTuple):
    """Gradients of the flows before their division by n, `[B, N, P, C]`."""

    incoming: jax.Array  # dI
    outgoing: jax.Array  # dO
    sink: jax.Array  # x, of E (n / O)
    source: jax.Array  # y, of L^T (n / I)


def pullback(
    options: Options,
    state: FlowSums,
    features: tuple[jax.Array, jax.Array, jax.Array],
    tables: Tables,
    outputs: jax.Array,
    of_outputs: jax.Array,
    of_after: FlowSums,
) -> tuple[FlowSums, tuple[jax.Array, jax.Array, jax.Array]]:
    """The gradients of state and features, see `engine.Form`.

    For a competition that sums plain exponentials.
    """
    product = functools.partial(jnp.einsum, precision=options.precision)
    features = causal.in_units(features, tables)
    query, key, value = features
    sinks, sources = causal.counts(tables)
    flows, _ = causal.flows(options, state, query, key, tables)

    def compete(
        conserved_source: jax.Array, largest: jax.Array, total: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return causal.compete(options, conserved_source, largest, total, tables)

    (competition, *_), pull_competition = jax.vjp(
        compete, flows.conserved_source, state.largest, state.total
    )
    allocation = causal.allocated(options, flows.conserved_sink)
    of_numerator = (
        of_outputs * (allocation / feature_maps.nonzero(flows.incoming))[..., None]
    )
    weighted = value * competition[..., None]

    updates = product("bnpjm,bnpjv->bnpmv", key, weighted)
    before, _ = prefix(state.summary, updates)
    of_before = product("bnpim,bnpiv->bnpmv", query, of_numerator)
    of_summary, of_updates = prefix_pullback(of_before, of_after.summary)
    of_weighted = product("bnpij,bnpiv->bnpjv", flows.earlier, of_numerator)
    of_weighted += product("bnpjm,bnpmv->bnpjv", key, of_updates)
    of_source, of_largest, of_total = pull_competition(
        ((of_weighted * value).sum(-1), of_after.largest, of_after.total)
    )
    # The gradient of the logarithm of a / I.
    of_scale = (of_outputs * outputs).sum(-1)
    conserved = of_scale * (1 - allocation) / sources, of_source / sinks
    far, slopes, of_state = _flows(
        options, tables.units, flows, (query, key), conserved, of_scale, of_after
    )
    of_scores = _scores(
        product("bnpiv,bnpjv->bnpij", of_numerator, weighted), flows, slopes
    )
    of_query = product("bnpij,bnpjm->bnpim", of_scores, key) + far[0]
    of_query += product("bnpiv,bnpmv->bnpim", of_numerator, before)
    of_key = product("bnpij,bnpim->bnpjm", of_scores, query) + far[1]
    of_key += product("bnpjv,bnpmv->bnpjm", weighted, of_updates)
    of_state = of_state._replace(largest=of_largest, total=of_total, summary=of_summary)
    of_value = of_weighted * competition[..., None]
    return of_state, causal.in_units((of_query, of_key, of_value), tables)


def _flows(
    options: Options,
    unit: jax.Array | float,
    flows: Flows,
    features: _Pair,
    conserved: _Pair,
    of_scale: jax.Array,
    of_after: FlowSums,
) -> tuple[_Pair, _Slopes, FlowSums]:
    """The gradients that the flows pass on to features, scores and state.

    Args:
      options: eps and precision.
      unit: the unit of the features.
      flows: of the segment.
      features: phi(q) and phi(k).
      conserved: x and y, the gradients of I' and O' before their division by n.
      of_scale: gradient of the logarithm of a / I.
      of_after: gradient of the state after.

    Returns:
      Gradients of phi(q) and phi(k), except those through the scores and the summary;
      of the flows; and of the flows' sums in the state before.
    """
    eps = options.eps / unit
    sink, source = conserved
    (of_key_flow, of_query_flow), updates = _sums(
        options, unit, conserved, features, (of_after.key_flow, of_after.query_flow)
    )
    summed = [from_here(slope) for slope in conserved]
    of_keys = jnp.einsum(
        "bnpij,bnpi->bnpj", flows.earlier, sink, precision=options.precision
    )
    of_keys += _passed(options, unit, features[1], updates[0], summed[0])
    of_queries = jnp.einsum(
        "bnpij,bnpj->bnpi", flows.later, source, precision=options.precision
    )
    of_queries += _passed(options, unit, features[0], updates[1], summed[1])
    incoming = _over(-of_scale - of_queries * flows.of_queries, flows.incoming)
    outgoing = _over(-of_keys * flows.of_keys, flows.outgoing)
    (of_key_sum, of_query_sum), plain = _sums(
        options, unit, (incoming, outgoing), features, (of_after.keys, of_after.queries)
    )
    sides = (
        flows.of_queries * summed[1] + from_here(outgoing) + sink * unit**2 + incoming,
        flows.of_keys * summed[0] + from_here(incoming) + source * unit**2 + outgoing,
    )
    far = (
        _outer(sink, flows.key_flow)
        + _outer(incoming, flows.keys)
        + _outer(flows.of_queries, updates[1])
        + (plain[1][..., None, :] + (eps * sides[0])[..., None]),
        _outer(source, flows.query_flow)
        + _outer(outgoing, flows.queries)
        + _outer(flows.of_keys, updates[0])
        + (plain[0][..., None, :] + (eps * sides[1])[..., None]),
    )
    of_state = of_after._replace(
        keys=of_key_sum,
        queries=of_query_sum,
        key_flow=of_key_flow,
        query_flow=of_query_flow,
    )
    return far, _Slopes(incoming, outgoing, sink, source), of_state


def _sums(
    options: Options,
    unit: jax.Array | float,
    slopes: _Pair,
    features: _Pair,
    of_after: _Pair,
) -> tuple[_Pair, _Pair]:
    """Gradients of two sums before the segment, and of each chunk's addition to them.

    ``slopes`` are those of ``(features + eps) . (sum + eps)``.
    """
    of_before = tuple(
        jnp.einsum("bnpim,bnpi->bnpm", x, slope, precision=options.precision)
        + options.eps / unit * slope.sum(-1)[..., None]
        for x, slope in zip(features, slopes, strict=True)
    )
    return prefix_pullback(of_before, of_after)


def _passed(
    options: Options,
    unit: jax.Array | float,
    features: jax.Array,
    update: jax.Array,
    summed: jax.Array,
) -> jax.Array:
    """Gradient of the weights in a sum of features, from all other chunks."""
    near = options.eps / unit * features.sum(-1) * summed
    far = jnp.einsum("bnpjm,bnpm->bnpj", features, update, precision=options.precision)
    return far + near


def _scores(of_products: jax.Array, flows: Flows, slopes: _Slopes) -> jax.Array:
    """The gradient of ``phi(q_i) . phi(k_j)``, `[B, N, P, C, C]`.

    ``of_products`` is the gradient of the products that form the numerators.
    """
    earlier = of_products + _outer(slopes.sink, flows.of_keys)
    earlier += slopes.incoming[..., :, None]
    later = _outer(flows.of_queries, slopes.source) + slopes.outgoing[..., None, :]
    visible = triangle(of_products.shape[-1])
    return hidden(earlier, visible) + hidden(later, np.swapaxes(visible, -1, -2))


def _outer(one: jax.Array, two: jax.Array) -> jax.Array:
    return one[..., :, None] * two[..., None, :]


def _over(x: jax.Array, flow: jax.Array) -> jax.Array:
    """``x / flow``; 0 where no features flow."""
    return jnp.where(flow == 0, 0, x / feature_maps.nonzero(flow))
