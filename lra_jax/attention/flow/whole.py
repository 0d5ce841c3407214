"""Flow-Attention that is not causal, of a whole sequence or one device's slice of it.

The equation and the options: `lra_jax.attention.flow.flow`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import engine
from lra_jax.attention.causal.prefix import decayed
from lra_jax.attention.flow import causal
from lra_jax.attention.flow.causal import FlowTerms, Options

Masks = tuple[jax.Array | None, jax.Array | None]


def attend(
    options: Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    masks: Masks,
    *,
    axis: str | None = None,
    target: kernels.Target | None = None,
    chunking: engine.Chunking | None = None,
) -> jax.Array:
    """The form that is not causal, `[B, T, N, Hv]`.

    Args:
      options: those of `flow_attention`.
      query: `[B, T, N, H]`, as are key and value.
      key: see `query`.
      value: see `query`.
      masks: of the sources and of the sinks.
      axis: the mesh axis that holds the other parts of the sequence, if there are any.
      target: the kernels that make the product of features, if not XLA.
      chunking: of the kernels.
    """
    phi, dtype = options.feature_map, options.dtype
    features = feature_maps.features(query, key, phi, dtype, *masks)
    terms = terms_of(options, *features, masks, axis)
    weighted = inputs.by_head(value, query.shape[2], masks[0], dtype)
    weighted = weighted * terms.competition[..., None]
    if target is not None:
        weighted = jnp.swapaxes(weighted, 1, 2).astype(value.dtype)
        out = kernels.attend(
            target,
            inputs.hide(query, masks[1]),
            key,
            weighted,
            masks[0],
            False,
            feature_map=feature_maps.for_kernels(phi),
            denominator="none",
            eps=0.0,
            max_length=None,
            chunking=chunking,
            precision=options.precision,
        )
        out = inputs.by_head(out, query.shape[2], masks[1], dtype)
    else:
        product = functools.partial(jnp.einsum, precision=options.precision)
        summary = product("bnsm,bnsv->bnmv", features[1], weighted)
        out = product("bntm,bnmv->bntv", features[0], _total(summary, axis))
    # Scaling the output instead of phi(q) is the same and saves a pass over it.
    out = out * (terms.allocation / causal.divisor(terms.incoming))[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def terms_of(
    options: Options,
    query_features: jax.Array,
    key_features: jax.Array,
    masks: Masks,
    axis: str | None = None,
) -> FlowTerms:
    """The terms of the form that is not causal, with the heads first, `[B, N, T]`."""
    product = functools.partial(jnp.einsum, precision=options.precision)

    def inner(features: jax.Array, total: jax.Array) -> jax.Array:
        total = total + options.eps
        # (features + eps) . total, without a pass that adds eps to the features.
        constant = options.eps * total.sum(-1)[..., None] + options.extra_eps
        return feature_maps.project(features, total, options.precision) + constant

    keys, queries = _total((key_features.sum(2), query_features.sum(2)), axis)
    incoming, outgoing = inner(query_features, keys), inner(key_features, queries)
    key_flow, query_flow = _total(
        (
            product("bnsm,bns->bnm", key_features, 1 / outgoing),
            product("bntm,bnt->bnm", query_features, 1 / incoming),
        ),
        axis,
    )
    conserved_sink = inner(query_features, key_flow)
    conserved_source = inner(key_features, query_flow)
    sources = _count(masks[0], key_features, axis)
    sinks = _count(masks[1], query_features, axis)
    return FlowTerms(
        incoming=incoming,
        outgoing=outgoing,
        conserved_sink=conserved_sink,
        conserved_source=conserved_source,
        competition=_compete(options, conserved_source, masks[0], sources, axis),
        allocation=causal.allocated(options, conserved_sink * (sinks / sources)),
    )


def _compete(
    options: Options,
    conserved_source: jax.Array,
    mask: jax.Array | None,
    sources: jax.Array,
    axis: str | None,
) -> jax.Array:
    """c `[B, N, S]`; zero where hidden, but for a competition of the heads."""
    visible = np.ones((1, 1, 1), bool) if mask is None else mask[:, None, :]
    if not options.competition:
        return causal.no_competition(conserved_source, visible)
    logits = causal.clipped(options, conserved_source)
    if options.competition_axis == "heads":
        return jax.nn.softmax(logits, axis=1) * sources
    if not options.sums_as_is:
        # Flows are not negative: 0 is no larger than any.
        seen = jnp.where(visible, jax.lax.stop_gradient(logits), jnp.zeros_like(logits))
        largest = seen.max(2)
        largest = largest if axis is None else jax.lax.pmax(largest, axis)
        logits = logits - largest[..., None]
    weights = decayed(logits, visible)
    total = causal.divisor(_total(weights.sum(2), axis))
    return weights / total[..., None] * sources


def _count(mask: jax.Array | None, features: jax.Array, axis: str | None) -> jax.Array:
    """`[B or 1, 1, 1]` real positions, at least 1 so that it can be divided by."""
    if mask is None:
        slices = 1 if axis is None else jax.lax.axis_size(axis)
        return jnp.full((1, 1, 1), features.shape[2] * slices, features.dtype)
    counts = jnp.maximum(_total(mask.sum(1), axis), 1)
    return counts.astype(features.dtype)[:, None, None]


def _total(sums: Any, axis: str | None) -> Any:
    """A tree of sums over this device's positions -> over all."""
    return sums if axis is None else jax.lax.psum(sums, axis)


def flow_slice(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    *,
    axis: str,
    is_causal: bool,
    clip: float | None = 30.0,
    feature_map: feature_maps.FeatureMap = "sigmoid",
    competition_axis: str = "source",
    competition: bool = True,
    allocation: bool = True,
    eps: float = 1e-6,
    extra_eps: float = 0.0,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """One device's part of `flow_attention`, see `lra_jax.attention.sharded`.

    The flows are sums over sums, so the devices exchange four times, each time a few
    sums over their positions, of a size that does not depend on the length.

    Raises:
      ValueError: ``is_causal``, or an option does not fit. Sums over sums over the past
        would take as many exchanges, each of which waits for a pass over the device's
        own positions.
    """
    inputs.refuse_causal(
        is_causal, "Flow-Attention over several devices has no causal form"
    )
    options = Options(
        feature_map,
        inputs.accumulation_dtype(query, key, value),
        precision,
        clip=clip,
        competition_axis=competition_axis,
        competition=competition,
        allocation=allocation,
        eps=eps,
        extra_eps=extra_eps,
    )
    causal.check(options, False)
    return attend(options, query, key, value, (mask, query_mask), axis=axis)
