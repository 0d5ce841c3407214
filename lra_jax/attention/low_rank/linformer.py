"""Linformer (Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity").

``out = softmax(q (E k)^T / sqrt(H)) (F v)`` with learned E and F of K rows and one
column per position: keys and values are compressed along the length from S to K slots.

Cost: O(S K (H + Hv)) to compress and O(T K (H + Hv)) to attend.

Shorter inputs use the first S columns of E and F, which is equivalent to padding keys
and values with zeros. Padded positions are zeroed before compression, so padding is
exact.

There is no causal form: every slot mixes all positions, so a query would see the future
through any of them. The masks over slots in some public code leak the future.

The paper's other projections, mean and max pooling and convolution with kernel =
stride = W, give ceil(S / W) slots. Deviation: pooling covers the real positions of a
window, and windows without any are left out of the softmax, so padding is exact. Public
code (tatp22/linformer-pytorch) counts hidden positions as zeros and leaves out an
incomplete last window; to reproduce this, pass zeros there instead of a mask, and keys
and values cut to a multiple of W.

The authors' code (facebookresearch/fairseq) compresses a layer's input before it is
projected to keys and values, so that their biases are added afterwards. To reproduce
this, project without them, and add the value's bias to the output: the K weights of a
query sum to one, and the key's bias cancels in the softmax.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import dense, feature_maps, inputs, masking
from lra_jax.attention.call import Call
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.errors import expected, known

__all__ = ["linformer_attention", "linformer_parameters", "linformer_weights"]


SHARING = ("headwise", "key_value", "layerwise", "none")
PROJECTIONS = ("linear", "convolution", "mean", "max")

# Slots, unless others are asked for.
_FEATURES = 256


@documents_in_turn
def linformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_projection: jax.Array | None = None,
    value_projection: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    key_bias: jax.Array | None = None,
    value_bias: jax.Array | None = None,
    projection: str = "linear",
    window: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    deterministic: bool | None = None,
    **flax: Any,
) -> jax.Array:
    """Computes softmax attention over K compressed keys and values.

    Columns of E and F belong to positions counted from 0, so with "linear" padding is
    exact on the right. (`lra_jax.models.TransformerEncoder` moves other padding there.)

    Args:
      query, key, value: as in `linear_attention`.
      key_projection: E. For "linear" `[K, L]`, or `[N, K, L]` with one per head, where
        L >= S is the longest input; for "convolution" `[W, H, H]`: position in the
        window, input channel, output channel. None for "mean" and "max".
      value_projection: F, as E (`[W, Hv, Hv]` for "convolution"); None = E, the
        paper's key-value sharing.
      mask: as in `linear_attention`.
      is_causal: must be False; there is no causal form.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      key_bias: added to the compressed keys: `[K]` or `[N, K]`, one number per slot,
        for "linear" (not in the paper, but in some public code); `[H]` for
        "convolution".
      value_bias: added to the compressed values, of the same shapes.
      projection: "linear", "convolution", "mean" or "max".
      window: W, positions per slot; for "mean" and "max" only.
      deterministic: from Flax's layers; with it, ``decode=True`` is refused.
      precision, **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype. Without a bias, a sample with no real
      positions gives zeros.

    Raises:
      ValueError: shapes, dtypes, the mask or the projections do not fit, the input is
        longer than the projection, or `is_causal` is True.

    Examples:
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> arrays = linformer_parameters(
      ...     jax.random.key(1), max_length=64, num_heads=4, head_dim=16, features=8
      ... )
      >>> {name: array.shape for name, array in arrays.items()}
      {'key_projection': (8, 64), 'value_projection': (8, 64)}
      >>> linformer_attention(query, key, value, **arrays).shape
      (2, 64, 4, 16)
    """
    call = Call.of(query, key, value, mask, precision=precision)
    inputs.refuse_decoding(deterministic, query, key, "linformer")
    if value_projection is None:
        value_projection = key_projection
    size = _check_window(projection, window, key_projection, value_projection)
    keys, values = (
        masking.hide(x, call.mask).astype(call.dtype) for x in (call.key, call.value)
    )
    if projection in ("mean", "max"):
        keys, values = (_pool(x, call.mask, size, projection) for x in (keys, values))
    else:
        compress = _project if projection == "linear" else _convolve
        keys = compress(call, "key", keys, key_projection, key_bias)
        values = compress(call, "value", values, value_projection, value_bias)
    live = None
    if call.mask is not None and projection != "linear":
        live = _windows(call.mask, size).any(2)[:, None, None]
    return _attend(call, keys, values, live)


def _refuse_no_sums(projection: str = "linear", **_: Any) -> None:
    if projection in ("convolution", "max"):
        needed = "'linear' or 'mean', whose values are weighted sums over positions"
        raise expected("projection", needed, f"{projection!r}")


linformer_weights = dense.weights_of(
    linformer_attention,
    "Entries may be negative, and rows need not sum to one. A value bias is left out; "
    "'convolution' and 'max' have no such matrix and raise.",
    without=("value_bias",),
    check=_refuse_no_sums,
)


def linformer_parameters(
    rng_key: jax.Array,
    *,
    max_length: int,
    num_heads: int,
    head_dim: int,
    features: int | None = None,
    sharing: str = SHARING[0],
    projection: str = "linear",
    dtype: Any = jnp.float32,
    **sizes: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `linformer_attention` takes as keywords.

    Args:
      rng_key: a key of ``jax.random``.
      max_length: L, the longest input.
      num_heads: N.
      head_dim: H, of keys and values alike.
      features: K, None = 256; min(K, L) is used: more slots than positions compress
        nothing.
      sharing: "headwise", one E and one F for all heads; "key_value", one E for keys
        and values of all heads; "layerwise", the same E for all layers of a model, each
        of which is passed this dict (as in `TransformerEncoder`); "none", E and F per
        head.
      projection: "linear"; "convolution" (shared by all heads, W = ceil(L / K)); "mean"
        and "max", which have no parameters.
      dtype: of the arrays.
      **sizes: a layer's other sizes, so that every mechanism can be called alike.

    Returns:
      `key_projection`, and `value_projection` unless "key_value" or "layerwise".
      Entries are uniform in +-1/sqrt(K), as in lucidrains/linformer (the paper's
      theorem draws them from N(0, 1/K)); those of a convolution in +-1/sqrt(W H),
      torch's default.

    Raises:
      ValueError: a size is not positive, or an option is unknown.
    """
    inputs.check_sizes(linformer_parameters, sizes)
    length = inputs.check_size("max_length", max_length)
    heads = inputs.check_size("num_heads", num_heads)
    width = inputs.check_size("head_dim", head_dim)
    size = inputs.check_size("features", _FEATURES if features is None else features)
    slots = min(size, length)
    known("sharing", sharing, SHARING)
    known("projection", projection, PROJECTIONS)
    if projection in ("mean", "max"):
        return {}
    if projection == "convolution":
        window = -(-length // slots)
        shape, bound = (window, width, width), (window * width) ** -0.5
    else:
        shape = (heads, slots, length) if sharing == "none" else (slots, length)
        bound = slots**-0.5
    names = ["key_projection", "value_projection"]
    names = names[:1] if sharing in ("key_value", "layerwise") else names
    return {
        name: jax.random.uniform(key, shape, dtype, -bound, bound)
        for name, key in zip(names, jax.random.split(rng_key, len(names)), strict=True)
    }


def _check_window(projection: str, window: int | None, key: Any, value: Any) -> int:
    """Checks the projections; returns W, or 1 if there are no windows."""
    known("projection", projection, PROJECTIONS)
    if projection in ("mean", "max"):
        return inputs.check_size("window", window)
    if key is None:
        needed = f"an array for projection={projection!r}"
        raise expected("key_projection", needed, "None; linformer_parameters makes one")
    inputs.check_float("key_projection", key)
    inputs.check_float("value_projection", value)
    if min(key.ndim, value.ndim) < 2:
        return 1  # a wrong rank is reported where the shapes are known
    axis, of = (-2, "slots") if projection == "linear" else (0, "positions a window")
    if key.shape[axis] != value.shape[axis]:
        needed = f"{key.shape[axis]} {of} as in key_projection"
        raise expected("value_projection", needed, value.shape)
    return 1 if projection == "linear" else len(key)


def _attend(
    call: Call, keys: jax.Array, values: jax.Array, live: jax.Array | None
) -> jax.Array:
    """Softmax attention over those of K slots that are live, in the slots' dtype."""
    query, precision = call.query, call.precision
    keys, values = (inputs.match_heads(x, query.shape[2]) for x in (keys, values))
    logits = jnp.einsum(
        "btnh,bknh->bntk", query.astype(keys.dtype), keys, precision=precision
    )
    logits = logits / math.sqrt(query.shape[-1])
    weights = feature_maps.masked_softmax(logits, live)
    out = jnp.einsum("bntk,bknv->btnv", weights, values, precision=precision)
    return call.finish(out)


def _project(
    call: Call, name: str, x: jax.Array, matrix: Any, bias: jax.Array | None
) -> jax.Array:
    """``E x`` for x `[B, S, N, H]`: `[B, K, N, H]`, by the first S columns of E."""
    length, shape, num_heads = x.shape[1], matrix.shape, call.query.shape[2]
    if len(shape) not in (2, 3) or shape[:-2] not in ((), (num_heads,)):
        needed = f"[K, L] or [N, K, L] with N={num_heads}"
        raise expected(f"{name}_projection", needed, shape)
    if shape[-1] < length:
        raise expected(
            f"{name}_projection",
            f"at least S={length} columns, one for each position of {name}",
            f"{shape}: the input is longer than the projection was made for",
        )
    slots, heads = shape[-2], shape[:-2]
    if bias is not None:
        inputs.check_float(f"{name}_bias", bias)
        if np.shape(bias) not in ((slots,), (num_heads, slots)):
            needed = f"[K]={(slots,)} or [N, K]={(num_heads, slots)}"
            raise expected(f"{name}_bias", needed, np.shape(bias))
        heads = heads or np.shape(bias)[:-1]
    x = inputs.match_heads(x, num_heads) if heads else x
    terms = "nks,bsnh->bknh" if len(shape) == 3 else "ks,bsnh->bknh"
    matrix = matrix[..., :length].astype(x.dtype)
    out = jnp.einsum(terms, matrix, x, precision=call.precision)
    if bias is None:
        return out
    columns = bias[:, None] if bias.ndim == 1 else bias.T
    return out + columns[None, :, :, None].astype(x.dtype)


def _convolve(
    call: Call, name: str, x: jax.Array, kernel: Any, bias: jax.Array | None
) -> jax.Array:
    """Convolution along the length with stride W, the width of its kernel."""
    width, shape = x.shape[-1], kernel.shape
    if len(shape) != 3 or shape[1:] != (width, width) or shape[0] == 0:
        needed = f"a convolution kernel [W, H, H] with H={width} as in {name}"
        raise expected(f"{name}_projection", needed, shape)
    windows, kernel = _windows(x, shape[0]), kernel.astype(x.dtype)
    terms = "bcwnh,whd->bcnd"
    out = jnp.einsum(terms, windows, kernel, precision=call.precision)
    if bias is None:
        return out
    inputs.check_array(f"{name}_bias", bias, "H", width)
    return out + bias[None, None, None].astype(x.dtype)


def _pool(
    x: jax.Array, mask: jax.Array | None, window: int, projection: str
) -> jax.Array:
    """Mean or maximum of the real positions of each window; zero if there are none."""
    if mask is None:
        mask = jnp.ones(x.shape[:2], bool)
    visible = _windows(mask, window)[..., None, None]
    x = _windows(x, window)
    if projection == "mean":
        counts = jnp.maximum(visible.sum(2), 1).astype(x.dtype)
        return x.sum(2) / counts
    largest = jnp.where(visible, x, jnp.finfo(x.dtype).min).max(2)
    return jnp.where(visible.any(2), largest, 0)


def _windows(x: jax.Array, window: int) -> jax.Array:
    """`[B, S, ...]` -> `[B, ceil(S / window), window, ...]`, the tail zero-padded."""
    missing = -x.shape[1] % window
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, window, *x.shape[2:])
