"""What Flow-Attention sums: features, flows, competition and allocation.

The formulas and where they come from stand in `lra_jax.attention.flow.flow`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps
from lra_jax.attention.causal import chunks


class FlowTerms(NamedTuple):
    """What decides how much flows where; float32 or wider."""

    incoming: jax.Array  # I, [B, T, N]
    outgoing: jax.Array  # O, [B, S, N]
    conserved_sink: jax.Array  # I', [B, T, N]
    conserved_source: jax.Array  # O' before clipping, [B, S, N]
    competition: jax.Array  # c, [B, S, N]
    allocation: jax.Array  # a, [B, T, N]


@dataclass(frozen=True)
class Options:
    """The options of Flow-Attention beside its feature map; see `flow_attention`."""

    clip: float | None
    competition_axis: str
    eps: float
    extra_eps: float
    precision: jax.lax.PrecisionLike

    def __post_init__(self) -> None:
        clip = self.clip
        if clip is not None and not (isinstance(clip, int | float) and clip > 0):
            raise ValueError(f"clip: expected a positive number or None, got {clip!r}")
        if self.competition_axis not in ("source", "heads"):
            raise ValueError(
                "competition_axis: expected 'source' or 'heads', "
                f"got {self.competition_axis!r}"
            )


def terms(
    query_features: jax.Array,
    key_features: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    options: Options,
) -> FlowTerms:
    """The terms with the heads first, `[B, N, T]`."""
    eps, precision = options.eps, options.precision

    def inner(features: jax.Array, others: jax.Array, weights: jax.Array | None = None):
        if weights is None:
            total = others.sum(2) + eps
        else:
            total = jnp.einsum("bntm,bnt->bnm", others, weights, precision=precision)
            total = total + eps
        # (features + eps) . total, without a pass that adds eps to the features.
        constant = eps * total.sum(-1)[..., None] + options.extra_eps
        return feature_maps.project(features, total, precision) + constant

    incoming = inner(query_features, key_features)
    outgoing = inner(key_features, query_features)
    conserved_sink = inner(query_features, key_features, 1 / outgoing)
    conserved_source = inner(key_features, query_features, 1 / incoming)

    sinks = _count(query_mask, query_features)
    sources = _count(mask, key_features)
    logits = clipped(conserved_source, options.clip)
    if options.competition_axis == "heads":
        shares = jax.nn.softmax(logits, axis=1)
    else:
        visible = None if mask is None else mask[:, None, :]
        shares = feature_maps.masked_softmax(logits, visible, axis=2)
    return FlowTerms(
        incoming=incoming,
        outgoing=outgoing,
        conserved_sink=conserved_sink,
        conserved_source=conserved_source,
        competition=shares * sources,
        allocation=jax.nn.sigmoid(conserved_sink * (sinks / sources)),
    )


def clipped(logits: jax.Array, clip: float | None) -> jax.Array:
    """The conserved outgoing flow as it enters the competition."""
    return logits if clip is None else feature_maps.clamp(logits, clip)


def _count(mask: jax.Array | None, features: jax.Array) -> jax.Array:
    """`[B, 1, 1]` real positions, at least 1 so that it can be divided by."""
    if mask is None:
        return jnp.full((1, 1, 1), features.shape[2], features.dtype)
    counts = jnp.maximum(mask.sum(1), 1).astype(features.dtype)
    return counts[:, None, None]


def divisor(x: jax.Array) -> jax.Array:
    """1 in place of 0, which stands only where the features are zero as well."""
    return jnp.where(x == 0, jnp.ones((), x.dtype), x)


def so_far(x: jax.Array) -> jax.Array:
    """Sums along a chunk up to each position, as a product: quicker than a scan."""
    return _summed("bnpj,ij->bnpi", x)


def from_here(x: jax.Array) -> jax.Array:
    """Sums along a chunk from each position on: the transpose of `so_far`."""
    return _summed("bnpj,ji->bnpi", x)


def _summed(terms: str, x: jax.Array) -> jax.Array:
    earlier = jnp.asarray(np.tri(x.shape[-1]), x.dtype)
    return jnp.einsum(terms, x, earlier, precision=jax.lax.Precision.HIGHEST)


def compete(
    logits: jax.Array, visible: jax.Array, start: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each source's share among those up to it: `[B, N, P, C]`, and the state after.

    ``start`` has the largest logit before and the total in its unit, `[B, N]`.

    The maximum is a running one: one over the block would let a large later logit round
    the earlier shares to 0 / 0.
    """
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
    seen = chunks.triangle(logits.shape[-1]) & visible[..., None, :]
    # No gradient needs to pass through the maximum: the shares do not depend on it.
    columns = jax.lax.stop_gradient(logits)[..., None, :]
    largest = jnp.where(seen, columns, lowest).max(-1)
    excess = logits[..., None, :] - largest[..., None]
    within = largest, chunks.decayed(excess, seen).sum(-1)
    ends = (
        jnp.concatenate([first[..., None], x[..., -1]], 2)
        for first, x in zip((start.largest, start.total), within, strict=True)
    )
    largest, total = jax.lax.associative_scan(_merged, tuple(ends), axis=2)
    before = largest[:, :, :-1, None], total[:, :, :-1, None]
    highest, sums = _merged(before, within)
    shares = chunks.decayed(logits - highest, visible) / divisor(sums)
    return shares, largest[..., -1], total[..., -1]


def _merged(
    one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    largest = jnp.maximum(one[0], two[0])
    first, second = (total * jnp.exp(own - largest) for own, total in (one, two))
    return largest, first + second
