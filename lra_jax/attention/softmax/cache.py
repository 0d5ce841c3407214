"""The cache of a softmax stream: keys and values for a fixed number of positions."""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs, masking, packed, streams
from lra_jax.errors import expected


class SoftmaxState(NamedTuple):
    """The keys and values so far; n divides the query's heads."""

    key: jax.Array  # [B, n, max_length, H]
    value: jax.Array  # [B, n, max_length, Hv]
    visible: jax.Array  # the positions that are real, boolean [B, max_length]
    position: jax.Array  # of the next token in each sample, [B] int32

    __repr__ = streams.show_shapes


def empty(
    key: tuple[int, ...],
    value: tuple[int, ...],
    key_dtype: jax.typing.DTypeLike,
    value_dtype: jax.typing.DTypeLike,
) -> SoftmaxState:
    """The state before the first position, with arrays of these shapes."""
    return SoftmaxState(
        jnp.zeros(key, key_dtype),
        jnp.zeros(value, value_dtype),
        jnp.zeros((key[0], key[2]), bool),
        jnp.zeros((key[0],), jnp.int32),
    )


def empty_for(key: jax.Array, value: jax.Array, size: int) -> SoftmaxState:
    """The same for ``size`` positions, and for keys and values `[B, T, n, ...]`."""
    shape, other = ((x.shape[0], x.shape[2], size, x.shape[3]) for x in (key, value))
    state = empty(shape, other, key.dtype, value.dtype)
    # Adding these zeros gives the state the sharding of the samples.
    sample = jnp.zeros_like(key[:, 0, 0, 0])
    return jax.tree.map(
        lambda x: x + inputs.align(sample, x.ndim).astype(x.dtype), state
    )


def places(state: SoftmaxState, length: int) -> jax.Array:
    """The next positions of each sample, `[B, length]`."""
    return state.position[:, None] + np.arange(length, dtype=np.int32)[None]


def extend(
    state: SoftmaxState, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> SoftmaxState:
    """Appends positions `[B, T, n, ...]` to a state; those beyond its end are dropped.

    Their heads may be a divisor of the state's. The mask is of real positions.
    """
    position = state.position + masking.next_position(mask, *key.shape[:2])
    columns = places(state, key.shape[1])
    return _put(state, key, value, mask, columns, position)


def last_documents(
    state: SoftmaxState,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    rows: packed.Packed,
) -> SoftmaxState:
    """Fills an empty state with the last document of each row, as in `extend`."""
    mask = packed.real_positions(mask, rows)
    batch, length = key.shape[:2]
    number, nowhere = rows.number, state.visible.shape[1]
    columns = jnp.where(number == number[:, -1:], rows.position, nowhere)
    position = packed.next_position(mask, rows, batch, length)
    return _put(state, key, value, mask, columns, position)


def _put(
    state: SoftmaxState,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
    columns: jax.Array,
    position: jax.Array,
) -> SoftmaxState:
    """Fills the positions `[B, T]` of the state's columns."""
    batch, length = key.shape[:2]
    rows = jnp.arange(batch, dtype=jnp.int32)
    real = jnp.ones((batch, length), bool) if mask is None else mask

    def put(old: jax.Array, new: jax.Array, *index: Any) -> jax.Array:
        sharding = jax.typeof(old).sharding
        explicit = jax.sharding.AxisType.Explicit in sharding.mesh.axis_types
        where = sharding if explicit else None
        return old.at[index].set(new, mode="drop", out_sharding=where)

    def put_by_head(old: jax.Array, new: jax.Array) -> jax.Array:
        heads = np.arange(old.shape[1], dtype=np.int32)
        # Hidden, since nothing that padding holds, such as NaN, may reach a product.
        new = masking.by_head(new, len(heads), mask, old.dtype)
        index = rows[:, None, None], heads[None, :, None], columns[:, None]
        return put(old, new, *index)

    return SoftmaxState(
        put_by_head(state.key, key),
        put_by_head(state.value, value),
        put(state.visible, real, rows[:, None], columns),
        position,
    )


def check(
    state: SoftmaxState,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None,
) -> None:
    """Raises ``ValueError`` unless the state fits these inputs and has room for them.

    Padding at the end needs no room. If a position is a tracer, the room cannot be
    checked.
    """
    if not isinstance(state, SoftmaxState):
        raise expected("state", "a SoftmaxState", f"a {type(state).__name__}")
    batch, length, heads, _ = query.shape
    size = state.visible.shape[-1]
    shapes = []
    for kept, array in ((state.key, key), (state.value, value)):
        count = jnp.shape(kept)[1]
        if heads % count or count % array.shape[2]:
            needed = f"that divides {heads} and is a multiple of {array.shape[2]}"
            raise expected("state", f"a number of heads {needed}", count)
        shapes.append((batch, count, size, array.shape[3]))
    shape, other = shapes
    needed = jax.eval_shape(lambda: empty(shape, other, key.dtype, value.dtype))
    streams.check_sums(state, needed)
    after: Any = state.position + masking.next_position(mask, batch, length)
    if not isinstance(after, jax.core.Tracer) and np.max(after) > size:
        needed = f"at least {np.max(after)} for a stream this long"
        raise expected("max_length", needed, size)
