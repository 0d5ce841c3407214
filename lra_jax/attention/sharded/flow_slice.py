"""Flow-Attention over a sequence that is split over devices.

Its flows are sums over sums, so the devices exchange three times, each time a few sums
over their positions with ``psum``, of a size that does not depend on the length:
phi(q) and phi(k); those by the outgoing and the incoming flows; the summary and the
denominator of the competition. The formulas stand in `lra_jax.attention.flow.flow`.

There is no causal form: its sums over sums over the past would take as many exchanges,
each of which waits for a pass over the device's own positions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.flow import parts as flow_parts

__all__ = ["flow_slice"]


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
    """One device's part of `flow.flow_attention`, under ``shard_map``.

    Args:
      query, key, value: `[B, T / P, N, H]`, this device's slice.
      mask: boolean `[B, T / P]`, True = a real source; None = all.
      query_mask: likewise for sinks.
      axis: the mesh axis that the positions are split over.
      is_causal: must be False.
      Other options are those of `flow_attention`.

    Returns:
      `[B, T / P, N, Hv]` in the query's dtype.

    Raises:
      ValueError: ``is_causal``, or an option of Flow-Attention does not fit.
    """
    if is_causal:
        raise ValueError("is_causal: sequence-parallel flow has no causal form")
    options = flow_parts.Options(
        clip=clip,
        competition_axis=competition_axis,
        competition=competition,
        allocation=allocation,
        eps=eps,
        extra_eps=extra_eps,
        precision=precision,
    )
    dtype = inputs.accumulation_dtype(query, key, value)
    sinks, sources = feature_maps.features(
        query, key, feature_map, dtype, mask, query_mask
    )
    value = inputs.by_head(value, query.shape[2], mask, dtype)
    product = functools.partial(jnp.einsum, precision=precision)

    def inner(features: jax.Array, total: jax.Array) -> jax.Array:
        total = total + eps
        constant = eps * total.sum(-1)[..., None] + extra_eps
        return feature_maps.project(features, total, precision) + constant

    counts = (_count(query_mask, sinks, axis), _count(mask, sources, axis))
    of_sources, of_sinks = jax.lax.psum((sources.sum(2), sinks.sum(2)), axis)
    incoming, outgoing = inner(sinks, of_sources), inner(sources, of_sinks)
    of_sources, of_sinks = jax.lax.psum(
        (
            product("bntm,bnt->bnm", sources, 1 / outgoing),
            product("bntm,bnt->bnm", sinks, 1 / incoming),
        ),
        axis,
    )
    conserved = inner(sinks, of_sources) * (counts[0] / counts[1])
    logits = flow_parts.clipped(inner(sources, of_sinks), clip)
    shares, total = _competition(logits, mask, options, axis)
    summary = product("bntm,bntv->bnmv", sources, value * shares[..., None])
    summary, total = jax.lax.psum((summary, total), axis)
    if competition:
        summary = summary * counts[1][..., None]
        if competition_axis == "source":
            # Nothing visible: no share, and nothing in the summary either.
            summary = summary / feature_maps.at_least(total, 1e-30)[..., None, None]
    out = product("bntm,bnmv->bntv", sinks, summary)
    out = out * (flow_parts.allocated(conserved, options) / incoming)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def _competition(
    logits: jax.Array, mask: jax.Array | None, options: flow_parts.Options, axis: str
) -> tuple[jax.Array, jax.Array]:
    """A device's shares of the softmax over all sources, before its denominator.

    Returns:
      `[B, N, T]` and their sum `[B, N]`. Over the heads they are shares already.
    """
    if not options.competition:
        shares = flow_parts.without_competition(
            logits, None if mask is None else mask[:, None]
        )
        return shares, shares.sum(2)
    if options.competition_axis == "heads":
        shares = jax.nn.softmax(logits, axis=1)
        return shares, shares.sum(2)
    if mask is not None:
        lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
        logits = jnp.where(mask[:, None], logits, lowest)
    top = jax.lax.pmax(jax.lax.stop_gradient(logits.max(2)), axis)
    shares = inputs.hide_by_head(jnp.exp(logits - top[..., None])[..., None], mask)
    return shares[..., 0], shares.sum((2, 3))


def _count(mask: jax.Array | None, features: jax.Array, axis: str) -> jax.Array:
    """`[B or 1, 1, 1]` real positions on all devices, at least 1."""
    if mask is None:
        count = features.shape[2] * jax.lax.axis_size(axis)
        return jnp.full((1, 1, 1), count, features.dtype)
    counts = jax.lax.psum(mask.sum(1), axis)
    return jnp.maximum(counts, 1).astype(features.dtype)[:, None, None]
