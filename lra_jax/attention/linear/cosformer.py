"""cosFormer (Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention").

``out_i = sum_j s(i, j) v_j / sum_j s(i, j)`` with
``s(i, j) = ReLU(q_i) . ReLU(k_j) cos(pi (i - j) / 2M)``.

``cos(a - b) = cos a cos b + sin a sin b`` splits exactly into features of width 2H,
``[ReLU(x_i) cos(pi i / 2M), ReLU(x_i) sin(pi i / 2M)]``, so the cost is
O((T + S) 2H Hv) time. There is no 1 / sqrt(H).

Positions and M. Only position differences matter, so positions count from 0 here. M
must exceed every position, or weights turn negative and the denominator may cross zero.
With ``max_length=None`` M is max(T, S), as in the authors' code (OpenNLPLab/cosFormer);
the weights then depend on the padded length, so a padded batch equals its samples run
alone only with a fixed ``max_length``.

The causal form sums over j <= i and does not double the features: within a chunk a
weight is the inner product times the cosine of the distance, and there are two states,
one for the cosines and one for the sines. A prefix gives the same outputs as the whole
sequence only with a fixed ``max_length``, so a stream (`cosformer_init`,
`cosformer_prefill`, `cosformer_step`) needs one from the start.

Two dimensions. If a sequence is an image read row by row, ``grid=(rows, columns)``
re-weights by both distances: position i is at row a_i and column b_i, and
``s(i, j) = ReLU(q_i) . ReLU(k_j) cos(pi (a_i - a_j) / 2 rows) cos(pi (b_i - b_j) / 2
columns)``. The two cosines split into four terms, features of width 4H, so the cost
stays linear. In one dimension the pixel below is a whole row of positions away, which
Wu et al. 2022 (Flowformer) name as the reason why cosFormer fails on images. The
two-dimensional form is ours; it has no causal version.

``feature_map`` and ``reweight=False`` are the ablations in the paper's tables. With
features that may be negative (identity, leaky_relu) denominators can cross zero, as the
paper notes.

Deviations from the authors' code: it has no mask; here padding is exact. Angles and
sums are float32 or wider, whatever the input dtype.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, masking, packed, streams
from lra_jax.attention.causal import documents, engine
from lra_jax.attention.causal.documents import Documents
from lra_jax.attention.causal.prefix import hidden, prefix
from lra_jax.attention.linear.linear import document_sums, part_sums, read, summed
from lra_jax.attention.linear.linear import segment as plain_segment
from lra_jax.attention.linear.sums import Sums, key_sums, started
from lra_jax.attention.sharded import exchange
from lra_jax.attention.sharded.documents import sliced, sums_before
from lra_jax.errors import expected

__all__ = [
    "CosformerState",
    "cosformer_attention",
    "cosformer_init",
    "cosformer_prefill",
    "cosformer_step",
    "cosformer_weights",
]


MaxLength = int | np.integer | jax.Array | np.ndarray | None
# Cosines and sines of positions, `[1 or B, T]` each.
Tables = tuple[jax.Array, jax.Array]


class CosformerState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: Sums  # [B, N, 2H, Hv] and [B, N, 2H]; without re-weighting, H instead of 2H
    position: jax.Array  # of the next token in each sample, [B] int32
    max_length: jax.Array  # M of each sample, [B] int32

    __repr__ = streams.shapes_shown


class _Options(NamedTuple):
    """`feature_maps.Options`, and those of `cosformer_attention`."""

    feature_map: feature_maps.FeatureMap
    dtype: Any
    precision: jax.lax.PrecisionLike
    denominator: str
    eps: float
    turn: float | None  # the angle between neighbouring positions, if M is static
    reweight: bool


class _Places(NamedTuple):
    """Where a call's positions are, and which of them count."""

    lengths: int | jax.Array  # M, or one per sample, [B]
    rows: packed.Packed | None  # packed documents
    mask: jax.Array | None  # real keys below M, [B, S]; None = all
    query_mask: jax.Array | None  # queries below M, [B, T]; None = all


@masking.guarded
def cosformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: MaxLength = None,
    *,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "relu",
    reweight: bool = True,
    grid: inputs.Grid = None,
    denominator: str = "clamp",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes attention with ReLU features, re-weighted by the cosine of distance.

    Args:
      query, key, value, mask, is_causal: as in `linear_attention`.
      max_length: M. An int of at least max(T, S); None for max(T, S); or an integer
        array `[B]` with one M per sample. In a sample, positions from its M on are
        padding: keys there are hidden and output rows are zero.
      segment_ids: as in `linear_attention`. Positions count from a document's start, so
        M may be less than T; positions from M on are padding.
      feature_map: "relu", "identity", "leaky_relu", "elu" (elu(x) + 1), or a function
        of an array.
      reweight: multiply each weight by the cosine of the distance.
      grid: rows and columns if the sequences are images, T = S = rows * columns; then
        both distances count, and M is ignored. Not with `segment_ids`. None = one
        dimension.
      denominator: "clamp" divides by max(sum, eps), as the authors do; "add" divides by
        sum + eps (davidsvy/cosformer-pytorch, with eps 1e-5).
      eps: see `denominator`.
      deterministic: from Flax's layers; with it, ``decode=True`` is refused.
      chunking, implementation, precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype. With ReLU, a row is exactly zero, with zero
      gradient to query and key, if all entries of its query, or of all visible keys,
      are negative.

    Raises:
      ValueError: shapes, dtypes, the mask or an option do not fit, a position lies
        beyond `max_length`, or there is no kernel although one is requested.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> out = cosformer_attention(query, key, value, max_length=64)
      >>> matrix = cosformer_weights(query, key, max_length=64)
      >>> matrix.shape
      (2, 4, 64, 64)
      >>> dense = jnp.einsum("bnts,bsnh->btnh", matrix, value)
      >>> bool(jnp.allclose(out, dense, atol=1e-4))
      True
    """
    inputs.check_keywords(cosformer_attention, flax, deterministic)
    inputs.check_inputs(query, key, value, is_causal)
    _check(reweight, denominator, eps)
    if reweight:
        inputs.refuse_decoding(deterministic, query, key, "cosformer")
    _check_grid(grid, query, key, is_causal, reweight, segment_ids)
    max_length = max_length if grid is None else None
    places = _places(max_length, mask, query, key, segment_ids)
    out = kernels.attended(
        implementation,
        masking.hide(query, places.query_mask),
        key,
        value,
        places.mask,
        is_causal,
        mechanism="cosformer" if reweight else "linear",
        refusal=None if grid is None else ("grid", "None", f"{grid}"),
        feature_map=feature_maps.for_kernels(feature_map),
        denominator=denominator,
        eps=eps,
        chunking=chunking,
        precision=precision,
        max_length=places.lengths if reweight else None,
        documents=packed.numbers(places.rows),
    )
    if out is not None:
        # Hidden again, because phi(0) may not be zero.
        return masking.hide(out, places.query_mask)
    dtype = inputs.accumulation_dtype(query, key, value)
    turn = _turn(places.lengths)
    options = _Options(feature_map, dtype, precision, denominator, eps, turn, reweight)
    if is_causal:
        tables = _tables(query.shape[1], places.lengths, dtype, places.rows)
        return _causal(options, query, key, value, places, tables, chunking)[0]
    features = _features(options, query, key, places, grid)
    return _whole(options, features, value, places, chunking).astype(query.dtype)


cosformer_weights = dense.weights_of(
    cosformer_attention, "With ReLU its entries are never negative."
)


def cosformer_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    max_length: int | None = None,
    state: CosformerState | None = None,
    segment_ids: jax.Array | None = None,
    feature_map: feature_maps.FeatureMap = "relu",
    reweight: bool = True,
    denominator: str = "clamp",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, CosformerState]:
    """Processes a whole prompt, or a later part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, mask and options as in `cosformer_attention`.
        The next token follows each sample's last real position.
      max_length: M, for everything that the stream will hold; pass either M or a state,
        which contains it. In a packed row, documents are cut after M positions.
      state: the state so far; None = a new stream. In a packed row, the first document
        continues it, and the returned state is that of the last.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position.

    Raises:
      ValueError: shapes, dtypes, the mask, an option or the state do not fit, or the
        prompt reaches beyond M. Under ``jax.jit`` a state's position is unknown, so
        this is not checked: positions from M on are then treated as position M - 1.
    """
    rows = packed.packed(segment_ids, query, key)
    mask, dtype, position = streams.begun(state, query, key, value, mask, rows)
    _check(reweight, denominator, eps)
    length, within = query.shape[1], None
    if state is None:
        longest = inputs.check_max_length(max_length, length if rows is None else 1)
        within = _within(longest, length, rows)
        mask, position = masking.both(mask, within), jnp.minimum(position, longest)
        tables = _tables(length, longest, dtype, rows)
        limit, turn = jnp.full(position.shape, longest, jnp.int32), _turn(longest)
    elif max_length is not None:
        raise expected("max_length", "None with a state", max_length)
    else:
        limit, turn = state.max_length, None
        tables = _stream_tables(state.position, length, limit, dtype, rows, mask)
    options = _Options(feature_map, dtype, precision, denominator, eps, turn, reweight)
    out, sums = _causal(
        options,
        query,
        key,
        value,
        _Places(limit, rows, mask, within),
        tables,
        chunking,
        None if state is None else state.sums,
    )
    return out, CosformerState(sums, position, limit)


cosformer_init = streams.make_init(cosformer_prefill)
cosformer_step = streams.make_step(cosformer_prefill)


def _causal(
    options: _Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    places: _Places,
    tables: Tables,
    chunking: engine.Chunking | None,
    state: Sums | None = None,
) -> tuple[jax.Array, Sums]:
    """The causal form; ``tables`` are two arrays `[1 or B, T]`."""
    dtype, reweight = query.dtype, options.reweight
    options, start, arrays = started(
        options,
        engine.Arrays(query, key, value),
        state,
        mask=places.mask,
        query_mask=places.query_mask,
        copies=2 if reweight else 1,
    )
    own = _segment if reweight else plain_segment
    return engine.run(
        engine.Form(feature_maps.prepared, own, options, _scale),
        start,
        arrays,
        mask=places.mask,
        query_mask=places.query_mask,
        tables=tables if reweight else None,
        resets=packed.resets(places.rows),
        chunking=chunking,
        dtype=dtype,
    )


def _whole(
    options: _Options,
    features: tuple[jax.Array, jax.Array],
    value: jax.Array,
    places: _Places,
    chunking: engine.Chunking | None,
    axis: str | None = None,
) -> jax.Array:
    """The non-causal form from features `[B, N, T, M]`, see `linear._whole`."""
    query, key = features
    if places.rows is not None:
        out, total = document_sums(
            options._replace(feature_map="identity"),
            jnp.swapaxes(query, 1, 2),
            jnp.swapaxes(key, 1, 2),
            value,
            places.rows,
            mask=places.mask,
            chunking=chunking,
        )
        return out * _scale(options, total)[..., None]
    value = masking.by_head(value, query.shape[1], places.mask, options.dtype)
    sums = exchange.total(summed(key, value, options.precision), axis)
    out, total = read(query, sums, options.precision)
    return jnp.swapaxes(out * _scale(options, total)[..., None], 1, 2)


def _segment(
    options: _Options,
    state: Sums,
    features: tuple[jax.Array, jax.Array, jax.Array],
    tables: Tables,
    found: Documents | None = None,
) -> tuple[tuple[jax.Array, jax.Array], Sums]:
    """One segment, see `engine.Form`: numerators, denominators and the state after.

    The state holds the sums of keys times cosines, then of keys times sines.
    """
    query, key, value = features
    product = functools.partial(jnp.einsum, precision=options.precision)
    scores = product("bnpim,bnpjm->bnpij", query, key)
    scores = scores * _distances(*tables, options.turn)
    scores = hidden(scores, documents.visible(scores.shape[-1], found))
    key, query = documents.stayers(key, found), documents.readers(query, found)
    updates = [
        Sums(product("bnpjm,bnpjv->bnpmv", key * near[..., None], value), total)
        for near, total in zip(tables, _totals(key, *tables), strict=True)
    ]
    (cosines, sines), totals = (jnp.split(x, 2, 2) for x in state)
    halves = [Sums(cosines, totals[0]), Sums(sines, totals[1])]
    decay = documents.decay(None, found, key.dtype)
    befores, afters = prefix(halves, updates, decay)
    numerator = product("bnpij,bnpjv->bnpiv", scores, value)
    denominator = scores.sum(-1)
    # The cosine of a difference splits into two products. Their outputs are weighted,
    # not their queries: the weighting is then fused with the additions.
    for near, before in zip(tables, befores, strict=True):
        past = product("bnpim,bnpmv->bnpiv", query, before.summary)
        numerator += near[..., None] * past
        denominator += near * product("bnpim,bnpm->bnpi", query, before.total)
    after = Sums(*(jnp.concatenate(x, 2) for x in zip(*afters, strict=True)))
    return (numerator, denominator), after


def _distances(cos: jax.Array, sin: jax.Array, turn: float | None) -> jax.Array:
    """The cosines of the distances within a chunk, `[1 or B, 1, P or 1, C, C]`."""
    if turn is None:
        pairs = (x[..., :, None] * x[..., None, :] for x in (cos, sin))
        return sum(pairs, jnp.zeros((), cos.dtype))
    # A constant: XLA would compute the general form once for every head.
    places = np.arange(cos.shape[-1])
    near = np.cos((places[:, None] - places) * turn)
    return jnp.asarray(near, cos.dtype)[None, None, None]


@jax.custom_vjp
def _totals(key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple:
    """The sums of a chunk's keys times their cosines, and times their sines.

    Computed here as one product. Under differentiation the products with a state need
    both weighted keys anyway, so two products with ones are faster; so is the custom
    gradient, since that of the single product would be a product with two columns.
    """
    # Ones with the key's sharding.
    ones = jnp.ones_like(key[..., 0])
    both = jnp.stack([ones * cos, ones * sin], -2)
    sums = jnp.einsum("bnpcj,bnpjm->bnpcm", both, key, precision="highest")
    return sums[..., 0, :], sums[..., 1, :]


def _totals_forward(key: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple:
    sums = key_sums(key * cos[..., None]), key_sums(key * sin[..., None])
    return sums, (cos, sin)


def _totals_backward(tables: tuple, of_sums: tuple) -> tuple:
    pairs = zip(tables, of_sums, strict=True)
    cos, sin = (near[..., None] * slope[..., None, :] for near, slope in pairs)
    # The tables have no gradient.
    return cos + sin, None, None


_totals.defvjp(_totals_forward, _totals_backward)


def _scale(options: _Options, denominator: jax.Array) -> jax.Array:
    return feature_maps.over(jnp.ones_like(denominator), _bounded(options, denominator))


def _bounded(options: _Options, sums: jax.Array) -> jax.Array:
    if options.denominator == "clamp":
        return feature_maps.at_least(sums, options.eps)
    return sums + options.eps


def _check(reweight: bool, denominator: str, eps: float) -> None:
    inputs.check_eps(eps)
    inputs.check_flag("reweight", reweight)
    if denominator not in ("clamp", "add"):
        raise expected("denominator", "'clamp' or 'add'", f"{denominator!r}")


def cosformer_slice(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    query_mask: jax.Array | None,
    segment_ids: jax.Array | None = None,
    *,
    axis: str,
    is_causal: bool,
    max_length: int | None = None,
    feature_map: feature_maps.FeatureMap = "relu",
    reweight: bool = True,
    grid: inputs.Grid = None,
    denominator: str = "clamp",
    eps: float = 1e-6,
    chunking: engine.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """One device's part of `cosformer_attention`, see `lra_jax.attention.sharded`."""
    _check(reweight, denominator, eps)
    if grid is not None:
        raise expected("grid", "None for a sequence split over devices", grid)
    dtype = inputs.accumulation_dtype(query, key, value)
    rows = sliced(segment_ids, axis)
    longest, tables = _slice_tables(query.shape[1], max_length, dtype, axis, rows)
    places = _visible(mask, longest, query, key, rows)
    turn = _turn(longest)
    options = _Options(feature_map, dtype, precision, denominator, eps, turn, reweight)
    masks = places.mask, places.query_mask
    features = feature_maps.features(query, key, feature_map, dtype, *masks)
    if reweight:
        features = _turned(features[0], tables), _turned(features[1], tables)
    if not is_causal:
        out = _whole(options, features, value, places, chunking, axis)
        return out.astype(query.dtype)
    part = functools.partial(
        part_sums,
        options._replace(feature_map="identity"),
        jnp.swapaxes(features[1], 1, 2),
        value,
        query.shape[2],
        places.mask,
    )
    start = sums_before(part, rows, axis)
    return _causal(options, query, key, value, places, tables, chunking, start)[0]


def _slice_tables(
    length: int,
    max_length: int | None,
    dtype: jnp.dtype,
    axis: str,
    rows: packed.Packed | None,
) -> tuple[int, Tables]:
    """M, and the tables of one device's positions."""
    whole = length * jax.lax.axis_size(axis)
    longest = whole if max_length is None else max_length
    longest = inputs.check_max_length(longest, whole if rows is None else 1)
    cos, sin = _tables(whole, longest, dtype, rows)
    if rows is None:
        first = jax.lax.axis_index(axis) * length
        cos, sin = (
            jax.lax.dynamic_slice_in_dim(x, first, length, 1) for x in (cos, sin)
        )
    return longest, (cos, sin)


def _turned(x: jax.Array, tables: Tables) -> jax.Array:
    """Re-weights `[B, N, T, M]` -> `[B, N, T, 2M]`."""
    cos, sin = tables
    return feature_maps.rotated(x, cos[:, None], sin[:, None])


def _features(
    options: _Options,
    query: jax.Array,
    key: jax.Array,
    places: _Places,
    grid: inputs.Grid,
) -> tuple[jax.Array, jax.Array]:
    """Features of query and key, `[B, N, T, 2H]`; in a grid 4H, not re-weighted H."""
    phi, masks = options.feature_map, (places.mask, places.query_mask)
    features = feature_maps.features(query, key, phi, options.dtype, *masks)
    if not options.reweight:
        return features

    def rotate(x: jax.Array) -> jax.Array:
        if grid is None:
            tables = [_tables(x.shape[2], places.lengths, x.dtype, places.rows)]
        else:
            tables = _grid_tables(grid, x.dtype)
        return functools.reduce(_turned, tables, x)

    return rotate(features[0]), rotate(features[1])


def _grid_tables(grid: tuple[int, int], dtype: jnp.dtype) -> list[Tables]:
    """The tables for every position's row, and for its column."""
    pairs = zip(np.divmod(np.arange(math.prod(grid)), grid[1]), grid, strict=True)
    return [
        _constants(place[None] * (math.pi / 2 / size), dtype) for place, size in pairs
    ]


def _constants(angles: np.ndarray, dtype: jnp.dtype) -> Tables:
    """Cosine and sine, computed here in float64.

    XLA would fuse the cosine into the product and evaluate it once for every element.
    """
    return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)


def _check_grid(
    grid: inputs.Grid,
    query: jax.Array,
    key: jax.Array,
    is_causal: bool,
    reweight: bool,
    segment_ids: jax.Array | None,
) -> None:
    """Raises ``ValueError`` unless the grid is None or fits the inputs."""
    inputs.check_grid(grid, query, key, is_causal, segment_ids)
    if grid is not None and not reweight:
        raise expected("reweight", "True with a grid", False)


def _max_lengths(
    max_length: MaxLength,
    query: jax.Array,
    key: jax.Array,
    rows: packed.Packed | None,
) -> int | jax.Array:
    """M as an int, or as an integer array `[B]`."""
    longest = max(query.shape[1], key.shape[1])
    if max_length is None:
        return longest
    if isinstance(max_length, int | np.integer):
        if rows is not None:
            return inputs.check_size("max_length", max_length)
        if max_length < longest:
            wanted = f"at least max(T, S)={longest}, so that every weight is positive"
            raise expected("max_length", wanted, max_length)
        return int(max_length)
    lengths = jnp.asarray(max_length)
    wanted = (query.shape[0],)
    if lengths.shape != wanted or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise expected(
            "max_length",
            f"an int, None or an integer array [B]={wanted}",
            f"{lengths.dtype} of shape {lengths.shape}",
        )
    # Positions are compared with it, which small types could not hold.
    return lengths.astype(jnp.int32)


def _places(
    max_length: MaxLength,
    mask: jax.Array | None,
    query: jax.Array,
    key: jax.Array,
    segment_ids: jax.Array | None,
) -> _Places:
    rows = packed.packed(segment_ids, query, key)
    lengths = _max_lengths(max_length, query, key, rows)
    return _visible(mask, lengths, query, key, rows)


def _visible(
    mask: jax.Array | None,
    lengths: int | jax.Array,
    query: jax.Array,
    key: jax.Array,
    rows: packed.Packed | None,
) -> _Places:
    """Hides the positions beyond M."""
    length = key.shape[1]
    mask = packed.shown(masking.padding_mask(mask, key.shape[0], length), rows)
    mask = masking.both(mask, _within(lengths, length, rows))
    return _Places(lengths, rows, mask, _within(lengths, query.shape[1], rows))


def _within(
    lengths: int | jax.Array, length: int, rows: packed.Packed | None
) -> jax.Array | None:
    """`[B, S]`: the positions below each sample's M; None for one fixed M."""
    if rows is not None:
        limit = lengths if isinstance(lengths, int) else lengths[:, None]
        return rows.position < limit
    if isinstance(lengths, int):
        return None
    return jnp.arange(length, dtype=lengths.dtype)[None] < lengths[:, None]


def _turn(lengths: int | jax.Array) -> float | None:
    """The angle between neighbouring positions, if M is one static number."""
    return math.pi / 2 / lengths if isinstance(lengths, int) else None


def _tables(
    length: int,
    lengths: int | jax.Array,
    dtype: jnp.dtype,
    rows: packed.Packed | None,
) -> Tables:
    """Cosine and sine of every position's angle ``pi i / 2M``, `[1 or B, T]`."""
    positions = np.arange(length)[None]
    if isinstance(lengths, int):
        cos, sin = _constants(positions * (math.pi / 2 / lengths), dtype)
        if rows is None:
            return cos, sin
        return cos[0][rows.position], sin[0][rows.position]
    longest = jnp.maximum(lengths, 1).astype(dtype)
    positions = positions if rows is None else rows.position
    angles = jnp.asarray(positions, dtype) * (math.pi / 2 / longest)[:, None]
    return jnp.cos(angles), jnp.sin(angles)


def _stream_tables(
    position: jax.Array,
    length: int,
    max_length: jax.Array,
    dtype: jnp.dtype,
    rows: packed.Packed | None,
    mask: jax.Array | None,
) -> Tables:
    """The tables of ``length`` positions from each sample's position on, `[B, T]`.

    Positions from M on share the angle of the last one, M - 1, so that every weight
    stays positive.

    Raises:
      ValueError: a visible one reaches beyond M; checked only if they are concrete.
    """
    if rows is None:
        # In numpy if they are concrete: under jax.jit, jnp would trace them.
        traced = isinstance(position, jax.core.Tracer)
        first = position if traced else np.asarray(position)
        places = first[:, None] + np.arange(length, dtype=np.int32)[None]
    else:
        places = rows.position + jnp.where(rows.number <= 1, position[:, None], 0)
    if not any(isinstance(x, jax.core.Tracer) for x in (places, mask, max_length)):
        ends = np.where(True if mask is None else mask, np.asarray(places) + 1, 0)
        over = ends.max(1) - np.asarray(max_length)
        longest = int(over.argmax())
        if over[longest] > 0:
            end, given = over[longest] + max_length[longest], max_length[longest]
            wanted = f"at least {end} for a stream that goes this far"
            raise expected("max_length", wanted, given)
    limit = max_length[:, None]
    places = jnp.minimum(places, limit - 1).astype(dtype)
    angles = places * (math.pi / 2 / limit.astype(dtype))
    return jnp.cos(angles), jnp.sin(angles)
