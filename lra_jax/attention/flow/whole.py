"""Non-causal Flow-Attention over a whole sequence or one device's slice of it.

For the equation and the options see `lra_jax.attention.flow.flow`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import feature_maps, masking
from lra_jax.attention.call import Call
from lra_jax.attention.causal.prefix import exp_visible
from lra_jax.attention.flow import causal
from lra_jax.attention.flow.causal import FlowTerms, Options, along
from lra_jax.attention.linear import core


def attend(call: Call, options: Options, target: kernels.Target | None) -> jax.Array:
    """The non-causal form, `[B, T, N, Hv]`; kernels, if any, compute its product."""
    features, unit = features_of(call, options)
    terms = terms_of(call, options, *features, unit)
    value = masking.by_head(call.value, call.query.shape[2], call.mask, call.dtype)
    value = jnp.swapaxes(value * terms.competition[..., None], 1, 2)
    if target is not None:
        # Kernels compute the features themselves, without the unit.
        product = call.replace(
            value=value.astype(call.value.dtype),
            query=masking.hide(call.query, call.query_mask),
        )
        kernel = core.Kernel(feature_map=options.feature_map)
        out = core.by_kernel(product, kernel, target)
        out = masking.hide(out, call.query_mask).astype(call.dtype)
        out = out / along(unit, out) ** 2
    else:
        query, key = (jnp.swapaxes(x, 1, 2) for x in features)
        # Hidden positions are zero already.
        product = call.replace(
            query=query,
            key=key,
            value=value,
            mask=None,
            query_mask=None,
            implementation="xla",
        )
        out, _ = core.attend(product, core.Kernel(), "flow")
    # Scaling the output instead of phi(q) gives the same result and saves a pass.
    factor = feature_maps.over(terms.allocation, terms.incoming)
    return out * jnp.swapaxes(factor, 1, 2)[..., None]


def features_of(
    call: Call, options: Options
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | float]:
    """phi(q) and phi(k) `[B, N, T, M]` in their unit, and the unit `[B]`."""
    features = feature_maps.features(
        call.query,
        call.key,
        options.feature_map,
        call.dtype,
        call.mask,
        call.query_mask,
    )
    unit = 1.0 if options.is_bounded else causal.unit_of(features, call.axis)
    one, two = (x / along(unit, x) for x in features)
    return (one, two), unit


def terms_of(
    call: Call,
    options: Options,
    query_features: jax.Array,
    key_features: jax.Array,
    unit: jax.Array | float,
) -> FlowTerms:
    """The terms of the non-causal form, with the heads first, `[B, N, T]`.

    I and O are in the square of the features' unit.
    """
    product = functools.partial(jnp.einsum, precision=options.precision)
    rows = call.rows

    def sum_features(*pairs: tuple[jax.Array, jax.Array | None]) -> Any:
        """Features times weights, `[B, N, M]`, or `[B, N, T, M]` for documents."""
        if rows is not None:
            weighted = (x if w is None else x * w[..., None] for x, w in pairs)
            return tuple(rows.over(jax.ops.segment_sum, x, 2) for x in weighted)
        sums = (
            x.sum(2) if w is None else product("bnsm,bns->bnm", x, w) for x, w in pairs
        )
        return _total(tuple(sums), call.axis)

    def inner(features: jax.Array, total: jax.Array, of_sum: Any) -> jax.Array:
        total = total + options.eps / along(of_sum, total)
        # (features + eps) . total, without a pass that adds eps to the features.
        constant = total.sum(-1)
        constant = options.eps / along(unit, constant) * constant
        extra_eps = options.extra_eps / along(unit * of_sum, constant)
        if rows is not None:
            constant = constant + extra_eps
            return product("bntm,bntm->bnt", features, total) + constant
        constant = (constant + extra_eps)[..., None]
        return feature_maps.project(features, total, options.precision) + constant

    keys, queries = sum_features((key_features, None), (query_features, None))
    incoming = inner(query_features, keys, unit)
    outgoing = inner(key_features, queries, unit)
    one = jnp.ones((), incoming.dtype)
    key_flow, query_flow = sum_features(
        (key_features, feature_maps.over(one, outgoing)),
        (query_features, feature_maps.over(one, incoming)),
    )
    conserved_sink = inner(query_features, key_flow, 1 / unit)
    conserved_source = inner(key_features, query_flow, 1 / unit)
    sources = _count(call, call.mask, key_features)
    sinks = _count(call, call.query_mask, query_features)
    return FlowTerms(
        incoming=incoming,
        outgoing=outgoing,
        conserved_sink=conserved_sink,
        conserved_source=conserved_source,
        competition=_compete(call, options, conserved_source, sources),
        allocation=causal.allocation(options, conserved_sink * (sinks / sources)),
    )


def _compete(
    call: Call, options: Options, conserved_source: jax.Array, sources: jax.Array
) -> jax.Array:
    """c `[B, N, S]`; zero where hidden, except in a competition over the heads."""
    mask, rows, axis = call.mask, call.rows, call.axis
    visible = np.ones((1, 1, 1), bool) if mask is None else mask[:, None, :]
    if not options.competition:
        return causal.no_competition(conserved_source, visible)
    logits = causal.clip_outgoing(options, conserved_source)
    if options.competition_axis == "heads":
        return feature_maps.softmax(logits, 1) * sources
    if not options.sums_as_is:
        # Flows are not negative, so 0 never exceeds the largest.
        seen = jnp.where(visible, jax.lax.stop_gradient(logits), jnp.zeros_like(logits))
        if rows is not None:
            largest = rows.over(jax.ops.segment_max, seen, 2)
        else:
            largest = seen.max(2)
            largest = largest if axis is None else jax.lax.pmax(largest, axis)
            largest = largest[..., None]
        logits = feature_maps.below(logits, largest)
    weights = exp_visible(logits, visible)
    if rows is not None:
        total = rows.over(jax.ops.segment_sum, weights, 2)
    else:
        total = _total(weights.sum(2), axis)[..., None]
    return feature_maps.over(weights, total) * sources


def _count(call: Call, mask: jax.Array | None, features: jax.Array) -> jax.Array:
    """The number of real positions, `[B or 1, 1, 1 or T]`, at least 1 as a divisor."""
    rows, axis = call.rows, call.axis
    if rows is not None:
        real = (rows.real if mask is None else mask).astype(features.dtype)
        return jnp.maximum(rows.over(jax.ops.segment_sum, real, 1), 1)[:, None]
    if mask is None:
        slices = 1 if axis is None else jax.lax.axis_size(axis)
        return jnp.full((1, 1, 1), features.shape[2] * slices, features.dtype)
    counts = jnp.maximum(_total(mask.sum(1), axis), 1)
    return counts.astype(features.dtype)[:, None, None]


def _total(sums: Any, axis: str | None) -> Any:
    """Turns sums over this device's positions into sums over all positions."""
    return sums if axis is None else jax.lax.psum(sums, axis)
