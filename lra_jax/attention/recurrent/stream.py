"""The stream that gated linear attention and the delta rules share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lra_jax.attention import inputs
from lra_jax.attention.recurrent import recurrence


class RecurrentState(NamedTuple):
    """Everything that the next position needs of the earlier ones."""

    sums: recurrence.Memory  # [B, N, H, Hv]
    position: jax.Array  # of the next token in each sample, [B] int32


def recurrent_init(
    batch_size: int,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> RecurrentState:
    """Returns the state of a stream before its first position.

    Args:
      batch_size: B.
      num_heads: N, those of the query.
      head_dim: H.
      value_dim: Hv; None = H.
      dtype: of the state, float32 or float64.

    Raises:
      ValueError: another dtype.
    """
    shape = (batch_size, num_heads, head_dim, value_dim or head_dim)
    sums = recurrence.Memory(jnp.zeros(shape, inputs.state_dtype(dtype)))
    return RecurrentState(sums, jnp.zeros((batch_size,), jnp.int32))


def moved(state: Any, query: jax.Array, mask: jax.Array | None) -> jax.Array:
    """The position behind each sample's last real one, `[B]` int32."""
    batch, length = query.shape[:2]
    mask = inputs.padding_mask(mask, batch, length)
    ends = inputs.next_position(mask, batch, length)
    return ends if state is None else state.position + ends


def one_gate(**gates: jax.Array | None) -> dict[str, jax.Array | None]:
    """Gives the gates of a stream's step a length of 1."""
    return {name: None if x is None else x[:, None] for name, x in gates.items()}
