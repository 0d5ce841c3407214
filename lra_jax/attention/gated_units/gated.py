"""Parts that the gated attention unit and FLASH share.

Both derive queries and keys from one projection z of the input, by a scale and an
offset for each column, and weight the values by an activation of the scores, without
normalising over the keys.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs, masking
from lra_jax.attention.call import Call
from lra_jax.attention.linear import rotary
from lra_jax.errors import expected, known

BUCKETS = 32
_FARTHEST = 128


def layout(
    in_features: int, *, query_dim: int = 128, expansion: float = 2
) -> tuple[int, int, int]:
    """One head, the paper's width of its queries and keys, and that of its values.

    Args:
      in_features: D, the width of the layer's input.
      query_dim: width of z.
      expansion: v and g have expansion * D columns.

    Raises:
      ValueError: a width is not a positive int.
    """
    inputs.check_number("expansion", expansion)
    width = expansion * in_features
    if width != int(width):
        needed = f"a number whose product with the width {in_features} is an int"
        raise expected("expansion", needed, f"{expansion!r}")
    return 1, inputs.check_size("query_dim", query_dim), int(width)


def parameters(
    rng_key: jax.Array, count: int, num_heads: int, head_dim: int, dtype: Any
) -> dict[str, jax.Array]:
    """Scales and offsets `[count, N, H]`, and the table of biases `[32, N]`.

    Scales and table are normal with standard deviation 0.02, and offsets are zero, as
    in the paper.

    Raises:
      ValueError: a size is not a positive int.
    """
    keys = jax.random.split(rng_key)
    heads = inputs.check_size("num_heads", num_heads)
    shape = (count, heads, inputs.check_size("head_dim", head_dim))
    table = (BUCKETS, heads)
    return {
        "scale": 0.02 * jax.random.normal(keys[0], shape, dtype),
        "offset": jnp.zeros(shape, dtype),
        "relative_bias": 0.02 * jax.random.normal(keys[1], table, dtype),
    }


def _squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _laplace(x: jax.Array) -> jax.Array:
    mean, deviation = math.sqrt(0.5), math.sqrt(0.25 / math.pi)
    return 0.5 * (1 + jax.lax.erf((x - mean) / (deviation * math.sqrt(2))))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu2": _squared_relu,
    "laplace": _laplace,
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """``relu(x)^2``, or the CDF of a normal distribution (Ma et al. 2022, "Mega").

    Raises:
      ValueError: an unknown name.
    """
    return ACTIVATIONS[known("activation", name, ACTIVATIONS)]


def apply_gate(call: Call, out: jax.Array, gate: jax.Array | None) -> jax.Array:
    """``gate * out``, `[B, T, N, Hv]`; rows with a broken gate or query are NaN."""
    if gate is not None:
        inputs.check_array("gate", gate, "B T N Hv", *out.shape)
        gate, finite = masking.hide_broken(gate, call.finite)
        out = masking.broken_again(out * gate.astype(out.dtype), finite)
    return call.finish(out)


def shared_heads(
    call: Call,
    z: jax.Array,
    count: int,
    *,
    scale: jax.Array | None,
    offset: jax.Array | None,
    rotate: bool,
) -> list[jax.Array]:
    """``scale * z + offset``, queries first, then as many keys; optionally rotated.

    Args:
      call: the arguments; its query is z without broken rows.
      z: `[B, T, N, H]`.
      count: number of queries and keys together.
      scale, offset: `[count, N, H]`, or None.
      rotate: rotate by position.

    Returns:
      Arrays `[B, N, T, H]`; hidden positions of keys are zero.
    """
    inputs.check_flag("rotate", rotate)
    _, length, num_heads, width = z.shape
    for name, columns in (("scale", scale), ("offset", offset)):
        if columns is not None:
            sizes = count, num_heads, width
            inputs.check_array(name, columns, f"{count} N H", *sizes)
    dtype, mask = call.dtype, call.mask
    sources = [
        masking.by_head(call.query, num_heads, dtype=dtype),
        masking.by_head(z, num_heads, mask, dtype),
    ]
    angles = None
    if rotate:
        rotary.check_width(width)
        cos, sin = rotary.tables(length, width, dtype)
        angles = cos[None, None, :length], sin[None, None, :length]
    heads = []
    for index in range(count):
        x = sources[2 * index // count]
        if scale is not None:
            x = x * scale.astype(dtype)[index, None, :, None]
        if offset is not None:
            x = x + offset.astype(dtype)[index, None, :, None]
        x = x if angles is None else rotary.rotate(x, angles)
        heads.append(masking.hide_by_head(x, mask) if 2 * index >= count else x)
    return heads


def bias(call: Call, table: jax.Array, length: int) -> jax.Array:
    """T5's relative position bias, `[N, T, T]`, from its table `[32, N]`.

    Short distances have a bucket each, longer ones share buckets on a logarithmic
    scale, and all from 128 on share one. Without ``is_causal`` half of the buckets are
    for keys after the query.
    """
    heads = call.query.shape[2]
    inputs.check_array("relative_bias", table, f"{BUCKETS} N", BUCKETS, heads)
    # On a circle of 2 T places: distances 0 to T - 1, one unused, then -T + 1 to -1.
    # Row i of the matrix is the circle rotated by i, which a reshape does.
    distance = np.arange(2 * length)
    distance = np.where(distance < length, distance, distance - 2 * length)
    circle = table.T.astype(call.dtype)[:, _bucket(distance, call.is_causal)]
    turns = jnp.broadcast_to(circle[:, None], (heads, length, 2 * length))
    flat = turns.reshape(heads, -1)[:, : length * (2 * length - 1)]
    return flat.reshape(heads, length, -1)[:, :, :length]


def _bucket(distance: np.ndarray, is_causal: bool) -> np.ndarray:
    """The bucket of a distance, key position minus query position."""
    count, first = BUCKETS, 0
    if is_causal:
        distance = np.maximum(-distance, 0)
    else:
        count //= 2
        first = np.where(distance > 0, count, 0)
        distance = np.abs(distance)
    exact = count // 2
    far = np.log(np.maximum(distance, 1) / exact) / math.log(_FARTHEST / exact)
    # Rounding must not move whole powers into the bucket below.
    far = exact + np.floor(far * (count - exact) + 1e-9).astype(int)
    return first + np.where(distance < exact, distance, np.minimum(far, count - 1))
