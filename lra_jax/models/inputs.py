"""The inputs of an encoder: vectors of tokens or pixels, and of their positions.

Inputs:
  embedding  a learned row for each token id; for pixels, one for each of 256 values,
             as in the Long-Range Arena's code. With ``cutoffs``, rarer tokens have
             narrower ones (`adaptive`).
  linear     ``W (value / 255) + b``: for pixels, treating their values as numbers (as
             in S4 and later work). With a ``patch`` of P, the P^2 pixels of a patch
             together, in all colours, are projected to one position (`patches`).
  vectors    ``W x + b`` of real vectors x `[C]`, as in time series, with C in place of
             the size of a vocabulary.

Positions:
  learned     a learned row for each position (normal, standard deviation 0.02).
  sinusoidal  the fixed table of "Attention Is All You Need".
  learned_2d  for images read row by row: position (r, c) gets ``rows[r] + columns[c]``,
              both learned.
  rotary      no table: queries and keys are rotated instead (``MultiHeadAttention``).
  none        none at all, for a mechanism that encodes the order itself.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.attention.inputs import Grid, check_shape
from lra_jax.errors import expected
from lra_jax.models import patches
from lra_jax.models.adaptive import AdaptiveEmbed
from lra_jax.models.config import ModelConfig
from lra_jax.models.layers import Dense, sinusoidal_positions, take_rows
from lra_jax.models.parts import make_part

_POSITION_STD = 0.02


def make_inputs(
    config: ModelConfig, vocab_size: int, rngs: nnx.Rngs
) -> nnx.Embed | AdaptiveEmbed | Dense:
    """The layer that `embed_inputs` calls."""
    if config.inputs == "linear":
        pixels = config.patch**2 * config.channels
        return Dense(pixels, config.embed_dim, dtype=config.dtype, rngs=rngs)
    if config.inputs == "vectors":
        return Dense(vocab_size, config.embed_dim, dtype=config.dtype, rngs=rngs)
    if config.clusters:
        more = {"cutoffs": config.clusters, "dtype": config.dtype}
        return AdaptiveEmbed(vocab_size, config.embed_dim, **more, rngs=rngs)
    init = nnx.initializers.normal(config.embed_std)
    size = vocab_size, config.embed_dim
    return nnx.Embed(*size, embedding_init=init, dtype=config.dtype, rngs=rngs)


def embed_inputs(
    layer: nnx.Embed | AdaptiveEmbed | Dense,
    tokens: jax.Array,
    grid: Grid = None,
    patch: int = 1,
    *,
    scaled: bool = False,
) -> jax.Array:
    """Integers `[B, T]`, pixels in colour or real vectors `[B, T, C]`, to vectors
    `[B, T, D]`, or `[B, T / P^2, D]` for patches of P by P pixels.

    The layer is one of `make_inputs`, and the ``grid`` that of images in colour or cut
    into patches. If ``scaled``, all vectors but those of pixels are multiplied by the
    root of D.
    """
    if isinstance(layer, nnx.Embed | AdaptiveEmbed):
        check_range("tokens", tokens, layer.num_embeddings - 1, "ids of the vocabulary")
        tokens = tokens.astype(jnp.int32)
        if isinstance(layer, AdaptiveEmbed):
            rows = layer(tokens)
        else:
            # Rows are cast after they are taken, so that their gradients, sums over all
            # positions of a token, are float32; `nnx.Embed` casts the table.
            rows = take_rows(layer.embedding[...], tokens).astype(layer.dtype)
        return rows * math.sqrt(rows.shape[-1]) if scaled else rows
    if tokens.ndim == 3 and grid is None:
        projected = layer(tokens.astype(jnp.float32))
        return projected * math.sqrt(projected.shape[-1]) if scaled else projected
    _check_integers("tokens", tokens)
    pixels = tokens[:, :, None] if grid is None else patches.cut(tokens, grid, patch)
    return layer(pixels.astype(jnp.float32) / 255)


def length_mask(tokens: jax.Array, lengths: jax.Array | None) -> jax.Array | None:
    """Boolean `[B, T]`, True at the real tokens; None = everywhere, without lengths."""
    axes = "B T C" if np.ndim(tokens) == 3 else "B T"
    check_shape("tokens", tokens, axes, *[None] * len(axes.split()))
    if lengths is None:
        return None
    check_lengths("lengths", lengths, tokens)
    return jnp.arange(tokens.shape[1])[None] < lengths[:, None]


def check_lengths(name: str, lengths: jax.Array, tokens: jax.Array) -> None:
    """Raises ``ValueError`` unless these are integers `[B]`, from 0 to T if known."""
    batch, length = tokens.shape[:2]
    check_shape(name, lengths, "B", batch)
    check_range(name, lengths, length, "numbers of tokens", "T=")


def known_values(array: jax.Array) -> np.ndarray | None:
    """An array's values; None if they are not known, as those of a traced one."""
    traced = isinstance(array, jax.core.Tracer)
    if traced or not getattr(array, "is_fully_addressable", True):
        return None
    # With numpy: inside jax.jit, jnp would trace them.
    return np.asarray(array)


def check_range(
    name: str, array: jax.Array, most: int, what: str, sign: str = ""
) -> None:
    """Raises ``ValueError`` unless these are integers, from 0 to ``most`` if known.

    In the error, ``what`` names them and ``sign`` goes before the largest. The values
    of a traced array are not known.
    """
    _check_integers(name, array)
    known = known_values(array)
    if known is None or not known.size:
        return
    if known.min() < 0 or known.max() > most:
        needed = f"{what}, from 0 to {sign}{most}"
        raise expected(name, needed, f"from {known.min()} to {known.max()}")


def _check_integers(name: str, array: jax.Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise expected(name, "an integer dtype", array.dtype)


class Table(nnx.Param):
    """A learned row for each position."""

    def __call__(self, length: int) -> jax.Array:
        """The first rows, float32 `[length, D]`."""
        return self[...][:length]


class Sinusoids(nnx.Module):
    """The fixed table."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.size = config.length, config.embed_dim

    def __call__(self, length: int) -> jax.Array:
        """The first rows, float32 `[length, D]`."""
        return sinusoidal_positions(*self.size, jnp.float32)[:length]


class GridTable(nnx.Module):
    """A learned vector for each row of an image, plus one for each column.

    A class vector has no place in a grid: its position is a zero vector.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        sides = config.patch_grid or (0, 0)
        self.rows, self.columns = (_table(config, side, rngs) for side in sides)
        self.cls_token = config.cls_token

    def __call__(self, length: int) -> jax.Array:
        """All rows, float32 `[length, D]`; images have no other size."""
        rows, columns = self.rows[...], self.columns[...]
        pixels = rows.shape[0] * columns.shape[0]
        if length != pixels + self.cls_token:
            needed = f"T={pixels}, an image of {rows.shape[0]} x {columns.shape[0]}"
            raise expected("tokens", needed, f"T={length - self.cls_token}")
        table = (rows[:, None, :] + columns[None, :, :]).reshape(pixels, -1)
        return jnp.pad(table, ((int(self.cls_token), 0), (0, 0)))


def _table(config: ModelConfig, size: int, rngs: nnx.Rngs) -> Table:
    init = nnx.initializers.normal(_POSITION_STD)
    return Table(init(rngs.params(), (size, config.embed_dim), jnp.float32))


_POSITIONS: dict[str, Callable[..., Any]] = {
    "learned": lambda config, rngs: _table(config, config.length, rngs),
    "learned_2d": GridTable,
    "sinusoidal": Sinusoids,
    "rotary": lambda config, rngs: None,
    "none": lambda config, rngs: None,
}


def make_positions(config: ModelConfig, rngs: nnx.Rngs) -> Any:
    """Makes the part that gives the first positions their vectors; None if none has."""
    args = {"config": config, "rngs": rngs}
    return make_part("positions", config.positions, _POSITIONS, args, {})
