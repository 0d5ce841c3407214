"""The causal form of Flow-Attention: its definition, its state and one segment of it.

The authors' causal form (thuml/Flowformer, `Flow_Attention_Causal`) is a separate
definition, not the other form with a mask: every sum runs over the positions up to i,
and a mean over n positions replaces the sum,

- ``I_i = phi(q_i) . sum_{j <= i} phi(k_j)``,
  ``O_j = phi(k_j) . sum_{i <= j} phi(q_i)``;
- ``I'_i = phi(q_i) . sum_{j <= i} phi(k_j) (n_j / O_j) / n_i``, and O'_j the same way;
- competition ``c_j = n_j exp(O'_j) / sum_{r <= j} exp(O'_r)``, allocation
  ``a_i = sigmoid(I'_i)``;
- ``out_i = a_i (phi(q_i) / I_i)^T sum_{j <= i} phi(k_j) c_j v_j^T``.

So later positions never change an earlier output, and the last row differs from that of
the non-causal form. Within a chunk all four flows are row and column sums of one matrix
``phi(q_i) . phi(k_j)``: its lower triangle serves the sinks, its upper one the sources.

Deviations: the authors need the clip to keep exp within range; here, with a clip above
30 or none, the competition carries its largest logit, so any clip is safe. Hidden
positions are left out of every sum, and n counts the real ones. Large features are
scaled to another unit (`unit_of`), so that the flows do not overflow float32.

How a sequence is cut into segments and chunks: `lra_jax.attention.causal.engine`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import feature_maps, inputs, streams
from lra_jax.attention.causal import documents, engine
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import exp_visible, hide_pairs, prefix, so_far
from lra_jax.errors import expected, known

# Up to this clip the competition sums plain exponentials: float32 can hold the square
# of the sum of a million of them, and its inverse.
SMALL_CLIP = 30.0

# Powers of two, see `unit_of`: 1e12, and 1e18, the root of float32's largest number.
_ROOM, _LARGEST = 40, 60


class Options(NamedTuple):
    """`feature_maps.Options`, and those of `flow_attention`."""

    feature_map: Any
    dtype: Any  # of the computation
    precision: jax.lax.PrecisionLike
    clip: float | None
    competition_axis: str
    competition: bool
    allocation: bool
    eps: float
    extra_eps: float

    @property
    def sums_as_is(self) -> bool:
        """Whether the competition sums plain exponentials, see `SMALL_CLIP`."""
        small = self.clip is not None and self.clip <= SMALL_CLIP
        return small or not self.competition

    @property
    def is_bounded(self) -> bool:
        """Whether features are at most 1, so that their unit is 1, see `unit_of`."""
        return self.feature_map == "sigmoid"


def check(options: Options, is_causal: bool) -> None:
    """Raises ``ValueError`` unless Flow-Attention supports the options."""
    if options.clip is not None:
        inputs.check_number("clip", options.clip)
    axis = known("competition_axis", options.competition_axis, ("source", "heads"))
    inputs.check_flag("competition", options.competition)
    inputs.check_eps(options.eps)
    inputs.check_eps(options.extra_eps, "extra_eps")
    inputs.check_flag("allocation", options.allocation)
    if is_causal and axis != "source":
        reason = "whose competition is among the earlier sources"
        needed = f"'source' in the causal form, {reason}"
        raise expected("competition_axis", needed, f"{axis!r}")


class FlowTerms(NamedTuple):
    """The flows, and the gates derived from them; float32 or wider."""

    incoming: jax.Array  # I, [B, T, N]
    outgoing: jax.Array  # O, [B, S, N]
    conserved_sink: jax.Array  # I', [B, T, N]
    conserved_source: jax.Array  # O' before clipping, [B, S, N]
    competition: jax.Array  # c, [B, S, N]
    allocation: jax.Array  # a, [B, T, N]


class FlowSums(NamedTuple):
    """The sums over past positions; float32 or float64."""

    keys: jax.Array  # sum of phi(k), [B, N, M]
    queries: jax.Array  # sum of phi(q), [B, N, M]
    key_flow: jax.Array  # sum of phi(k) n / O, [B, N, M]
    query_flow: jax.Array  # sum of phi(q) n / I, [B, N, M]
    largest: jax.Array  # the largest O', or 0 for plain exponentials, [B, N]
    total: jax.Array  # sum of exp(O' - largest), [B, N]
    summary: jax.Array  # sum of phi(k) c v^T, [B, N, M, Hv]

    __repr__ = streams.show_shapes

    def in_unit(self, unit: jax.Array | float) -> "FlowSums":
        """The sums for features in another unit, see `unit_of`."""
        if not isinstance(unit, jax.Array):
            return self
        flat = along(unit, self.keys)
        return self._replace(
            keys=self.keys / flat,
            queries=self.queries / flat,
            key_flow=self.key_flow * flat,
            query_flow=self.query_flow * flat,
            summary=self.summary / along(unit, self.summary),
        )


class FlowState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: FlowSums
    sources: jax.Array  # real keys so far, [B] int32
    sinks: jax.Array  # real queries so far, [B] int32

    __repr__ = streams.show_shapes


class Tables(NamedTuple):
    """Per-position data besides the features; counts run up to the position."""

    sinks: jax.Array  # real ones; 0 at appended positions
    sources: jax.Array
    visible: jax.Array  # which sources are real
    unit: jax.Array | None = None  # see `unit_of`; None = 1

    @property
    def units(self) -> jax.Array | float:
        """The unit of each chunk, `[1 or B, 1, P, 1]`, at least 1."""
        return 1.0 if self.unit is None else jnp.maximum(self.unit[..., :1], 1)


def no_flow(arrays: engine.Arrays, width: int, dtype: jnp.dtype) -> FlowSums:
    """The sums before the first position, for features of this width M."""
    none = engine.nothing(arrays, dtype)
    sums = none[..., None] + jnp.zeros((width,), dtype)[None, None]
    value = jnp.zeros((arrays.value.shape[-1],), dtype)
    summary = sums[..., None] + value[None, None, None]
    # Flows are not negative, so 0 never exceeds the largest.
    return FlowSums(sums, sums, sums, sums, none, none, summary)


def unit_of(
    features: tuple[jax.Array, jax.Array], axis: str | None = None
) -> jax.Array:
    """The power of two that is the unit of a sample's features, `[B]`.

    A flow is a sum of products of two features: from 1e18 on it overflows float32. So
    if the largest feature is between 1e12 and 1e18, it is scaled down to 1e12. Flows
    are only compared with each other, so the unit cancels, and as a power of two it
    causes no rounding. In the causal form it depends on later positions, but without
    effect: in the largest unit, 2^20, products down to 1e-25 are still represented.

    Args:
      features: phi(q) and phi(k), `[B, N, T, M]`.
      axis: the mesh axis that holds the other parts of the sequence, if there are any.
    """
    one, two = (jax.lax.stop_gradient(x).max((1, 2, 3)) for x in features)
    largest = jnp.maximum(one, two)
    largest = largest if axis is None else jax.lax.pmax(largest, axis)
    # Compared with powers of two, so that dividing by the unit is exact.
    powers = jnp.asarray(2.0 ** np.arange(_ROOM, _LARGEST), largest.dtype)[None]
    reached = (largest[:, None] >= powers) & jnp.isfinite(largest)[:, None]
    return jnp.where(reached, powers / 2.0 ** (_ROOM - 1), 1).max(-1)


def along(unit: jax.Array | float, x: jax.Array) -> jax.Array | float:
    """A unit with the axes of x, `[B, ...]`."""
    if not isinstance(unit, jax.Array):
        return unit
    return inputs.align(unit, x.ndim)


def segment(
    options: Options,
    state: FlowSums,
    features: tuple[jax.Array, jax.Array, jax.Array],
    tables: Tables,
    rows: Documents | None,
) -> tuple[tuple[jax.Array, jax.Array], FlowSums]:
    """One segment, see `engine.Form`: numerators, their factors and the state after."""
    query, key, value = in_units(features, tables)
    earlier, terms, sums = _terms(options, state, query, key, tables, rows)
    value = value * terms.competition[..., None]
    product = functools.partial(jnp.einsum, precision=options.precision)
    key, query = documents.stayers(key, rows), documents.readers(query, rows)
    updates = product("bnpjm,bnpjv->bnpmv", key, value)
    decay = documents.decay(None, rows, key.dtype)
    before, summary = prefix(state.summary, updates, decay)
    numerator = product("bnpij,bnpjv->bnpiv", earlier, value)
    numerator += product("bnpim,bnpmv->bnpiv", query, before)
    factor = feature_maps.over(terms.allocation, terms.incoming)
    return (numerator, factor), sums._replace(summary=summary)


def terms_segment(
    options: Options,
    state: FlowSums,
    features: tuple[jax.Array, jax.Array, jax.Array],
    tables: Tables,
    rows: Documents | None,
) -> tuple[FlowTerms, FlowSums]:
    """`segment` with the terms in place of the output; it computes no summary."""
    query, key, _ = in_units(features, tables)
    _, terms, sums = _terms(options, state, query, key, tables, rows)
    return terms, sums


def in_units(
    features: tuple[jax.Array, jax.Array, jax.Array], tables: Tables
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """phi(q) and phi(k) `[B, N, P, C, M]` in the tables' unit, and v."""
    query, key, value = features
    if tables.unit is None:
        return features
    unit = jnp.asarray(tables.units)[..., None]
    return query / unit, key / unit, value


def _terms(
    options: Options,
    state: FlowSums,
    query: jax.Array,
    key: jax.Array,
    tables: Tables,
    rows: Documents | None,
) -> tuple[jax.Array, FlowTerms, FlowSums]:
    """``phi(q_i) . phi(k_j)`` for j <= i, the terms, and the sums after the segment.

    phi is in the tables' unit, and the flows are `[B, N, P, C]`.
    """
    product = functools.partial(jnp.einsum, precision=options.precision)
    unit = tables.units
    inner = functools.partial(_inner, options, rows, unit)
    sinks, sources = jnp.maximum(tables.sinks, 1), jnp.maximum(tables.sources, 1)
    scores = product("bnpim,bnpjm->bnpij", query, key)
    visible = documents.visible(scores.shape[-1], rows)
    earlier = hide_pairs(scores, visible)
    later = hide_pairs(scores, visible.swapaxes(-1, -2))
    last_key, last_query = (documents.stayers(x, rows) for x in (key, query))
    fade = documents.decay(None, rows, key.dtype)
    sums_before = functools.partial(prefix, decay=fade)
    (keys, queries), (after_keys, after_queries) = sums_before(
        (state.keys, state.queries), (last_key.sum(3), last_query.sum(3))
    )
    ones = jnp.ones(earlier.shape[-1], earlier.dtype)
    near = product("bnpij,j->bnpi", earlier, ones)
    incoming = inner(unit, near, key.sum(-1), query, keys)
    near = product("bnpij,i->bnpj", later, ones)
    outgoing = inner(unit, near, query.sum(-1), key, queries)
    of_keys = feature_maps.over(sinks, outgoing)
    of_queries = feature_maps.over(sources, incoming)
    updates = (
        product("bnpjm,bnpj->bnpm", last_key, of_keys),
        product("bnpjm,bnpj->bnpm", last_query, of_queries),
    )
    (key_flow, query_flow), (after_key_flow, after_query_flow) = sums_before(
        (state.key_flow, state.query_flow), updates
    )
    near = product("bnpij,bnpj->bnpi", earlier, of_keys)
    sink = inner(1 / unit, near, key.sum(-1) * of_keys, query, key_flow)
    near = product("bnpij,bnpi->bnpj", later, of_queries)
    source = inner(1 / unit, near, query.sum(-1) * of_queries, key, query_flow)
    conserved_sink, conserved_source = sink / sources, source / sinks
    competition, largest, total = _compete(
        options, conserved_source, state.largest, state.total, tables, rows
    )
    share = allocation(options, conserved_sink)
    terms = FlowTerms(
        incoming, outgoing, conserved_sink, conserved_source, competition, share
    )
    after = state._replace(
        keys=after_keys,
        queries=after_queries,
        key_flow=after_key_flow,
        query_flow=after_query_flow,
        largest=largest,
        total=total,
    )
    return earlier, terms, after


def _inner(
    options: Options,
    rows: Documents | None,
    unit: jax.Array | float,
    of_sum: jax.Array | float,
    near: jax.Array,
    others: jax.Array,
    features: jax.Array,
    before: jax.Array,
) -> jax.Array:
    """``(features_i + eps) . (sum_{j <= i} weights_j others_j + eps)``.

    Args:
      options, rows: as in `segment`.
      unit: of the features.
      of_sum: the unit of the sum, of features or of features over flows.
      near: ``sum_j features_i . weights_j others_j`` within the chunk.
      others: weights_j times the sum of the features others_j.
      features: of position i.
      before: the sum before the chunk.
    """
    eps, width = options.eps / unit, features.shape[-1]
    far = jnp.einsum("bnpim,bnpm->bnpi", features, before, precision=options.precision)
    far = far + eps * before.sum(-1)[..., None]
    constant = features.sum(-1) * (unit / of_sum) + width * (options.eps / of_sum)
    constant += _so_far(others, rows)
    extra_eps = options.extra_eps / (unit * of_sum)
    return near + documents.readers(far, rows) + eps * constant + extra_eps


def _so_far(x: jax.Array, rows: Documents | None) -> jax.Array:
    """`so_far` within each document."""
    if rows is None:
        return so_far(x)
    seen = documents.visible(x.shape[-1], rows)
    return jnp.einsum(
        "bnpij,bnpj->bnpi",
        jnp.broadcast_to(seen, (*x.shape[:3], *seen.shape[3:])).astype(x.dtype),
        x,
        precision="highest",
    )


def _compete(
    options: Options,
    conserved_source: jax.Array,
    largest: jax.Array,
    total: jax.Array,
    tables: Tables,
    rows: Documents | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """c `[B, N, P, C]`, and the largest logit and the total after the segment."""
    sources = jnp.maximum(tables.sources, 1)
    if not options.competition:
        return no_competition(conserved_source, tables.visible), largest, total
    logits = clip_outgoing(options, conserved_source)
    if not options.sums_as_is:
        shares, largest, total = _shares(logits, tables.visible, largest, total, rows)
        return shares * sources, largest, total
    # Logits are at most `SMALL_CLIP`, but the state may come from a larger clip.
    start = total * jnp.exp(jnp.minimum(largest, SMALL_CLIP))
    weights = exp_visible(logits, tables.visible)
    ends = documents.stayers(weights, rows).sum(-1)
    before, total = prefix(start, ends, documents.decay(None, rows, weights.dtype))
    sums = _so_far(weights, rows)
    before = jnp.broadcast_to(before[..., None], sums.shape)
    sums += documents.readers(before, rows)
    return feature_maps.over(weights, sums) * sources, jnp.zeros_like(total), total


def _shares(
    logits: jax.Array,
    visible: jax.Array,
    largest: jax.Array,
    total: jax.Array,
    rows: Documents | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each source's share among those up to it, and the state after.

    The maximum is a running one: with a maximum over the segment, a large later logit
    would round earlier shares to 0 / 0.
    """
    lowest = jnp.finfo(logits.dtype).min
    seen = documents.visible(logits.shape[-1], rows) & visible[..., None, :]
    # The maximum needs no gradient: the shares do not depend on it.
    columns = jax.lax.stop_gradient(logits)[..., None, :]
    largest_seen = jnp.where(seen, columns, lowest).max(-1)
    excess = feature_maps.below(logits[..., None, :], largest_seen[..., None])
    within = largest_seen, exp_visible(excess, seen).sum(-1)
    ends = (
        jnp.concatenate([first[..., None], x[..., -1]], 2)
        for first, x in zip((largest, total), within, strict=True)
    )
    largest, total = documents.scan(_merge, tuple(ends), rows)
    before, past = largest[:, :, :-1, None], total[:, :, :-1, None]
    if rows is not None:
        before = jnp.where(rows.reads, before, lowest)
        past = jnp.where(rows.reads, past, 0)
    highest, sums = _merge((before, past), within)
    excess = feature_maps.below(logits, highest)
    shares = feature_maps.over(exp_visible(excess, visible), sums)
    return shares, largest[..., -1], total[..., -1]


def _merge(
    one: tuple[jax.Array, jax.Array], two: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    largest = jnp.maximum(one[0], two[0])
    first, second = (
        total * jnp.exp(feature_maps.below(top, largest)) for top, total in (one, two)
    )
    return largest, first + second


def clip_outgoing(options: Options, logits: jax.Array) -> jax.Array:
    """The conserved outgoing flow as it enters the competition."""
    return logits if options.clip is None else feature_maps.clamp(logits, options.clip)


def no_competition(logits: jax.Array, visible: jax.Array | np.ndarray) -> jax.Array:
    """c = 1 for every real source."""
    return jnp.where(visible, jnp.ones_like(logits), jnp.zeros_like(logits))


def allocation(options: Options, conserved_sink: jax.Array) -> jax.Array:
    """a, from the conserved incoming flow."""
    if not options.allocation:
        return jnp.ones_like(conserved_sink)
    return jax.nn.sigmoid(conserved_sink)
