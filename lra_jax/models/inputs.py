"""What goes into an encoder: vectors of tokens or pixels, and of their positions.

Inputs:
  embedding  a learned row for each token id; for pixels, one for each of 256 values, as
             in the Long-Range Arena's code.
  linear     ``W (value / 255) + b``: for pixels, whose values are numbers (as in S4 and
             later work).

Positions:
  learned     a learned row for each position (normal, standard deviation 0.02).
  sinusoidal  the fixed table of "Attention Is All You Need".
  learned_2d  for images read row by row: position (r, c) gets ``rows[r] + columns[c]``,
              both learned.
  rotary      none here: queries and keys are rotated (``MultiHeadAttention``).
  none        none at all, for a mechanism that knows the order by itself.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from lra_jax.models.layers import Dense, sinusoidal_positions

Inputs = Literal["embedding", "linear"]
Positions = Literal["learned", "sinusoidal", "learned_2d", "rotary", "none"]

_POSITION_STD = 0.02


def make_inputs(
    kind: Inputs,
    vocab_size: int,
    embed_dim: int,
    std: float,
    *,
    dtype: Any,
    rngs: nnx.Rngs,
) -> nnx.Embed | Dense:
    """The layer that ``embed_inputs`` calls.

    Raises:
      ValueError: an unknown kind.
    """
    if kind == "embedding":
        init = nnx.initializers.normal(std)
        return nnx.Embed(
            vocab_size, embed_dim, embedding_init=init, dtype=dtype, rngs=rngs
        )
    if kind == "linear":
        return Dense(1, embed_dim, dtype=dtype, rngs=rngs)
    raise ValueError(f"inputs: expected one of {get_args(Inputs)}, got {kind!r}")


def embed_inputs(layer: nnx.Embed | Dense, tokens: jax.Array) -> jax.Array:
    """Integers `[B, T]` to vectors `[B, T, D]`."""
    if isinstance(layer, nnx.Embed):
        return layer(tokens.astype(jnp.int32))
    return layer(tokens.astype(jnp.float32)[:, :, None] / 255)


@dataclasses.dataclass(frozen=True)
class PositionTable:
    """How the rows to add are made of parameters; holds none itself.

    Attributes:
      kind: see above.
      length: most positions, that of a class vector in front included.
      embed_dim: width D.
      grid: rows and columns of the images, for ``learned_2d``.
      cls_token: a class vector stands in front of the first pixel. In a grid it has no
        place: its position is a zero vector.

    Raises:
      ValueError: an unknown kind, or no grid where one is needed.
    """

    kind: Positions
    length: int
    embed_dim: int
    grid: tuple[int, int] | None = None
    cls_token: bool = False

    def __post_init__(self):
        if self.kind not in get_args(Positions):
            raise ValueError(
                f"positions: expected one of {get_args(Positions)}, got {self.kind!r}"
            )
        if self.kind == "learned_2d" and self.grid is None:
            raise ValueError(
                "positions: 'learned_2d' is for images, whose rows and columns the "
                "task must give, got grid=None"
            )

    def make(self, rngs: nnx.Rngs) -> nnx.Param | nnx.Dict | None:
        """The parameters; None where there are none."""
        init = nnx.initializers.normal(_POSITION_STD)
        if self.kind == "learned":
            return nnx.Param(init(rngs.params(), (self.length, self.embed_dim)))
        if self.kind == "learned_2d" and self.grid is not None:
            rows, columns = (
                nnx.Param(init(rngs.params(), (size, self.embed_dim)))
                for size in self.grid
            )
            return nnx.Dict(rows=rows, columns=columns)
        return None

    def rows(self, parameters: Any, length: int) -> jax.Array | None:
        """The first rows of the table, `[length, D]` float32; None to add nothing.

        Raises:
          ValueError: images of another size than the grid's.
        """
        match self.kind:
            case "learned":
                return parameters[...][:length]
            case "sinusoidal":
                size = (self.length, self.embed_dim)
                return sinusoidal_positions(*size, jnp.float32)[:length]
            case "learned_2d":
                return self._grid_rows(parameters, length)
        return None

    def _grid_rows(self, parameters: Any, length: int) -> jax.Array:
        rows, columns = parameters["rows"][...], parameters["columns"][...]
        pixels = rows.shape[0] * columns.shape[0]
        if length != pixels + self.cls_token:
            raise ValueError(
                f"tokens: expected T={pixels}, an image of {rows.shape[0]} x "
                f"{columns.shape[0]}, got T={length - self.cls_token}"
            )
        table = (rows[:, None, :] + columns[None, :, :]).reshape(pixels, -1)
        return jnp.pad(table, ((int(self.cls_token), 0), (0, 0)))
