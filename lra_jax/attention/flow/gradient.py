"""The gradient of causal Flow-Attention's super-block, written out.

With ``S = phi(q) phi(k)^T`` of a chunk, E its lower triangle and L its upper one, the
forward pass is

- ``I = E 1``, ``O = L^T 1``, ``I' = E (n / O) / n``, ``O' = L^T (n / I) / n``;
- ``c = n exp(O') / Z``, Z the sums of exp(O') so far, and
  ``out = (a / I) (E (c v))`` with ``a = sigmoid(I')``,

each with what lies before the chunk and eps added. So the gradient reaches S as G, one
matrix product, and four outer products of vectors,

``dS = tril(G + x (n / O)^T + dI 1^T) + triu((n / I) y^T + 1 dO^T)``,

with ``G = dnum (c v)^T`` and x, y the gradients of ``E (n / O)`` and ``L^T (n / I)``.
These are the products of plain linear attention, and little more. Derived step by step
it takes many passes over `[C, C]` matrices (docs/performance.md).

No formula is new here: it is the chain rule for `lra_jax.attention.flow.block`, which
the tests hold it to.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention.causal import chunks
from lra_jax.attention.flow.parts import allocated, divisor, from_here

if TYPE_CHECKING:
    from lra_jax.attention.flow.block import FlowBlock, Flows, FlowSums, Tables


_Pair = tuple[jax.Array, jax.Array]


class _Slopes(NamedTuple):
    """Gradients of the flows before their division by n, `[B, N, P, C]`."""

    incoming: jax.Array  # dI
    outgoing: jax.Array  # dO
    sink: jax.Array  # x, of E (n / O)
    source: jax.Array  # y, of L^T (n / I)


def pull(
    block: "FlowBlock",
    start: "FlowSums",
    arrays: tuple[jax.Array, ...],
    tables: "Tables",
    outputs: jax.Array,
    cotangents: Any,
) -> tuple["FlowSums", tuple[jax.Array, ...]]:
    """The gradients of state and arrays, see `chunks.Block.scaled_pullback`."""
    plan, product = block.plan, block.product
    query, key, value = plan.split(arrays)
    sinks, sources, visible = plan.split(tables)
    sinks, sources = jnp.maximum(sinks, 1), jnp.maximum(sources, 1)
    flows, _ = block.flows(start, query, key, sinks, sources)
    competition, pull_competition = jax.vjp(
        lambda *given: block.compete(given[0], visible, sources, *given[1:]),
        flows.conserved_source,
        start.largest,
        start.total,
    )
    allocation = allocated(flows.conserved_sink, block.options)
    out, of_out = plan.split((outputs, cotangents[0]))
    after = cotangents[1]
    of_numerator = of_out * (allocation / divisor(flows.incoming))[..., None]
    weighted = value * competition[0][..., None]

    updates = product("bnpjm,bnpjv->bnpmv", key, weighted)
    before, _ = chunks.prefix(plan, start.summary, updates)
    of_before = product("bnpim,bnpiv->bnpmv", query, of_numerator)
    of_summary, of_updates = chunks.prefix_pullback(plan, of_before, after.summary)
    of_weighted = product("bnpij,bnpiv->bnpjv", flows.earlier, of_numerator)
    of_weighted += product("bnpjm,bnpmv->bnpjv", key, of_updates)
    of_source, of_largest, of_total = pull_competition(
        ((of_weighted * value).sum(-1), after.largest, after.total)
    )
    # The gradient of the logarithm of a / I.
    of_scale = (of_out * out).sum(-1)
    of_allocation = of_scale * (1 - allocation)
    conserved = of_allocation / sources, of_source / sinks
    far, slopes, of_sums = _flows(
        block, flows, (query, key), conserved, of_scale, after
    )
    of_scores = _scores(
        product("bnpiv,bnpjv->bnpij", of_numerator, weighted), flows, slopes
    )
    of_query = product("bnpij,bnpjm->bnpim", of_scores, key) + far[0]
    of_query += product("bnpiv,bnpmv->bnpim", of_numerator, before)
    of_key = product("bnpij,bnpim->bnpjm", of_scores, query) + far[1]
    of_key += product("bnpjv,bnpmv->bnpjm", weighted, of_updates)
    of_arrays = of_query, of_key, of_weighted * competition[0][..., None]
    ends = {"largest": of_largest, "total": of_total, "summary": of_summary}
    return start._replace(**of_sums, **ends), plan.join(of_arrays)


def _flows(
    block: "FlowBlock",
    flows: "Flows",
    features: _Pair,
    conserved: _Pair,
    of_scale: jax.Array,
    after: "FlowSums",
) -> tuple[_Pair, _Slopes, dict[str, jax.Array]]:
    """What the flows pass on to features, scores and state.

    Args:
      block: the mechanism.
      flows: of the super-block.
      features: phi(q) and phi(k).
      conserved: x and y, the gradients of I' and O' before their division by n.
      of_scale: gradient of the logarithm of a / I.
      after: gradient of the state after.

    Returns:
      Gradients of phi(q) and phi(k) but for those through the scores and the summary;
      those of the flows; those of the state before.
    """
    product, eps = block.product, block.options.eps
    sink, source = conserved
    of_flow, updates = _sums(
        block, conserved, features, (after.key_flow, after.query_flow)
    )
    summed = [from_here(slope) for slope in conserved]
    of_keys = product("bnpij,bnpi->bnpj", flows.earlier, sink)
    of_keys += _passed(block, features[1], updates[0], summed[0])
    of_queries = product("bnpij,bnpj->bnpi", flows.later, source)
    of_queries += _passed(block, features[0], updates[1], summed[1])
    incoming = _over(-of_scale - of_queries * flows.of_queries, flows.incoming)
    outgoing = _over(-of_keys * flows.of_keys, flows.outgoing)
    of_so_far, plain = _sums(
        block, (incoming, outgoing), features, (after.keys, after.queries)
    )
    sides = (
        eps * (flows.of_queries * summed[1] + from_here(outgoing) + sink + incoming),
        eps * (flows.of_keys * summed[0] + from_here(incoming) + source + outgoing),
    )
    far = (
        _outer(sink, flows.key_flow)
        + _outer(incoming, flows.keys)
        + _outer(flows.of_queries, updates[1])
        + (plain[1][..., None, :] + sides[0][..., None]),
        _outer(source, flows.query_flow)
        + _outer(outgoing, flows.queries)
        + _outer(flows.of_keys, updates[0])
        + (plain[0][..., None, :] + sides[1][..., None]),
    )
    of_state: dict[str, jax.Array] = {
        "key_flow": of_flow[0],
        "query_flow": of_flow[1],
        "keys": of_so_far[0],
        "queries": of_so_far[1],
    }
    return far, _Slopes(incoming, outgoing, sink, source), of_state


def _sums(
    block: "FlowBlock", slopes: _Pair, features: _Pair, after: _Pair
) -> tuple[_Pair, _Pair]:
    """Gradients of two sums before the block, and of what each chunk adds to them.

    ``slopes`` are those of ``(features + eps) . (sum + eps)``.
    """
    of_before = tuple(
        block.product("bnpim,bnpi->bnpm", x, slope)
        + block.options.eps * slope.sum(-1)[..., None]
        for x, slope in zip(features, slopes, strict=True)
    )
    return chunks.prefix_pullback(block.plan, of_before, after)


def _passed(
    block: "FlowBlock", features: jax.Array, update: jax.Array, summed: jax.Array
) -> jax.Array:
    """Gradient of the weights of a sum of features, from all but the own chunk."""
    near = block.options.eps * features.sum(-1) * summed
    return block.product("bnpjm,bnpm->bnpj", features, update) + near


def _scores(of_products: jax.Array, flows: "Flows", slopes: _Slopes) -> jax.Array:
    """The gradient of ``phi(q_i) . phi(k_j)``, `[B, N, P, C, C]`.

    ``of_products`` is that of the products that the numerators are made of.
    """
    earlier = of_products + _outer(slopes.sink, flows.of_keys)
    earlier += slopes.incoming[..., :, None]
    later = _outer(flows.of_queries, slopes.source) + slopes.outgoing[..., None, :]
    visible = chunks.triangle(of_products.shape[-1])
    nothing = jnp.zeros((), earlier.dtype)
    return jnp.where(visible, earlier, nothing) + jnp.where(
        np.swapaxes(visible, -1, -2), later, nothing
    )


def _outer(one: jax.Array, two: jax.Array) -> jax.Array:
    return one[..., :, None] * two[..., None, :]


def _over(x: jax.Array, flow: jax.Array) -> jax.Array:
    """``x / flow``; 0 where no features flow."""
    return jnp.where(flow == 0, jnp.zeros((), x.dtype), x / divisor(flow))
