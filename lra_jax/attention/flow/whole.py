"""Non-causal Flow-Attention over a whole sequence or one device's slice of it.

For the equation and the options see `lra_jax.attention.flow.flow`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import feature_maps, inputs, masking, packed
from lra_jax.attention.causal import engine
from lra_jax.attention.causal.prefix import decayed
from lra_jax.attention.flow import causal
from lra_jax.attention.flow.causal import FlowTerms, Options, along
from lra_jax.attention.linear.linear import document_sums
from lra_jax.attention.sharded.documents import sliced

Masks = tuple[jax.Array | None, jax.Array | None]


def attend(
    options: Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: Masks,
    *,
    axis: str | None = None,
    rows: packed.Packed | None = None,
    target: kernels.Target | None = None,
    chunking: engine.Chunking | None = None,
) -> jax.Array:
    """The non-causal form, `[B, T, N, Hv]`.

    Args:
      options: those of `flow_attention`.
      query: `[B, T, N, H]`, as are key and value.
      key: see `query`.
      value: see `query`.
      masks: of the sources and the sinks.
      axis: the mesh axis that holds the other parts of the sequence, if there are any.
      rows: where packed documents are; None = one per row.
      target: the kernels that compute the product of features; None = XLA.
      chunking: of the kernels, and of the sums over documents.
    """
    dtype = options.dtype
    features, unit = features_of(options, query, key, masks, axis)
    terms = terms_of(options, *features, unit, masks, axis, rows)
    weighted = masking.by_head(value, query.shape[2], masks[0], dtype)
    weighted = weighted * terms.competition[..., None]
    if rows is not None:
        out, _denominators = document_sums(
            options._replace(feature_map="identity"),
            *(jnp.swapaxes(x, 1, 2) for x in (*features, weighted)),
            rows=rows,
            mask=masks[0],
            chunking=chunking,
        )
        out = jnp.swapaxes(out, 1, 2)
    elif target is not None:
        weighted = jnp.swapaxes(weighted, 1, 2).astype(value.dtype)
        out = kernels.attend(
            target,
            masking.hide(query, masks[1]),
            key,
            weighted,
            masks[0],
            False,
            feature_map=feature_maps.for_kernels(options.feature_map),
            denominator="none",
            eps=0.0,
            max_length=None,
            chunking=chunking,
            precision=options.precision,
        )
        out = masking.by_head(out, query.shape[2], masks[1], dtype)
        # The kernels compute features without the unit.
        out = out / along(unit, out) ** 2
    else:
        product = functools.partial(jnp.einsum, precision=options.precision)
        summary = product("bnsm,bnsv->bnmv", features[1], weighted)
        out = product("bntm,bnmv->bntv", features[0], _total(summary, axis))
    # Scaling the output instead of phi(q) gives the same result and saves a pass.
    out = out * feature_maps.over(terms.allocation, terms.incoming)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def features_of(
    options: Options,
    query: jax.Array,
    key: jax.Array,
    masks: Masks,
    axis: str | None = None,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array | float]:
    """phi(q) and phi(k) `[B, N, T, M]` in their unit, and the unit `[B]`."""
    phi, dtype = options.feature_map, options.dtype
    made = feature_maps.features(query, key, phi, dtype, *masks)
    unit = 1.0 if options.bounded else causal.unit_of(made, axis)
    one, two = (x / along(unit, x) for x in made)
    return (one, two), unit


def terms_of(
    options: Options,
    query_features: jax.Array,
    key_features: jax.Array,
    unit: jax.Array | float,
    masks: Masks,
    axis: str | None = None,
    rows: packed.Packed | None = None,
) -> FlowTerms:
    """The terms of the non-causal form, with the heads first, `[B, N, T]`.

    I and O are in the square of the features' unit.
    """
    product = functools.partial(jnp.einsum, precision=options.precision)

    def summed(*pairs: tuple[jax.Array, jax.Array | None]) -> Any:
        """Features times weights, `[B, N, M]`, or `[B, N, T, M]` for documents."""
        if rows is not None:
            weighted = (x if w is None else x * w[..., None] for x, w in pairs)
            return tuple(rows.over(jax.ops.segment_sum, x, 2) for x in weighted)
        sums = (
            x.sum(2) if w is None else product("bnsm,bns->bnm", x, w) for x, w in pairs
        )
        return _total(tuple(sums), axis)

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

    keys, queries = summed((key_features, None), (query_features, None))
    incoming = inner(query_features, keys, unit)
    outgoing = inner(key_features, queries, unit)
    one = jnp.ones((), incoming.dtype)
    key_flow, query_flow = summed(
        (key_features, feature_maps.over(one, outgoing)),
        (query_features, feature_maps.over(one, incoming)),
    )
    conserved_sink = inner(query_features, key_flow, 1 / unit)
    conserved_source = inner(key_features, query_flow, 1 / unit)
    sources = _count(masks[0], key_features, axis, rows)
    sinks = _count(masks[1], query_features, axis, rows)
    return FlowTerms(
        incoming=incoming,
        outgoing=outgoing,
        conserved_sink=conserved_sink,
        conserved_source=conserved_source,
        competition=_compete(options, conserved_source, masks[0], sources, axis, rows),
        allocation=causal.allocated(options, conserved_sink * (sinks / sources)),
    )


def _compete(
    options: Options,
    conserved_source: jax.Array,
    mask: jax.Array | None,
    sources: jax.Array,
    axis: str | None,
    rows: packed.Packed | None,
) -> jax.Array:
    """c `[B, N, S]`; zero where hidden, except in a competition over the heads."""
    visible = np.ones((1, 1, 1), bool) if mask is None else mask[:, None, :]
    if not options.competition:
        return causal.no_competition(conserved_source, visible)
    logits = causal.clipped(options, conserved_source)
    if options.competition_axis == "heads":
        return feature_maps.softmax(logits, 1) * sources
    if not options.sums_as_is:
        # Flows are not negative: 0 is no larger than any.
        seen = jnp.where(visible, jax.lax.stop_gradient(logits), jnp.zeros_like(logits))
        if rows is not None:
            largest = rows.over(jax.ops.segment_max, seen, 2)
        else:
            largest = seen.max(2)
            largest = largest if axis is None else jax.lax.pmax(largest, axis)
            largest = largest[..., None]
        logits = feature_maps.below(logits, largest)
    weights = decayed(logits, visible)
    if rows is not None:
        total = rows.over(jax.ops.segment_sum, weights, 2)
    else:
        total = _total(weights.sum(2), axis)[..., None]
    return feature_maps.over(weights, total) * sources


def _count(
    mask: jax.Array | None,
    features: jax.Array,
    axis: str | None,
    rows: packed.Packed | None,
) -> jax.Array:
    """The number of real positions, `[B or 1, 1, 1 or T]`, at least 1 as a divisor."""
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


def flow_slice(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    *,
    axis: str,
    is_causal: bool,
    **options: Any,
) -> jax.Array:
    """One device's part of `flow_attention`, see `lra_jax.attention.sharded`.

    The flows are sums over sums, so the devices exchange sums over their positions four
    times. The size of these does not depend on the length.

    Raises:
      ValueError: ``is_causal``, or an option does not fit. A causal form would need as
        many exchanges, each waiting for a pass over the device's own positions.
    """
    inputs.refuse_causal(
        is_causal, "Flow-Attention over several devices has no causal form"
    )
    begun = Options.of(**options)._replace(
        dtype=inputs.accumulation_dtype(query, key, value)
    )
    causal.check(begun, False)
    rows = sliced(segment_ids, axis)
    masks = packed.shown(mask, rows), packed.shown(query_mask, rows)
    return attend(begun, query, key, value, masks, axis=axis, rows=rows)
