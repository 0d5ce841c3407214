"""Small layers that every model here uses."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention.inputs import accumulation_dtype
from lra_jax.attention.linear import rotary as rotations
from lra_jax.errors import expected


class Dense(nnx.Linear):
    """``nnx.Linear`` over the last axis, computed as one two-dimensional product.

    The results are the same; only the leading axes are merged for the product. If they
    are kept separate, XLA on CPU transposes the operands of the weight gradient, which
    then takes several times as long. The bias is added by
    `at_positions`, so that its gradient is summed in its own dtype.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """`[..., in_features]` to `[..., out_features]`."""
        x = inputs if splits_positions() else inputs.reshape(-1, inputs.shape[-1])
        x, kernel = self.promote_dtype((x, self.kernel[...]), dtype=self.dtype)
        axes = (((x.ndim - 1,), (0,)), ((), ()))
        out = self.dot_general(
            x, kernel, axes, precision=self.precision, out_sharding=out_sharding
        )
        if self.bias is not None:
            out = out + at_positions(self.bias[...], out)
        return out.reshape(*inputs.shape[:-1], self.out_features)


def check_even(name: str, size: int, what: str) -> None:
    """Raises ``ValueError`` if a size is odd."""
    if size % 2:
        raise expected(name, f"an even {what}", size)


def splits_positions() -> bool:
    """Whether the mesh of ``jax.set_mesh`` splits sequences, by its axis "seq"."""
    return jax.sharding.get_abstract_mesh().shape.get("seq", 1) > 1


def at_positions(row: jax.Array, like: jax.Array) -> jax.Array:
    """A parameter at every position: `[D]` in the shape and dtype of another array.

    It is broadcast before it is cast, so its gradient, a sum over all positions, is
    summed in its own dtype: in bfloat16 a sum stops growing at 256 times its terms.
    """
    split = jax.typeof(like).sharding
    return jnp.broadcast_to(row, like.shape, out_sharding=split).astype(like.dtype)


def take_rows(table: jax.Array, rows: jax.Array) -> jax.Array:
    """``table[rows]``, split over devices as the rows are on explicit axes of a mesh.

    Rows beyond the table are NaN.
    """
    sharding = jax.typeof(rows).sharding
    split = jax.NamedSharding(sharding.mesh, jax.P(*sharding.spec, None))
    return table.at[rows].get(mode="fill", out_sharding=split)


def rows_at(x: jax.Array, positions: jax.Array) -> jax.Array:
    """`[B, K, D]`: the rows of `[B, T, D]` at positions `[B, K]`; NaN beyond T."""
    return jnp.take_along_axis(x, positions[:, :, None], 1, mode="fill")


class LayerNorm(nnx.Module):
    """Layer normalisation over the last axis, with a custom gradient.

    ``(x - mean) / sqrt(var + epsilon) * scale + bias``, in float32, or in float64 for
    float64 inputs: the same as ``nnx.LayerNorm``. The gradient is the usual closed
    form, two sums per row; with automatic differentiation, XLA on CPU writes out five
    broadcast arrays instead (docs/performance.md). There is no forward mode:
    ``jax.jvp`` raises TypeError.

    Args:
      features: width of the last axis.
      epsilon: added to the variance.
      dtype: dtype of the output; the input's by default. Parameters are float32.
    """

    def __init__(self, features: int, *, epsilon: float = 1e-6, dtype: Any = None):
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(
        self,
        inputs: jax.Array,
        mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        training: bool = False,
    ) -> jax.Array:
        """`[..., features]` to `[..., features]`.

        The other arguments are for norms over several positions; here they are ignored.
        """
        dtype = accumulation_dtype(inputs)
        x, scale, bias = (
            x.astype(dtype) for x in (inputs, self.scale[...], self.bias[...])
        )
        out = _layer_norm(x, scale, bias, self.epsilon)
        return jnp.asarray(out, self.dtype or inputs.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> jax.Array:
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    mean = jnp.mean(x, -1, keepdims=True)
    centred = x - mean
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + epsilon)
    shape = (1,) * (x.ndim - 1) + scale.shape
    out = centred * inverse * scale.reshape(shape) + bias.reshape(shape)
    return out, (x, mean, inverse, scale)


def _layer_norm_backward(
    epsilon: float, kept: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, mean, inverse, scale = kept
    rows = tuple(range(x.ndim - 1))
    normal = (x - mean) * inverse
    inner = grad * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    along = jnp.mean(inner * normal, -1, keepdims=True)
    grad_x = (inner - jnp.mean(inner, -1, keepdims=True) - normal * along) * inverse
    return grad_x, jnp.sum(grad * normal, rows), jnp.sum(grad, rows)


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


class HeadNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + epsilon) * gain``, for each head of a position separately;
    the mean square is float32 or wider."""

    def __init__(self, num_heads: int, head_dim: int, *, epsilon: float = 1e-6):
        self.gain = nnx.Param(jnp.ones((num_heads, head_dim), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """`[B, T, N, H]` to `[B, T, N, H]`."""
        x = inputs.astype(accumulation_dtype(inputs))
        square = jnp.mean(jnp.square(x), -1, keepdims=True)
        gain = self.gain[...].astype(x.dtype)[None, None]
        x = x * jax.lax.rsqrt(square + self.epsilon) * gain
        return x.astype(inputs.dtype)


class Dropout(nnx.Module):
    """Zeroes each element with probability ``rate``, and rescales the others.

    The mask is a hash of the element's index and of a key that the caller passes: a
    counter-based generator, MurmurHash3's 32-bit finaliser with the two words of the
    key mixed in. It fuses with its neighbours, so no mask is ever stored, and costs a
    fraction of Threefry's rounds (docs/performance.md). It holds no state and does not
    depend on how the array is laid out over devices, or padded for them.

    With ``by_example`` it zeroes whole examples: stochastic depth, if applied to the
    branch of a block (Huang et al. 2016, arXiv:1603.09382). Documents that are packed
    into a row share its fate.

    Deviations from ``nnx.Dropout``: the generator; and no mask without ``rngs``.
    """

    def __init__(self, rate: float, *, by_example: bool = False):
        if not 0 <= rate < 1:
            raise expected("dropout", "a rate in [0, 1)", rate)
        self.rate = rate
        self.by_example = by_example

    def __call__(self, inputs: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Applies dropout if ``rngs`` is given, else returns ``inputs`` unchanged."""
        if rngs is None or self.rate == 0:
            return inputs
        shape = inputs.shape
        if self.by_example:
            shape = shape[0], *(1,) * (inputs.ndim - 1)
        keep = ~draw_mask(rngs.dropout(), self.rate, shape)
        scale = jnp.asarray(1 / (1 - self.rate), inputs.dtype)
        return jnp.where(keep, inputs * scale, 0)


def draw_mask(key: jax.Array, rate: float, shape: tuple[int, ...]) -> jax.Array:
    """True with probability ``rate``, for each element separately."""
    limit = np.uint32(min(round(rate * 2**32), 2**32 - 1))
    return random_uint32(key, shape) < limit


def random_uint32(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform 32-bit integers: a hash of the element's index and of the key.

    Elements of `[B, T, ...]`, fewer than 2^32, are counted position by position, over
    the whole batch, so padding at the end of the sequences does not change the integers
    before it.
    """
    words = jax.random.key_data(key).astype(jnp.uint32).reshape(-1)
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    axes = [*range(len(shape))]
    axes[:2] = axes[:2][::-1]
    for axis in reversed(axes):
        along = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index + along * np.uint32(stride % 2**32)
        stride *= shape[axis]
    state = _mix(index * np.uint32(0x9E3779B1) + words[0])
    return _mix(state ^ words[-1])


def _mix(state: jax.Array) -> jax.Array:
    """MurmurHash3's finaliser: every input bit reaches every output bit."""
    state = (state ^ (state >> 16)) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> 13)) * np.uint32(0xC2B2AE35)
    return state ^ (state >> 16)


@jax.custom_vjp
def add_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """``x + positions`` for `[B, T, D]` and `[T, D]`.

    The gradient of ``positions`` is a sum over the batch, written as a product with
    ones: XLA on CPU takes twenty times as long for a reduction. As a custom gradient it
    has no forward mode: ``jax.jvp`` raises TypeError.
    """
    return x + positions[None]


def _add_positions_forward(
    x: jax.Array, positions: jax.Array
) -> tuple[jax.Array, None]:
    return add_positions(x, positions), None


def _add_positions_backward(_: None, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    ones = jnp.ones((1, grad.shape[0]), grad.dtype)
    rows = grad.reshape(grad.shape[0], -1)
    total = jnp.matmul(ones, rows, precision=jax.lax.Precision.HIGHEST)
    return grad, total.reshape(grad.shape[1:])


add_positions.defvjp(_add_positions_forward, _add_positions_backward)


def sinusoidal_positions(length: int, features: int, dtype: Any) -> jax.Array:
    """Fixed position table `[length, features]` of "Attention Is All You Need".

    Sines in the first half of the features and cosines in the second, at wavelengths
    that grow geometrically from 2 pi to 10,000 * 2 pi.
    """
    check_even("embed_dim", features, "width for sinusoidal positions")
    rates = np.exp(-np.log(1e4) * np.arange(features // 2) / max(features // 2 - 1, 1))
    angles = np.arange(length)[:, None] * rates
    return jnp.asarray(np.concatenate([np.sin(angles), np.cos(angles)], 1), dtype)


def rotate(
    x: jax.Array, positions: jax.Array | None = None, max_length: int | None = None
) -> jax.Array:
    """`[B, T, N, H]`, each position rotated by its angles, in float32 or wider.

    ``positions`` are `[B, T]`, or 0 to T - 1 without; ``max_length`` exceeds them, and
    the result is NaN beyond it.
    """
    length, width = x.shape[1], x.shape[-1]
    dtype = accumulation_dtype(x)
    longest = max_length or length
    tables = [x[:longest] for x in rotations.tables(longest, width, dtype)]
    if positions is None:
        angles = [table[:length].reshape(1, length, 1, -1) for table in tables]
    else:
        angles = [take_rows(table, positions)[:, :, None] for table in tables]
    cos, sin = angles
    return rotations.rotate(x.astype(dtype), (cos, sin)).astype(x.dtype)
