"""Linformer (Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity").

``out = softmax(q (E k)^T / sqrt(H)) (F v)`` with learned E and F of K rows, one column
a position: keys and values are compressed along the length from S to K slots.

Cost: O(S K (H + Hv)) to compress and O(T K (H + Hv)) to attend.

Shorter inputs use the first S columns of E and F, which equals padding keys and values
with zeros. Padded positions are zeroed before they are compressed, so padding is exact.

There is no causal form: every slot mixes all positions, so a query would see the future
through any of them. The masks over slots that are found in public code leak.

The paper's other projections, mean and max pooling and convolution with kernel =
stride = W, make ceil(S / W) slots. Deviation: pooling runs over the real positions of a
window, and a window without any is left out of the softmax, so that padding is exact
here too.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax.attention import feature_maps, inputs
from lra_jax.attention.low_rank import compression
from lra_jax.attention.registry import Mechanism

__all__ = ["linformer_attention", "linformer_parameters", "linformer_weights"]

MECHANISM = Mechanism(
    name="linformer",
    causal=False,
    cross=True,
    stream=False,
    cost="2 (T + S) K H",
    summary="softmax over K learned mixtures of the positions",
    source="Wang et al. 2020",
    parameters="linformer_parameters",
)

SHARING = ("headwise", "key_value", "layerwise", "none")


def linformer_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_projection: jax.Array | None = None,
    value_projection: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    key_bias: jax.Array | None = None,
    value_bias: jax.Array | None = None,
    projection: str = "linear",
    window: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Computes softmax attention over K compressed keys and values.

    Args:
      query: `[B, T, N, H]`.
      key: `[B, S, N, H]`; its heads may be a divisor of N.
      value: `[B, S, N, Hv]`.
      key_projection: E. For "linear" `[K, L]`, or `[N, K, L]` with one per head, where
        L >= S is the longest input; for "convolution" `[W, H, H]`: position in the
        window, input channel, output channel. Not given for "mean" and "max".
      value_projection: F, likewise (`[W, Hv, Hv]` for "convolution"); None = E, the
        paper's key-value sharing.
      mask: boolean, True = a real position: `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`.
      is_causal: must be False; there is no causal form.
      key_bias: added to the compressed keys: `[K]` or `[N, K]`, one number a slot, for
        "linear" (not in the paper; some public code has it); `[H]` for "convolution".
      value_bias: added to the compressed values, likewise.
      projection: "linear", "convolution", "mean" or "max".
      window: W, positions a slot; for "mean" and "max" only.
      precision: of the matrix products, as in ``jnp.einsum``.
      **_: further keywords that Flax passes to an ``attention_fn``; ignored.

    Returns:
      `[B, T, N, Hv]` in the query's dtype. Without a bias, a sample without any real
      position gives zeros.

    Raises:
      ValueError: shapes, dtypes, the mask or the projections do not fit, the input is
        longer than the projection, or `is_causal` is True.
    """
    inputs.check_inputs(query, key, value)
    _refuse_causal(is_causal)
    if value_projection is None:
        value_projection = key_projection
    window = _window(projection, window, key_projection, value_projection)
    _check_biases(projection, key_bias, value_bias)
    mask = inputs.padding_mask(mask, query.shape[0], key.shape[1])
    dtype = inputs.accumulation_dtype(query, key, value)

    def compress(name: str, x: jax.Array, matrix: Any, bias: Any) -> jax.Array:
        x = inputs.hide(x, mask).astype(dtype)
        num_heads = query.shape[2]
        if projection == "linear":
            slots = compression.project(name, x, matrix, bias, num_heads, precision)
        elif projection == "convolution":
            slots = compression.convolve(name, x, matrix, bias, precision)
        else:
            slots = compression.pool(x, mask, window, projection)
        return inputs.match_heads(slots, num_heads)

    keys = compress("key", key, key_projection, key_bias)
    values = compress("value", value, value_projection, value_bias)
    live = None if projection == "linear" else compression.live(mask, window)
    logits = jnp.einsum(
        "btnh,bknh->bntk", query.astype(dtype), keys, precision=precision
    )
    logits = logits / math.sqrt(query.shape[-1])
    weights = feature_maps.masked_softmax(logits, live, axis=-1)
    out = jnp.einsum("bntk,bknv->btnv", weights, values, precision=precision)
    return out.astype(query.dtype)


def linformer_weights(
    query: jax.Array,
    key: jax.Array,
    key_projection: jax.Array | None = None,
    value_projection: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    key_bias: jax.Array | None = None,
    projection: str = "linear",
    window: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    **_: Any,
) -> jax.Array:
    """Returns ``softmax(q (E k)^T / sqrt(H)) F``, `[B, N, T, S]`.

    With it ``out = weights @ value`` where there is no value bias. float32 or wider;
    entries may be negative and rows need not sum to one. Arguments and errors are those
    of `linformer_attention`; "convolution" and "max" have no such matrix and raise.
    """
    if projection in ("convolution", "max"):
        raise ValueError(
            "projection: expected 'linear' or 'mean', whose values are weighted sums "
            f"over positions, got {projection!r}"
        )
    inputs.check_inputs(query, key)
    # The output is linear in the values: on unit vectors it is the matrix itself.
    units = inputs.unit_values(query, key)
    rows = linformer_attention(
        query.astype(units.dtype),
        key,
        units,
        key_projection,
        value_projection,
        mask,
        is_causal,
        key_bias=key_bias,
        projection=projection,
        window=window,
        precision=precision,
    )
    return jnp.swapaxes(rows, 1, 2)


def linformer_parameters(
    rng_key: jax.Array,
    *,
    max_length: int,
    num_heads: int,
    head_dim: int,
    features: int = 256,
    sharing: str = "headwise",
    projection: str = "linear",
    dtype: Any = jnp.float32,
    **_: Any,
) -> dict[str, jax.Array]:
    """Makes the arrays that `linformer_attention` takes as keywords.

    Args:
      rng_key: a key of ``jax.random``.
      max_length: L, the longest input.
      num_heads: N.
      head_dim: H, of keys and values alike.
      features: K; min(K, L) is used: more slots than positions compress nothing.
      sharing: "headwise", one E and one F for all heads; "key_value", one E for keys
        and values of all heads; "layerwise", the same for the layers of a whole model,
        each of which gets this dict (`TransformerEncoder` does so); "none", E and F
        per head.
      projection: "linear"; "convolution" (all heads share, W = ceil(L / K)); "mean" and
        "max" have no parameters.
      dtype: of the arrays.
      **_: further keywords, so that every mechanism can be called alike; ignored.

    Returns:
      `key_projection`, and `value_projection` unless "key_value". Entries are uniform
      in +-1/sqrt(K), as in lucidrains/linformer (the paper's theorem draws them from
      N(0, 1/K)); those of a convolution in +-1/sqrt(W H), torch's default.

    Raises:
      ValueError: a size is not positive, or an option is unknown.
    """
    _check_sizes(
        max_length=max_length,
        num_heads=num_heads,
        head_dim=head_dim,
        features=features,
    )
    _check_choice("sharing", sharing, SHARING)
    _check_choice("projection", projection, compression.PROJECTIONS)
    if projection in ("mean", "max"):
        return {}
    slots = min(features, max_length)
    if projection == "convolution":
        window = -(-max_length // slots)
        shape, bound = (window, head_dim, head_dim), (window * head_dim) ** -0.5
    else:
        shape, bound = (slots, max_length), slots**-0.5
        shape = (num_heads, *shape) if sharing == "none" else shape
    names = ["key_projection", "value_projection"]
    names = names[:1] if sharing in ("key_value", "layerwise") else names
    return {
        name: jax.random.uniform(key, shape, dtype, -bound, bound)
        for name, key in zip(names, jax.random.split(rng_key, len(names)), strict=True)
    }


def _refuse_causal(is_causal: bool) -> None:
    if is_causal:
        raise ValueError(
            "is_causal: expected False, got True: Linformer has no causal form, "
            "because each compressed key and value mixes all positions, future ones too"
        )


def _window(projection: str, window: Any, key_projection: Any, value_projection: Any):
    """Checks which arguments go together; returns W (1 where nothing is windowed)."""
    _check_choice("projection", projection, compression.PROJECTIONS)
    pooled = projection in ("mean", "max")
    if pooled:
        if key_projection is not None or value_projection is not None:
            raise ValueError(
                f"key_projection: expected None, got an array: {projection!r} pooling "
                "has no parameters"
            )
        if not isinstance(window, int) or window < 1:
            raise ValueError(
                f"window: expected a positive int for {projection!r} pooling, "
                f"got {window!r}"
            )
        return window
    if window is not None:
        raise ValueError(
            f"window: expected None, since projection={projection!r} has its own "
            f"sizes, got {window!r}"
        )
    if key_projection is None:
        raise ValueError(
            f"key_projection: expected an array for projection={projection!r}, got "
            "None; linformer_parameters makes one"
        )
    axis = 0 if projection == "convolution" else -2
    if min(jnp.ndim(key_projection), jnp.ndim(value_projection)) < 2:
        return 1  # the wrong rank is reported where the shapes are known
    slots = jnp.shape(key_projection)[axis], jnp.shape(value_projection)[axis]
    if slots[0] != slots[1]:
        raise ValueError(
            f"value_projection: expected {slots[0]} "
            f"{'positions a window' if axis == 0 else 'slots'} as in key_projection, "
            f"got shape {jnp.shape(value_projection)}"
        )
    return slots[0] if projection == "convolution" else 1


def _check_biases(projection: str, *biases: jax.Array | None) -> None:
    if projection in ("mean", "max") and any(bias is not None for bias in biases):
        raise ValueError(
            f"key_bias, value_bias: expected None for {projection!r} pooling, "
            "got an array"
        )


def _check_choice(name: str, given: str, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise ValueError(f"{name}: expected one of {choices}, got {given!r}")


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: expected a positive int, got {size!r}")
