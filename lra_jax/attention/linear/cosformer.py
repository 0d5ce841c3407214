"""cosFormer (Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention").

``out_i = sum_j s(i, j) v_j / sum_j s(i, j)`` with
``s(i, j) = ReLU(q_i) . ReLU(k_j) cos(pi (i - j) / 2M)``.

``cos(a - b) = cos a cos b + sin a sin b`` splits exactly into features of width 2H,
``[ReLU(x_i) cos(pi i / 2M), ReLU(x_i) sin(pi i / 2M)]``, so the cost is
O((T + S) 2H Hv) time. There is no 1 / sqrt(H).

Positions and M. Only position differences matter, so positions count from 0 here. M
must exceed every position, or weights turn negative and the denominator may cross zero.
With ``max_length=None`` M is max(T, S), as in the authors' code (OpenNLPLab/cosFormer).
With a mask in self-attention it is that of each sample run alone, from its first real
position to its last. In cross-attention the queries' padding is not known, and in a
packed row M is the row's length: there only a fixed ``max_length`` gives what a sample
or a document alone would. Equal lengths count as self-attention, where queries in the
keys' padding give zero: in cross-attention with T = S, pass ``max_length``.

The causal form sums over j <= i. A prefix gives the same outputs as the whole
sequence only with a fixed ``max_length``, so a stream (`cosformer_init`,
`cosformer_prefill`, `cosformer_step`) needs one from the start, and its state keeps it.
A stream that goes beyond M raises; under ``jax.jit``, where a state's position is
unknown, its further positions count as M - 1.

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

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax import kernels
from lra_jax.attention import dense, feature_maps, inputs, streams
from lra_jax.attention.call import Call, attention_of
from lra_jax.attention.causal import engine
from lra_jax.attention.linear import core, positions
from lra_jax.attention.linear.positions import MaxLength, Positions
from lra_jax.attention.linear.sums import Sums
from lra_jax.errors import expected, known

__all__ = [
    "CosformerState",
    "cosformer_attention",
    "cosformer_init",
    "cosformer_prefill",
    "cosformer_step",
    "cosformer_weights",
]


# Cosines and sines of positions, `[1 or B, T]` each.
Tables = tuple[jax.Array, jax.Array]


class CosformerState(NamedTuple):
    """Everything that the next position needs from the earlier ones."""

    sums: Sums  # [B, N, 2H, Hv] and [B, N, 2H]; without re-weighting, H instead of 2H
    position: jax.Array  # of the next token in each sample, [B] int32
    max_length: jax.Array  # M of each sample, [B] int32

    __repr__ = streams.show_shapes


def _run(
    call: Call,
    *,
    max_length: MaxLength,
    feature_map: feature_maps.FeatureMap,
    reweight: bool,
    grid: inputs.Grid,
    denominator: str,
    eps: float,
) -> tuple[jax.Array, CosformerState]:
    inputs.check_eps(eps)
    inputs.check_flag("reweight", reweight)
    if reweight:
        inputs.refuse_decoding(call.deterministic, call.query, call.key, "cosformer")
    known("denominator", denominator, ("clamp", "add"))
    inputs.check_grid(grid, call.query, call.key, call.is_causal, call.rows)
    if grid is not None and call.axis is not None:
        raise expected("grid", "None for a sequence split over devices", grid)
    is_fixed = grid is not None or not reweight
    places = positions.locate(call, None if grid is not None else max_length, is_fixed)
    call = positions.hide_beyond(call, places)
    dimensions = [places] if grid is None else positions.on_grid(grid)
    dimensions = dimensions if reweight else []
    kernel = core.Kernel(
        feature_map=feature_map,
        rotate=_rotate if reweight else None,
        tables=lambda dtype: [_cos_and_sin(x, dtype) for x in dimensions],
        copies=2 ** len(dimensions),
        denominator=denominator,
        eps=eps,
        max_length=places.max_length if reweight else None,
        refusal=None if grid is None else ("grid", "None", f"{grid}"),
    )
    out, sums = core.attend(call, kernel, "cosformer" if reweight else "linear")
    state: Any = None
    if call.streams:
        limit = jnp.broadcast_to(places.max_length, call.query.shape[:1])
        position = call.next_position
        if call.state is None:
            position = jnp.minimum(position, limit)
        state = CosformerState(sums, position, limit.astype(jnp.int32))
    return call.finish(out), state


@attention_of(_run)
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
      max_length: M. An int of at least max(T, S); None for max(T, S), or with a mask
        and T = S, as in self-attention, for the length of each sample without its
        padding, whose output rows are zero; or an integer array `[B]` with one M per
        sample. In a sample, positions from its M on are padding: keys there are hidden
        and output rows are zero.
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
    ...


cosformer_weights = dense.weights_of(
    cosformer_attention, "With ReLU its entries are never negative."
)
cosformer_prefill = streams.make_prefill(cosformer_attention, _run, CosformerState)
cosformer_init = streams.make_init(cosformer_prefill)
cosformer_step = streams.make_step(cosformer_prefill)
cosformer_slice = streams.make_slice(cosformer_attention, _run)


def _rotate(features: jax.Array, tables: list[Tables]) -> jax.Array:
    """``[x_i cos(pi i / 2M), x_i sin(pi i / 2M)]``: `[..., M]` -> `[..., 2M]`.

    With two pairs of tables, of rows and columns, `[..., 4M]`.
    """
    for cos, sin in tables:
        features = jnp.concatenate(
            [features * cos[..., None], features * sin[..., None]], -1
        )
    return features


def _cos_and_sin(places: Positions, dtype: Any) -> Tables:
    """Cosine and sine of every position's angle ``pi i / 2M``, `[1 or B, T]`."""
    position, limit = places
    if isinstance(position, np.ndarray) and isinstance(limit, int):
        angles = position * (math.pi / 2 / limit)  # in float64
        return jnp.asarray(np.cos(angles), dtype), jnp.asarray(np.sin(angles), dtype)
    if not isinstance(limit, int):
        limit = jnp.maximum(limit, 1).astype(dtype)[:, None]
    angles = position.astype(dtype) * (math.pi / 2 / limit)
    # Otherwise XLA fuses them into products and computes them for every element.
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
