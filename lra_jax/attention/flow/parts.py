"""What Flow-Attention sums: features, flows, competition and allocation.

The formulas and where they come from stand in `lra_jax.attention.flow.flow`.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps
from lra_jax.attention.causal import chunks
from lra_jax.errors import expected, known

# Up to this clip the competition sums exponentials as they are: float32 has room for
# the square of a million of them (a derivative divides by it), and for their inverses.
SMALL_CLIP = 30.0


class FlowTerms(NamedTuple):
    """What decides how much flows where; float32 or wider."""

    incoming: jax.Array  # I, [B, T, N]
    outgoing: jax.Array  # O, [B, S, N]
    conserved_sink: jax.Array  # I', [B, T, N]
    conserved_source: jax.Array  # O' before clipping, [B, S, N]
    competition: jax.Array  # c, [B, S, N]
    allocation: jax.Array  # a, [B, T, N]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of Flow-Attention beside its feature map; see `flow_attention`."""

    clip: float | None = 30.0
    competition_axis: str = "source"
    competition: bool = True
    allocation: bool = True
    eps: float = 1e-6
    extra_eps: float = 0.0
    precision: jax.lax.PrecisionLike = None

    def __post_init__(self) -> None:
        clip = self.clip
        if clip is not None and not (isinstance(clip, int | float) and clip > 0):
            raise expected("clip", "a positive number or None", repr(clip))
        known("competition_axis", self.competition_axis, ("source", "heads"))
        for name in ("competition", "allocation"):
            if not isinstance(value := getattr(self, name), bool):
                raise expected(name, "True or False", repr(value))

    @property
    def sums_as_is(self) -> bool:
        """Whether the competition needs no largest logit, see `SMALL_CLIP`."""
        small = self.clip is not None and self.clip <= SMALL_CLIP
        return small or not self.competition


def given(settings: Mapping[str, Any]) -> Options:
    """Those of some settings that Flow-Attention knows."""
    names = {field.name for field in dataclasses.fields(Options)}
    return Options(**{name: x for name, x in settings.items() if name in names})


def refusal(options: Options, is_causal: bool) -> str | None:
    """Why there are no kernels for the options; None = there are."""
    if options.competition_axis != "source":
        return f"expected competition_axis='source', got {options.competition_axis!r}"
    for name in ("competition", "allocation"):
        if not getattr(options, name):
            return f"expected {name}=True, got False"
    if is_causal and not options.sums_as_is:
        return (
            f"expected a clip of at most {SMALL_CLIP:g} if causal, got {options.clip}"
        )
    return None


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
    visible = None if mask is None else mask[:, None, :]
    if not options.competition:
        competition = without_competition(logits, visible)
    elif options.competition_axis == "heads":
        competition = jax.nn.softmax(logits, axis=1) * sources
    else:
        competition = feature_maps.masked_softmax(logits, visible, axis=2) * sources
    return FlowTerms(
        incoming=incoming,
        outgoing=outgoing,
        conserved_sink=conserved_sink,
        conserved_source=conserved_source,
        competition=competition,
        allocation=allocated(conserved_sink * (sinks / sources), options),
    )


def without_competition(logits: jax.Array, visible: jax.Array | None) -> jax.Array:
    """c = 1 for every source that is there."""
    ones = jnp.ones_like(logits)
    return ones if visible is None else jnp.where(visible, ones, jnp.zeros_like(ones))


def allocated(conserved_sink: jax.Array, options: Options) -> jax.Array:
    """a, of the conserved incoming flow."""
    if not options.allocation:
        return jnp.ones_like(conserved_sink)
    return jax.nn.sigmoid(conserved_sink)


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
    logits: jax.Array, visible: jax.Array, largest: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each source's share among those up to it: `[B, N, P, C]`, and the state after.

    ``largest`` is the largest logit before and ``total`` the sum in its unit, `[B, N]`.

    The maximum is a running one: one over the block would let a large later logit round
    the earlier shares to 0 / 0.
    """
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)
    seen = chunks.triangle(logits.shape[-1]) & visible[..., None, :]
    # No gradient needs to pass through the maximum: the shares do not depend on it.
    columns = jax.lax.stop_gradient(logits)[..., None, :]
    own = jnp.where(seen, columns, lowest).max(-1)
    excess = logits[..., None, :] - own[..., None]
    within = own, chunks.decayed(excess, seen).sum(-1)
    ends = (
        jnp.concatenate([first[..., None], x[..., -1]], 2)
        for first, x in zip((largest, total), within, strict=True)
    )
    largest, total = jax.lax.associative_scan(_merged, tuple(ends), axis=2)
    before = largest[:, :, :-1, None], total[:, :, :-1, None]
    highest, sums = _merged(before, within)
    shares = chunks.decayed(logits - highest, visible) / divisor(sums)
    return shares, largest[..., -1], total[..., -1]


def opened(largest: jax.Array, total: jax.Array) -> jax.Array:
    """A state's sum of exponentials as it is, `[B, N]`."""
    # A small clip leaves no larger one; another call's may have.
    return total * jnp.exp(jnp.minimum(largest, SMALL_CLIP))


def _merged(
    one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    largest = jnp.maximum(one[0], two[0])
    first, second = (total * jnp.exp(own - largest) for own, total in (one, two))
    return largest, first + second
