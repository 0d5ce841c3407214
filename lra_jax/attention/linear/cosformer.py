"""cosFormer (Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention").

``out_i = sum_j s(i, j) v_j / sum_j s(i, j)`` with
``s(i, j) = ReLU(q_i) . ReLU(k_j) cos(pi (i - j) / 2M)``.

``cos(a - b) = cos a cos b + sin a sin b`` splits exactly into features of width 2H,
``[ReLU(x_i) cos(pi i / 2M), ReLU(x_i) sin(pi i / 2M)]``, so the cost is
O((T + S) 2H Hv) time. There is no 1 / sqrt(H).

Positions and M. Only position differences matter, so they count from 0 here. M must
exceed every position, or weights turn negative and the denominator may cross zero. With
``max_length=None`` M is max(T, S), as in the authors' code (OpenNLPLab/cosFormer); the
weights then depend on the padded length, so a padded batch equals its samples run alone
only with a fixed ``max_length``.

The causal form sums over j <= i and doubles no features
outside a super-block: within a chunk a weight is the inner product times the cosine of
the distance. It equals its own prefixes only with a fixed ``max_length``, so a stream
(`cosformer_init`, `cosformer_prefill`, `cosformer_step`) has one from the start.

Deviations from the authors' code: it has no mask; here padding is exact. Angles and
sums are float32 or wider whatever the inputs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.causal import sums as causal
from lra_jax.attention.linear import angles
from lra_jax.attention.registry import Mechanism

__all__ = [
    "CosformerState",
    "cosformer_attention",
    "cosformer_init",
    "cosformer_prefill",
    "cosformer_step",
    "cosformer_weights",
]

MECHANISM = Mechanism(
    name="cosformer",
    causal=True,
    cross=True,
    stream=True,
    kernels=True,
    cost="2 (T + S) H^2",
    summary="ReLU features re-weighted by the cosine of distance",
    source="Qin et al. 2022",
    # OpenNLPLab/lra, trans-cosformer-lra-*.yaml; see lra_jax/configs/families.py.
    presets={
        "official": {
            "*": {"model.attention_options": "eps=0.0001"},
            "listops": {
                "model.num_layers": 6,
                "model.num_heads": 8,
                "model.embed_dim": 128,
                "model.qkv_dim": 128,
                "model.mlp_dim": 256,
                "model.dropout": 0.0,
                "train.schedule": "cosine",
                "train.learning_rate": 0.01,
                "train.weight_decay": 0.01,
                "train.steps": 80_000,
                "train.batch_size": 50,
                "train.eval_every": 1_000,
                "model.pooling": "mean",
            },
            "text": {
                "model.num_layers": 5,
                "model.num_heads": 8,
                "model.embed_dim": 64,
                "model.qkv_dim": 64,
                "model.mlp_dim": 128,
                "model.dropout": 0.0,
                "train.schedule": "cosine",
                "train.learning_rate": 0.0005,
                "train.weight_decay": 0.0,
                "train.steps": 50_000,
                "train.warmup": 80,
                "train.batch_size": 16,
                "model.pooling": "mean",
                "model.max_length": 4_096,
                "data.max_length": 4_096,
            },
            "retrieval": {
                "model.num_layers": 4,
                "model.num_heads": 8,
                "model.embed_dim": 128,
                "model.qkv_dim": 128,
                "model.mlp_dim": 256,
                "model.dropout": 0.0,
                "train.schedule": "cosine",
                "train.learning_rate": 0.001,
                "train.weight_decay": 0.0,
                "train.steps": 50_000,
                "train.warmup": 800,
                "train.eval_every": 1_000,
            },
            "image": {
                "model.num_layers": 6,
                "model.num_heads": 8,
                "model.embed_dim": 512,
                "model.qkv_dim": 512,
                "model.mlp_dim": 1_024,
                "model.dropout": 0.2,
                "train.schedule": "cosine",
                "train.learning_rate": 0.004,
                "train.weight_decay": 0.05,
            },
            "pathfinder": {
                "model.num_layers": 6,
                "model.num_heads": 8,
                "model.embed_dim": 256,
                "model.qkv_dim": 256,
                "model.mlp_dim": 512,
                "model.dropout": 0.1,
                "train.schedule": "cosine",
                "train.learning_rate": 0.0005,
                "train.weight_decay": 0.0,
                "train.steps": 500_000,
                "train.warmup": 2_500,
                "train.batch_size": 64,
                "train.eval_every": 2_500,
            },
        }
    },
)


class CosformerState(NamedTuple):
    """Everything that the next position needs of the earlier ones."""

    sums: causal.Sums  # [B, N, 2H, Hv] and [B, N, 2H]
    position: jax.Array  # of the next token in each sample, [B] int32
    max_length: jax.Array  # M, [] int32


def cosformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: angles.MaxLength = None,
    *,
    denominator: str = "clamp",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: kernels.Implementation = "auto",
    **_: Any,
) -> jax.Array:
    """Computes attention with ReLU features, re-weighted by the cosine of distance.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      mask: boolean, True = may be attended: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: position i sees keys 0..i only; needs T == S.
      max_length: M. An int of at least max(T, S); None for max(T, S); or an integer
        array `[B]` with one M a sample, whose positions from its M on are padding: such
        keys are hidden and such query rows are zero.
      denominator: "clamp" divides by max(sum, eps), as the authors do; "add" divides by
        sum + eps (davidsvy/cosformer-pytorch, with eps 1e-5).
      eps: see `denominator`.
      chunking: how the causal form cuts the sequence; None = by the backend.
      precision: of the matrix products, as in ``jnp.einsum``.
      implementation: "xla", "pallas", or "auto": the kernels of docs/kernels.md where
        they run.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype. A row whose query, or whose every visible
      key, is negative throughout is exactly zero, with zero gradient to query and key.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, a position lies beyond
        `max_length`, or there is no kernel where one is wanted.
    """
    inputs.check_inputs(query, key, value, is_causal)
    _check_options(denominator)
    target = kernels.choose(implementation, query, key, value, "relu", chunking)
    lengths = angles.max_lengths(max_length, query, key)
    mask = angles.visible(mask, lengths, query.shape[0], key.shape[1])
    rows = angles.within(lengths, query.shape[1])
    if target is not None:
        arrays = (inputs.hide(query, rows), key, value, mask, is_causal)
        options = (denominator, eps, lengths, chunking, precision)
        return kernels.attend(target, *arrays, "relu", *options)
    dtype = inputs.accumulation_dtype(query, key, value)
    if is_causal:
        return causal.attend(
            *(query, key, value, mask),
            "relu",
            causal.Divided(denominator, eps),
            query_mask=rows,
            angles=_by_position(angles.tables(query.shape[1], lengths, dtype)),
            turn=angles.turn(lengths),
            chunking=chunking,
            precision=precision,
        )[0]
    features = _features(query, key, rows, mask, dtype)
    value = inputs.by_head(value, query.shape[2], mask, dtype)
    query_features, key_features = _rotated(features, lengths)
    sums = feature_maps.project(query_features, key_features.sum(2), precision)
    out = feature_maps.contract(query_features, key_features, value, precision)
    out = out / causal.bounded(sums, denominator, eps)[..., None]
    return jnp.swapaxes(out, 1, 2).astype(query.dtype)


def cosformer_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    max_length: angles.MaxLength = None,
    *,
    denominator: str = "clamp",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns the weights `[B, N, T, S]` that `cosformer_attention` never builds.

    float32 or wider; arguments and errors are those of `cosformer_attention`.
    """
    inputs.check_inputs(query, key, None, is_causal)
    _check_options(denominator)
    lengths = angles.max_lengths(max_length, query, key)
    mask = angles.visible(mask, lengths, query.shape[0], key.shape[1])
    dtype = inputs.accumulation_dtype(query, key)
    rows = angles.within(lengths, query.shape[1])
    features = _rotated(_features(query, key, rows, mask, dtype), lengths)
    scores = feature_maps.products(*features, precision)
    if is_causal:
        scores = feature_maps.hide_future(scores)
    return scores / causal.bounded(scores.sum(-1, keepdims=True), denominator, eps)


def cosformer_init(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    max_length: int,
) -> CosformerState:
    """Returns the state of a stream before its first position.

    Args:
      batch_size: B.
      num_heads: N, those of the query.
      head_dim: H.
      value_dim: Hv; None = H.
      dtype: of the sums, float32 or float64.
      max_length: M, more than every position that the stream will reach.

    Raises:
      ValueError: another dtype, or `max_length` is not positive.
    """
    dtype = inputs.state_dtype(dtype)
    sizes = (batch_size, num_heads, 2 * head_dim, value_dim or head_dim)
    return CosformerState(
        causal.no_sums(*sizes, dtype),
        jnp.zeros((batch_size,), jnp.int32),
        jnp.asarray(angles.fixed(max_length, 1), jnp.int32),
    )


def cosformer_prefill(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    max_length: int | None = None,
    state: CosformerState | None = None,
    denominator: str = "clamp",
    eps: float = 1e-6,
    chunking: causal.Chunking | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, CosformerState]:
    """Takes a whole prompt, or a further part of one, in one pass.

    Args:
      query: `[B, T, N, H]`; key, value, mask and options as in `cosformer_attention`.
        The next token stands behind each sample's last real position.
      max_length: M, for all that the stream will hold; give it or a state, which has
        its own.
      state: what came before; None = nothing.

    Returns:
      The causal attention `[B, T, N, Hv]` and the state after the last real position.

    Raises:
      ValueError: shapes, dtypes, the mask or the state do not fit, or the prompt
        reaches beyond M. Under ``jax.jit`` a state's position is not known and cannot
        raise: positions from M on then count as the position M - 1.
    """
    inputs.check_inputs(query, key, value, True)
    _check_options(denominator)
    batch, length = query.shape[:2]
    mask = inputs.padding_mask(mask, batch, length)
    position = inputs.next_position(mask, batch, length)
    if state is None:
        dtype = inputs.accumulation_dtype(query, key, value)
        longest = angles.fixed(max_length, length)
        tables = angles.tables(length, longest, dtype)
        limit, turn = jnp.asarray(longest, jnp.int32), angles.turn(longest)
    elif max_length is not None:
        raise ValueError(f"max_length: expected None with a state, got {max_length}")
    else:
        dtype, limit, turn = state.sums.total.dtype, state.max_length, None
        tables = angles.stream_tables(state.position, length, limit, dtype)
        position = position + state.position
    out, sums = causal.attend(
        *(query, key, value, mask),
        "relu",
        causal.Divided(denominator, eps),
        angles=_by_position(tables),
        turn=turn,
        start=None if state is None else state.sums,
        chunking=chunking,
        precision=precision,
    )
    return out, CosformerState(sums, position, limit)


def cosformer_step(
    state: CosformerState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    denominator: str = "clamp",
    eps: float = 1e-6,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, CosformerState]:
    """Takes one position of each sample; arrays `[B, N, H]` -> `[B, N, Hv]`.

    Options and errors are those of `cosformer_prefill`: a step beyond M raises outside
    ``jax.jit``, and counts as the position M - 1 inside.
    """
    arrays = inputs.one_position(query, key, value)
    options = {"denominator": denominator, "eps": eps, "precision": precision}
    out, state = cosformer_prefill(*arrays, state=state, **options)
    return out[:, 0], state


def _check_options(denominator: str) -> None:
    if denominator not in ("clamp", "add"):
        raise ValueError(f"denominator: expected 'clamp' or 'add', got {denominator!r}")


def _features(
    query: jax.Array,
    key: jax.Array,
    rows: jax.Array | None,
    mask: jax.Array | None,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    """The ReLU of the visible queries and keys, `[B, N, T, H]`."""
    num_heads = query.shape[2]
    # ReLU(0) is zero, and its gradient there too: what is hidden stays hidden.
    return (
        jax.nn.relu(inputs.by_head(query, num_heads, rows, dtype)),
        jax.nn.relu(inputs.by_head(key, num_heads, mask, dtype)),
    )


def _rotated(
    features: tuple[jax.Array, jax.Array], lengths: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Twice `[B, N, T, H]` -> twice `[B, N, T, 2H]`."""
    query, key = (
        feature_maps.rotated(x, *angles.tables(x.shape[2], lengths, x.dtype))
        for x in features
    )
    return query, key


def _by_position(tables: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Twice `[1 or B, 1, T]` -> twice `[1 or B, T]`."""
    cos, sin = (x[:, 0] for x in tables)
    return cos, sin
