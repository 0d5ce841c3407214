"""Axes, dtypes and masks: every check that the attention functions share.

Axis letters are those of ``jax.nn.dot_product_attention``: **B** batch, **T** query
length, **S** key length, **N** heads, **H** head width, **Hv** value width. The layout
is always ``[B, T, N, H]``. What a caller can get wrong raises ``ValueError`` here, with
the argument, what was expected and what came; inside the mechanisms nothing is checked
again.

Keys and values may have fewer heads than the query (multi-query and grouped-query
attention): each of their heads then serves ``N / heads`` neighbouring query heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KEYWORDS = {"query": "[B, T, N, H]", "key": "[B, S, N, H]", "value": "[B, S, N, Hv]"}


def check_inputs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None = None,
    is_causal: bool = False,
) -> None:
    """Raises ``ValueError`` unless query, key and value belong together.

    Args:
      query: `[B, T, N, H]`, floating.
      key: `[B, S, N, H]`, floating; its heads may also be a divisor of N.
      value: `[B, S, N, Hv]`, or None where only the weights are wanted.
      is_causal: if True, T must equal S.
    """
    given = {"query": query, "key": key}
    if value is not None:
        given["value"] = value
    for name, array in given.items():
        _check_array(name, array)
    batch, length, num_heads, head_dim = query.shape
    for name, array in given.items():
        if array.shape[0] != batch:
            raise ValueError(
                f"{name}: expected batch size B={batch} as in query, "
                f"got shape {array.shape}"
            )
        if array.shape[2] == 0 or num_heads % array.shape[2]:
            raise ValueError(
                f"{name}: expected N={num_heads} heads as in query, or a divisor of "
                f"it, got {array.shape[2]} in shape {array.shape}"
            )
    if key.shape[3] != head_dim:
        raise ValueError(
            f"key: expected head width H={head_dim} as in query, got {key.shape[3]} "
            f"in shape {key.shape}"
        )
    if value is not None and value.shape[1] != key.shape[1]:
        raise ValueError(
            f"value: expected length S={key.shape[1]} as in key, "
            f"got {value.shape[1]} in shape {value.shape}"
        )
    if is_causal and length != key.shape[1]:
        raise ValueError(
            "is_causal: expected query and key of one length (T == S), "
            f"got T={length} and S={key.shape[1]}"
        )


def _check_array(name: str, array: jax.Array) -> None:
    layout = _KEYWORDS[name]
    if jnp.ndim(array) != 4:
        raise ValueError(f"{name}: expected {layout}, got shape {jnp.shape(array)}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name}: expected a floating dtype, got {array.dtype}")
    if array.shape[1] == 0:
        raise ValueError(f"{name}: expected at least one position, got {array.shape}")


def check_self(query: jax.Array, key: jax.Array, name: str) -> None:
    """Raises ``ValueError`` unless query and key have one length."""
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key: expected the query's length T={query.shape[1]}, because {name} "
            "attention is about positions of one sequence and has no cross form, "
            f"got S={key.shape[1]}"
        )


def check_size(name: str, size: object, lowest: int = 1) -> int:
    """The size as an int.

    Raises:
      ValueError: it is not an integer, or below the lowest.
    """
    if (
        isinstance(size, bool)
        or not isinstance(size, int | np.integer)
        or size < lowest
    ):
        kind = "a positive int" if lowest == 1 else f"an int of at least {lowest}"
        raise ValueError(f"{name}: expected {kind}, got {size!r}")
    return int(size)


def one_position(
    query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gives the arrays of a stream's step, `[B, N, H]`, a length of 1.

    Raises:
      ValueError: an array does not have three axes.
    """
    given = {"query": query, "key": key, "value": value}
    for name, array in given.items():
        if jnp.ndim(array) != 3:
            layout = _KEYWORDS[name].replace("T, ", "").replace("S, ", "")
            raise ValueError(
                f"{name}: expected {layout} for one position, "
                f"got shape {jnp.shape(array)}"
            )
    return query[:, None], key[:, None], value[:, None]


def state_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype of a stream's state; ``ValueError`` unless float32 or float64."""
    if jnp.dtype(dtype) not in (jnp.float32, jnp.float64):
        raise ValueError(
            "dtype: expected float32 or float64, because a state sums over all "
            f"positions, got {jnp.dtype(dtype)}"
        )
    return jnp.dtype(dtype)


def checked_state(state: Any, wanted: Any) -> Any:
    """The state, a NamedTuple of arrays; ``ValueError`` unless of the wanted shapes."""
    for name, given, expected in zip(wanted._fields, state, wanted, strict=True):
        if jnp.shape(given) != expected.shape:
            raise ValueError(
                f"state: expected {name} of shape {expected.shape} for these inputs, "
                f"got {jnp.shape(given)}"
            )
    return state


def next_position(mask: jax.Array | None, batch: int, length: int) -> jax.Array:
    """`[B]` int32: one past the last visible position; 0 without any."""
    if mask is None:
        return jnp.full((batch,), length, jnp.int32)
    after = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
    return jnp.where(mask, after, 0).max(1)


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """float64 if any array is float64, else float32, whatever the inputs are."""
    wide = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def match_heads(array: jax.Array, num_heads: int) -> jax.Array:
    """Repeats the heads of a key or value `[B, S, n, H]` up to `[B, S, N, H]`."""
    if array.shape[2] == num_heads:
        return array
    return jnp.repeat(array, num_heads // array.shape[2], axis=2)


def hide(array: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Zeroes the padded positions of `[B, S, N, H]`, whatever they held (even NaN)."""
    if mask is None:
        return array
    return jnp.where(mask[:, :, None, None], array, jnp.zeros((), array.dtype))


def by_head(
    array: jax.Array,
    num_heads: int,
    mask: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """`[B, S, n, H]` with padding zeroed, its heads repeated up to N and put first.

    Returns:
      `[B, N, S, H]` in ``dtype``, or in the array's own.
    """
    array = match_heads(hide(array, mask), num_heads)
    return jnp.swapaxes(array, 1, 2).astype(dtype or array.dtype)


def hide_padding(array: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Zeroes what a `pair_mask` hides of `[B, S, N, H]`, if it is one of padding."""
    if pairs is None or pairs.shape[1:3] != (1, 1):
        return array
    return hide(array, jnp.broadcast_to(pairs[:, 0, 0], array.shape[:2]))


def unit_values(query: jax.Array, key: jax.Array) -> jax.Array:
    """Values `[B, S, 1, S]` for which an output linear in them is the matrix itself."""
    length, dtype = key.shape[1], accumulation_dtype(query, key)
    units = jnp.eye(length, dtype=dtype)[None, :, None]
    return jnp.broadcast_to(units, (query.shape[0], length, 1, length))


def hide_by_head(array: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Zeroes the padded positions of `[B, N, S, H]`."""
    if mask is None:
        return array
    return jnp.where(mask[:, None, :, None], array, jnp.zeros((), array.dtype))


_SUMS_ONCE = "linear attention sums over the keys once for all queries and heads"


def padding_mask(
    mask: jax.Array | None,
    batch: int,
    length: int,
    name: str = "mask",
    reason: str = _SUMS_ONCE,
) -> jax.Array | None:
    """Brings a padding mask to boolean `[B, S]`.

    Args:
      mask: True = may be attended. `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`. Numbers are read as True where they are above zero, because
        ``flax.nnx.make_attention_mask`` makes float masks of 0 and 1; additive masks
        (0 and -inf) are not understood.
      batch: B.
      length: S (or T, for a query mask).
      name: the argument's name, for the error message.
      reason: why there can be no other mask, for the error message.

    Raises:
      ValueError: the shape does not fit, or the mask has a query or a head axis. A
        linear mechanism sums over the keys once for all queries, so it has no place
        where single query-key pairs could be removed.
    """
    if mask is None:
        return None
    mask = _boolean(mask, name)
    shape = mask.shape
    if len(shape) == 4 and (shape[1] != 1 or shape[2] != 1):
        raise ValueError(
            f"{name}: expected [B, S] or [B, 1, 1, S], got shape {shape}: "
            f"{reason}, so a mask with a query or head axis cannot be applied; give a "
            "padding mask, or is_causal=True for an autoregressive one"
        )
    full = (batch, 1, 1, length)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    if not _broadcasts(aligned, full):
        raise ValueError(
            f"{name}: expected [B, S]={(batch, length)} or anything that broadcasts to "
            f"[B, 1, 1, S]={full}, got shape {shape}"
        )
    rows = aligned[0] if len(aligned) == 4 else 1
    return jnp.broadcast_to(mask.reshape(rows, -1), (batch, length))


def pair_mask(
    mask: jax.Array | None, batch: int, num_heads: int, query_length: int, length: int
) -> jax.Array | None:
    """Brings a mask to boolean rank 4, broadcastable to `[B, N, T, S]`.

    For mechanisms that do build the matrix. A rank-2 mask is `[B, S]`, as everywhere in
    this package; a `[T, S]` mask is written `[1, 1, T, S]`.

    Raises:
      ValueError: the shape does not fit.
    """
    if mask is None:
        return None
    mask = _boolean(mask, "mask")
    shape = mask.shape
    full = (batch, num_heads, query_length, length)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    if not _broadcasts(aligned, full):
        raise ValueError(
            f"mask: expected [B, S]={(batch, length)} or anything that broadcasts to "
            f"[B, N, T, S]={full}, got shape {shape}"
        )
    return mask.reshape((1,) * (4 - len(aligned)) + aligned)


def _boolean(mask: jax.Array, name: str) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.dtype == jnp.bool_:
        return mask
    if jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise ValueError(f"{name}: expected a boolean mask, got {mask.dtype}")
    return mask > 0


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    if not 1 <= len(shape) <= len(full):
        return False
    pairs = zip(shape[::-1], full[::-1], strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)
