"""Compressing keys and values along their length, from S positions to K slots.

Linformer's projections: a learned matrix, a convolution whose kernel is its stride, and
mean or max pooling. Inputs are `[B, S, N, H]` with their padding already zero, results
`[B, K, N, H]`.
"""

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs

PROJECTIONS = ("linear", "convolution", "mean", "max")


def project(
    name: str,
    x: jax.Array,
    matrix: jax.Array,
    bias: jax.Array | None,
    num_heads: int,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """``E x``, with E `[K, L]` or `[N, K, L]`, of which the first S columns are used.

    Args:
      name: "key" or "value", for the error messages.
      x: `[B, S, N, H]`.
      matrix: E.
      bias: `[K]` or `[N, K]`, one number a slot; or None.
      num_heads: N.
      precision: of the product.

    Raises:
      ValueError: the shapes do not fit, or S > L.
    """
    length = x.shape[1]
    shape = jnp.shape(matrix)
    if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] != num_heads):
        raise ValueError(
            f"{name}_projection: expected [K, L] or [N, K, L] with N={num_heads}, "
            f"got shape {shape}"
        )
    if shape[-1] < length:
        raise ValueError(
            f"{name}_projection: expected at least S={length} columns, one for each "
            f"position of {name}, got shape {shape}: the input is longer than the "
            "length that the projection was made for"
        )
    biases = (shape[-2],), (num_heads, shape[-2])
    if bias is not None and jnp.shape(bias) not in biases:
        raise ValueError(
            f"{name}_bias: expected [K]={biases[0]} or [N, K]={biases[1]}, "
            f"got shape {jnp.shape(bias)}"
        )
    per_head = len(shape) == 3 or (bias is not None and jnp.ndim(bias) == 2)
    x = inputs.match_heads(x, num_heads) if per_head else x
    matrix = matrix[..., :length].astype(x.dtype)
    terms = "nks,bsnh->bknh" if len(shape) == 3 else "ks,bsnh->bknh"
    slots = jnp.einsum(terms, matrix, x, precision=precision)
    if bias is None:
        return slots
    columns = bias[:, None] if jnp.ndim(bias) == 1 else bias.T
    return slots + columns[None, :, :, None].astype(x.dtype)


def convolve(
    name: str,
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    precision: jax.lax.PrecisionLike = None,
) -> jax.Array:
    """Convolution along the length with stride W, the kernel `[W, H, H]`'s own width.

    Raises:
      ValueError: the kernel or the bias `[H]` does not fit.
    """
    shape, width = jnp.shape(kernel), x.shape[-1]
    if len(shape) != 3 or shape[1:] != (width, width) or shape[0] == 0:
        raise ValueError(
            f"{name}_projection: expected a convolution kernel [W, H, H] with "
            f"H={width} as in {name}, got shape {shape}"
        )
    if bias is not None and jnp.shape(bias) != (width,):
        raise ValueError(
            f"{name}_bias: expected [H]={(width,)} for a convolution, "
            f"got shape {jnp.shape(bias)}"
        )
    slots = jnp.einsum(
        "bcwnh,whd->bcnd",
        _windows(x, shape[0]),
        kernel.astype(x.dtype),
        precision=precision,
    )
    if bias is None:
        return slots
    return slots + bias[None, None, None].astype(x.dtype)


def pool(
    x: jax.Array, mask: jax.Array | None, window: int, projection: str
) -> jax.Array:
    """Mean or maximum of the real positions of each window; zero without any."""
    if mask is None:
        mask = jnp.ones(x.shape[:2], bool)
    visible = _windows(mask, window)[..., None, None]
    x = _windows(x, window)
    if projection == "mean":
        counts = jnp.maximum(visible.sum(2), 1).astype(x.dtype)
        return x.sum(2) / counts
    lowest = jnp.asarray(jnp.finfo(x.dtype).min, x.dtype)
    largest = jnp.where(visible, x, lowest).max(2)
    return jnp.where(visible.any(2), largest, jnp.zeros((), x.dtype))


def live(mask: jax.Array | None, window: int) -> jax.Array | None:
    """`[B, 1, 1, K]`: which windows hold a real position; None where all do."""
    return None if mask is None else _windows(mask, window).any(2)[:, None, None]


def _windows(x: jax.Array, window: int) -> jax.Array:
    """`[B, S, ...]` -> `[B, ceil(S / window), window, ...]`, the tail zero-padded."""
    missing = -x.shape[1] % window
    x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], -1, window, *x.shape[2:])
