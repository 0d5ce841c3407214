"""FNet (Lee-Thorp et al. 2022, "FNet: Mixing Tokens with Fourier Transforms").

``out = Re(F_T x F_D)`` with the discrete Fourier transforms F_T over positions and F_D
over all columns of all heads: tokens are mixed without attention or parameters.

Cost: O(T D (log T + log D)) time, O(T D) memory.

A Fourier transform depends on the length: padding with zeros changes every number. So a
padded sample is transformed at its own length L, by Bluestein's algorithm: since
``2 j k = j^2 + k^2 - (k - j)^2``, the transform is a convolution with
``exp(i pi m^2 / L)`` between two products with such factors, and a convolution may be
padded arbitrarily. Padding on the right is exact, up to rounding.

Deviations: the transform is scaled to be orthogonal (``norm="ortho"``), because this
library's blocks add it to their input without another normalisation; the paper's scale
is ``norm="backward"``. There is no causal form, since every row mixes all positions,
and no cross attention, since there are no queries.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from lra_jax import kernels
from lra_jax.attention import inputs, masking
from lra_jax.attention.in_turn import documents_in_turn
from lra_jax.errors import expected, known

__all__ = ["fnet_attention", "fnet_weights"]


@documents_in_turn
def fnet_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    *,
    segment_ids: jax.Array | None = None,
    norm: str = "ortho",
    precision: jax.lax.PrecisionLike = None,
    **flax: Any,
) -> jax.Array:
    """Computes the real part of the Fourier transform over positions and columns.

    Args:
      query: `[B, T, N, H]`; not read.
      key: `[B, T, N, H]`; not read.
      value: x, `[B, T, N, Hv]`; its heads may be a divisor of N, and are repeated.
      mask: boolean, True = a real position: `[B, T]`, or anything that broadcasts to
        `[B, 1, 1, T]`. A sample ends at its last real position; hidden positions before
        it count as zeros.
      is_causal: must be False; there is no causal form.
      segment_ids: as in `linear_attention`, but documents are computed one by one.
      norm: "ortho" divides by sqrt(T D), "backward" by nothing, as in ``jnp.fft``.
      precision: not used: there are no matrix products.
      **flax: as in `linear_attention`.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; zero at the padding.

    Raises:
      ValueError: shapes, dtypes or the mask do not fit, the norm is unknown, query and
        key differ in length, `is_causal` is True, or T is above 2^20 with a mask.
    """
    inputs.check_inputs(query, key, value)
    inputs.check_self(query, key, "fnet")
    known("norm", norm, ("ortho", "backward"))
    batch, length, num_heads, _width = query.shape
    mask = masking.padding_mask(mask, batch, length)
    if mask is not None and length > _LONGEST:
        needed = f"None for more than {_LONGEST} positions, where angles overflow"
        raise expected("mask", needed, f"an array for T={length}")
    dtype = inputs.accumulation_dtype(value)
    x = inputs.match_heads(masking.hide(value, mask).astype(dtype), num_heads)
    arrays: list[jax.Array] = [x.reshape(batch, length, -1)]
    if mask is not None:
        arrays.append(masking.next_position(mask, batch, length))
    transform = functools.partial(_transform, norm)
    # The compiler would have each device transform the samples of all.
    out = kernels.by_sample(transform, *arrays)
    return out.reshape(x.shape).astype(query.dtype)


def fnet_weights(
    query: jax.Array,
    key: jax.Array,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    **flax: Any,
) -> jax.Array:
    """Raises ``ValueError``: FNet has no such matrix.

    An output is not a weighted sum of values in its column: columns are mixed too.
    """
    inputs.check_keywords(fnet_weights, flax)
    needed = "a mechanism whose output is a weighted sum of values"
    got = "'fnet', which mixes the columns of all heads as well as the positions"
    raise expected("attention", needed, got)


def _transform(norm: str, x: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """The real part of the transform of columns and rows, `[B, T, D]`."""
    x = jnp.fft.fft(x, axis=2, norm=norm)
    if lengths is not None:
        return _padded_fft(x, lengths, norm)
    return jnp.fft.fft(x, axis=1, norm=norm).real


# Up to here no product overflows in `_chirp`.
_LONGEST = 2**20


def _padded_fft(x: jax.Array, lengths: jax.Array, norm: str) -> jax.Array:
    """The real part of the transform of each sample's first L rows; zero after them.

    Args:
      x: complex `[B, T, D]`, zero from row L on.
      lengths: L, `[B]` int32.
      norm: as in ``jnp.fft``.
    """
    rows = x.shape[1]
    lengths = jnp.maximum(lengths, 1)[:, None]
    chirp = _chirp(rows, lengths, x.dtype)
    # The factor of each distance -T < k - j < T, on a circle of 2 T places.
    around = jnp.concatenate([chirp, jnp.zeros_like(chirp[:, :1]), chirp[:, :0:-1]], 1)
    spectrum = jnp.fft.fft(jnp.conj(around), axis=1)[..., None]
    spectrum = spectrum * jnp.fft.fft(x * chirp[..., None], n=2 * rows, axis=1)
    out = (jnp.fft.ifft(spectrum, axis=1)[:, :rows] * chirp[..., None]).real
    if norm == "ortho":
        out = out / jnp.sqrt(lengths.astype(out.dtype))[..., None]
    real = jnp.arange(rows, dtype=lengths.dtype)[None] < lengths
    return jnp.where(real[..., None], out, 0)


def _chirp(rows: int, lengths: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """``exp(-i pi j^2 / L)``, `[B, T]`, with exact angles for T up to `_LONGEST`."""
    row = jnp.arange(rows, dtype=jnp.uint32)[None]
    period = 2 * lengths.astype(jnp.uint32)
    # j^2 modulo 2 L, in two steps that stay below 2^32.
    row = row % period
    high, low = row >> 10, row & 1023
    square = ((row * high % period) * 1024 + row * low) % period
    real = jnp.finfo(dtype).dtype
    angle = square.astype(real) * (jnp.pi / lengths.astype(real))
    return jax.lax.complex(jnp.cos(angle), -jnp.sin(angle))
