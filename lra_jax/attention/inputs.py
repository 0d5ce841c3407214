"""The vocabulary of shapes: axes, dtypes and masks, asserted by chex.

Axis letters are those of ``jax.nn.dot_product_attention``: **B** batch, **T** query
length, **S** key length, **N** heads, **H** head width, **Hv** value width. The layout
is always ``[B, T, N, H]``. A caller's mistakes raise ``ValueError`` here, naming the
argument, what was expected and what was passed, as in ``key: expected [B, S, N, H]=(2,
8, 4, 16), got (2, 8, 4, 32)``; the mechanisms do not check anything again.

Keys and values may have fewer heads than the query (multi-query and grouped-query
attention): each of those heads then serves ``N / heads`` neighbouring query heads.
"""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import chex
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from lra_jax.errors import did_you_mean, expected

# The size of an axis: a number, a set of allowed numbers, or None for any.
Size = int | set[int] | None


@contextlib.contextmanager
def asserted(name: str, wanted: object, got: object) -> Iterator[None]:
    """Turns chex's ``AssertionError`` into the library's ``ValueError``."""
    try:
        yield
    except AssertionError:
        raise expected(name, wanted, got) from None


def check_shape(name: str, array: Any, axes: str, *sizes: Size) -> None:
    """Raises ``ValueError`` unless an array has these axes.

    Args:
      name: the argument.
      array: any array.
      axes: the letters, as in ``"B T N H"``.
      *sizes: one for each letter.
    """
    shape = np.shape(array)
    with asserted(name, layout(axes, *sizes), shape):
        chex.assert_shape(jax.ShapeDtypeStruct(shape, bool), sizes)


def layout(axes: str, *sizes: Size) -> str:
    """Axes in words, as in ``[B, S, N, H]=(2, S, 1|2|4, 16)``."""
    letters = axes.split()
    named = f"[{', '.join(letters)}]"
    if all(size is None for size in sizes):
        return named
    known = (_size(letter, size) for letter, size in zip(letters, sizes, strict=True))
    return f"{named}=({', '.join(known)}{',' if len(letters) == 1 else ''})"


def _size(letter: str, size: Size) -> str:
    if isinstance(size, set):
        return "|".join(map(str, sorted(size)))
    return letter if size is None else str(size)


def check_float(name: str, array: Any) -> None:
    """Raises ``ValueError`` unless this is an array of a floating dtype."""
    if not hasattr(array, "dtype"):
        raise expected(name, "a floating array", f"{array!r}")
    dtype = jnp.result_type(array)
    with asserted(name, "a floating dtype", dtype):
        chex.assert_type(jax.ShapeDtypeStruct((), dtype), float)


def check_array(
    name: str, array: Any, axes: str, *sizes: Size, source: str | None = None
) -> jax.Array:
    """Returns the array if it is a floating-point array with these axes.

    Args:
      name: the argument.
      array: a parameter array of a mechanism.
      axes: the letters, as in `check_shape`.
      *sizes: one for each letter.
      source: name of the function that makes such an array, for the message.

    Raises:
      ValueError: the array does not fit.
    """
    if array is None:
        hint = "" if source is None else f"; {source} makes one"
        raise expected(name, layout(axes, *sizes), f"None{hint}")
    check_shape(name, array, axes, *sizes)
    check_float(name, array)
    return array


def check_inputs(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None = None,
    is_causal: bool = False,
) -> None:
    """Raises ``ValueError`` unless query, key and value fit together.

    Args:
      query: `[B, T, N, H]`, floating.
      key: `[B, S, N, H]`, floating; the number of heads may also be a divisor of N.
      value: `[B, S, N, Hv]`, or None if only the weights are wanted.
      is_causal: if True, T must equal S.
    """
    check_flag("is_causal", is_causal)
    given = {"query": (query, "B T N H"), "key": (key, "B S N H")}
    if value is not None:
        given["value"] = value, "B S N Hv"
    for name, (array, axes) in given.items():
        check_shape(name, array, axes, None, None, None, None)
        check_float(name, array)
        if 0 in array.shape:
            raise expected(
                name,
                f"{layout(axes, None, None, None, None)} without an empty axis",
                array.shape,
            )
    batch, length, heads, width = query.shape
    shared = {heads // part for part in range(1, heads + 1) if heads % part == 0}
    check_shape("key", key, "B S N H", batch, None, shared, width)
    if value is not None:
        positions = key.shape[1]
        check_shape("value", value, "B S N Hv", batch, positions, shared, None)
    if is_causal and length != key.shape[1]:
        raise expected(
            "is_causal",
            "query and key of the same length (T == S)",
            f"T={length} and S={key.shape[1]}",
        )


# Rows and columns of an image that is read row by row; None = not an image.
Grid = tuple[int, int] | None


def check_sides(name: str, grid: Any) -> int:
    """The number of pixels of a grid; raises ``ValueError`` unless it has two sides."""
    if np.shape(grid) != (2,):
        raise expected(name, "(rows, columns)", f"{grid!r}")
    return math.prod(check_size(name, side) for side in grid)


def check_grid(
    grid: Grid,
    query: jax.Array,
    key: jax.Array,
    is_causal: bool,
    segment_ids: jax.Array | None,
) -> None:
    """Raises ``ValueError`` unless the grid is None or fits the inputs."""
    if grid is None:
        return
    size = check_sides("grid", grid)
    for name, length in {"query": query.shape[1], "key": key.shape[1]}.items():
        if length != size:
            wanted = f"the length of {name}, {length}, as rows * columns"
            raise expected("grid", wanted, tuple(grid))
    if is_causal:
        raise expected("is_causal", "False with a grid", True)
    if segment_ids is not None:
        raise expected("segment_ids", "None with a grid", "an array")


# What ``flax.nnx.MultiHeadAttention`` and Linen's pass to an ``attention_fn``.
FLAX_KEYWORDS = frozenset(
    {
        "attn_weights_value_einsum",
        "broadcast_dropout",
        "deterministic",
        "dropout_rate",
        "dropout_rng",
        "dtype",
        "force_fp32_for_softmax",
        "is_causal",
        "mask",
        "module",
        "precision",
        "qk_attn_weights_einsum",
    }
)


def check_keywords(
    function: Callable[..., Any],
    flax: Mapping[str, Any],
    deterministic: bool | None = None,
) -> None:
    """Raises ``ValueError`` unless all extra keywords are ones that Flax passes.

    Flax's layer always passes a ``dropout_rate``, which has no effect without weights
    to drop. A rate without Flax's other keywords is therefore an error.

    Args:
      function: the attention function; the error names its keywords.
      flax: the keywords for which it has no parameter.
      deterministic: Flax's keyword, of a function that has a parameter for it.
    """
    for name in flax:
        if name not in FLAX_KEYWORDS:
            parameters = inspect.signature(function).parameters.values()
            own = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            hint = did_you_mean(name, own)
            wanted = f"a keyword of {function.__name__}"
            raise expected(name, wanted, f"an unknown one{hint}")
    by_layer = deterministic is not None or "deterministic" in flax
    if flax.get("dropout_rate") and not by_layer:
        wanted = "0, because there are no weights to drop"
        raise expected("dropout_rate", wanted, flax["dropout_rate"])


def refuse_decoding(
    deterministic: bool | None, query: jax.Array, key: jax.Array, name: str
) -> None:
    """Raises ``ValueError`` if a Flax layer passes one query and more than one key.

    With ``decode=True`` that layer caches keys and values, but does not pass on the
    query's position or the earlier queries. For mechanisms that depend on these. They
    have a parameter ``deterministic``, not None if a layer calls: Linen's layer passes
    only keywords that a function names.
    """
    if deterministic is not None and query.shape[1] == 1 < key.shape[1]:
        raise expected(
            "query",
            "all positions at once, because a Flax layer with decode=True does not say "
            f"where its one query is, on which {name} attention depends (decode with "
            "lra_jax.models.stream; for one query without decoding, use "
            "lra_jax.models.MultiHeadAttention)",
            f"T=1 and S={key.shape[1]}",
        )


def check_self(query: jax.Array, key: jax.Array, name: str) -> None:
    """Raises ``ValueError`` unless query and key have the same length."""
    if query.shape[1] != key.shape[1]:
        raise expected(
            "key",
            f"the query's length T={query.shape[1]}, because {name} attention relates "
            "the positions of one sequence and has no cross form",
            f"S={key.shape[1]}",
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
        raise expected(name, kind, f"{size!r}")
    return int(size)


def check_number(name: str, number: object) -> None:
    """Raises ``ValueError`` unless an option is a positive, finite number."""
    if not _is_number(number) or not 0 < number < math.inf:
        raise expected(name, "a positive number", f"{number!r}")


def check_eps(number: object, name: str = "eps") -> None:
    """Raises ``ValueError`` unless an eps is 0 or a positive, finite number."""
    if not _is_number(number) or not 0 <= number < math.inf:
        raise expected(name, "0 or a positive number", f"{number!r}")


def _is_number(number: object) -> TypeGuard[float]:
    numbers = int | float | np.integer | np.floating
    return isinstance(number, numbers) and not isinstance(number, bool)


def check_flag(name: str, flag: object) -> None:
    """Raises ``ValueError`` unless an option is True or False."""
    if not isinstance(flag, bool | np.bool_):
        raise expected(name, "True or False", f"{flag!r}")


def refuse_causal(is_causal: bool, reason: str) -> None:
    """Raises ``ValueError`` if ``is_causal``, for mechanisms without a causal form."""
    check_flag("is_causal", is_causal)
    if is_causal:
        raise expected("is_causal", "False", f"{is_causal!r}: {reason}")


def check_max_length(max_length: object, length: int) -> int:
    """The length for which a stream is made, as an int of at least ``length``.

    Raises:
      ValueError: it is not an int, or is smaller.
    """
    if not isinstance(max_length, int | np.integer) or max_length < length:
        raise expected(
            "max_length",
            f"an int of at least {length}, fixed for the whole stream",
            f"{max_length!r}",
        )
    return int(max_length)


def both(one: jax.Array | None, two: jax.Array | None) -> jax.Array | None:
    """Where two masks are both True; None = everywhere."""
    if one is None or two is None:
        return two if one is None else one
    return one & two


def next_position(mask: jax.Array | None, batch: int, length: int) -> jax.Array:
    """`[B]` int32: one past the last visible position; 0 if there is none."""
    if mask is None:
        return jnp.full((batch,), length, jnp.int32)
    after = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
    return jnp.where(mask, after, 0).max(1)


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """float64 if any array is float64, else float32.

    NumPy arrays of float64 count as float32 unless jax has 64 bits enabled.
    """
    wide = any(jnp.result_type(array) == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def aligned(array: jax.Array, rank: int) -> jax.Array:
    """Appends axes of size 1 up to a rank, to broadcast along the leading axes."""
    return array.reshape(*array.shape, *[1] * (rank - array.ndim))


def match_heads(array: jax.Array, num_heads: int) -> jax.Array:
    """Repeats the heads of a key or value `[B, S, n, H]` up to `[B, S, N, H]`.

    The gradient is summed over the copies in float32 or wider.
    """
    if array.shape[2] == num_heads:
        return array
    wide = array.astype(accumulation_dtype(array))
    copies = jnp.repeat(wide, num_heads // array.shape[2], axis=2)
    return copies.astype(array.dtype)


def hide(array: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Zeroes the padded positions of `[B, S, N, H]`, whatever they held (even NaN)."""
    if mask is None:
        return array
    return jnp.where(mask[:, :, None, None], array, 0)


def hide_broken(
    query: jax.Array, mask: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Zeroes the rows of a query `[..., H]` that hold NaN or infinity.

    A padded row may hold anything. Even if its output is discarded, the row still meets
    every key in the gradient, and zero times NaN is NaN. So such a row is computed from
    zeros, and `broken_again` makes its output NaN. Without a mask nothing is padded,
    and the query is not changed.

    Returns:
      The query, and which rows were not changed, `[..., 1]`; None = all.
    """
    if mask is None:
        return query, None
    whole = jnp.isfinite(query).all(-1, keepdims=True)
    return jnp.where(whole, query, 0), whole


def broken_again(out: jax.Array, whole: jax.Array | None) -> jax.Array:
    """Sets rows that `hide_broken` zeroed to NaN; no gradient passes through them."""
    if whole is None:
        return out
    return jnp.where(whole, out, jnp.nan)


def guarded(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An attention in which padded queries, whatever they hold, affect no gradient.

    If there is a mask, or a packed row, `hide_broken` runs before the attention and
    `broken_again` after it. For mechanisms without a query mask.
    """

    place = list(inspect.signature(attention).parameters).index("mask")

    @functools.wraps(attention)
    def call(query: jax.Array, *args: Any, **keywords: Any) -> jax.Array:
        given = args[place - 1] if len(args) >= place else keywords.get("mask")
        given = keywords.get("segment_ids") if given is None else given
        whole = None
        if np.ndim(query) == 4:  # Other ranks are rejected inside.
            query, whole = hide_broken(query, given)
        return broken_again(attention(query, *args, **keywords), whole)

    return call


def by_head(
    array: jax.Array,
    num_heads: int,
    mask: jax.Array | None = None,
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Zeroes the padding of `[B, S, n, H]`, repeats heads up to N, and puts them first.

    Returns:
      `[B, N, S, H]` in ``dtype``; None = the array's dtype.
    """
    array = hide(array, mask).astype(dtype or array.dtype)
    return jnp.swapaxes(match_heads(array, num_heads), 1, 2)


def hide_padding(array: jax.Array, pairs: jax.Array | None) -> jax.Array:
    """Zeroes what a `pair_mask` hides of `[B, S, N, H]`, if it masks only padding."""
    if pairs is None or pairs.shape[1:3] != (1, 1):
        return array
    return hide(array, jnp.broadcast_to(pairs[:, 0, 0], array.shape[:2]))


def hide_by_head(array: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Zeroes the padded positions of `[B, N, S, H]`."""
    if mask is None:
        return array
    return jnp.where(mask[:, None, :, None], array, 0)


_SUMS_ONCE = "linear attention sums over the keys once for all queries and heads"


def padding_mask(
    mask: jax.Array | None,
    batch: int,
    length: int,
    name: str = "mask",
    reason: str = _SUMS_ONCE,
) -> jax.Array | None:
    """Converts a padding mask to boolean `[B, S]`.

    Args:
      mask: True = may be attended. `[B, S]`, or anything that broadcasts to
        `[B, 1, 1, S]`. Numbers above zero count as True, because
        ``flax.nnx.make_attention_mask`` makes float masks of 0 and 1; additive masks
        (0 and -inf) are rejected if their values are known, outside ``jax.jit``.
      batch: B.
      length: S (or T, for a query mask).
      name: the argument's name, for the error message.
      reason: why no other mask is possible, for the error message.

    Raises:
      ValueError: the shape does not fit, or the mask has a query or a head axis. A
        linear mechanism sums over the keys once for all queries, so it cannot leave out
        single query-key pairs.
    """
    if mask is None:
        return None
    mask = _boolean(mask, name)
    shape = mask.shape
    if len(shape) == 4 and (shape[1] != 1 or shape[2] != 1):
        raise expected(
            name,
            f"[B, S] or [B, 1, 1, S]: {reason}, so a mask with a query or head axis "
            "cannot be applied (pass the padding of the keys, [B, S], instead of "
            "make_attention_mask(pad, pad), or is_causal=True)",
            shape,
        )
    full = (batch, 1, 1, length)
    aligned = (shape[0], 1, 1, shape[1]) if len(shape) == 2 else shape
    if not _broadcasts(aligned, full):
        words = f"[B, S]={(batch, length)} or anything that broadcasts to [B, 1, 1, S]"
        raise expected(name, f"{words}={full}", shape)
    rows = aligned[0] if len(aligned) == 4 else 1
    return jnp.broadcast_to(mask.reshape(rows, -1), (batch, length))


def pair_mask(
    mask: jax.Array | None, batch: int, num_heads: int, query_length: int, length: int
) -> jax.Array | None:
    """Converts a mask to boolean rank 4, broadcastable to `[B, N, T, S]`.

    For mechanisms that do build the matrix. A rank-2 mask is `[B, S]`, as everywhere in
    this package; pass a `[T, S]` mask as `[1, 1, T, S]`.

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
        words = f"[B, S]={(batch, length)} or anything that broadcasts to [B, N, T, S]"
        raise expected("mask", f"{words}={full}", shape)
    return mask.reshape((1,) * (4 - len(aligned)) + aligned)


def _boolean(mask: jax.Array, name: str) -> jax.Array:
    mask = jnp.asarray(mask)
    if mask.dtype == jnp.bool_:
        return mask
    if jnp.issubdtype(mask.dtype, jnp.complexfloating):
        raise expected(name, "a boolean mask", mask.dtype)
    # An additive mask would hide everything. Traced values are unknown; the others are
    # read with numpy, because jnp would trace them inside jax.jit.
    if isinstance(mask, jax.core.Tracer) or not mask.is_fully_addressable:
        return mask > 0
    values = np.asarray(mask).astype(np.float64)
    with asserted(name, "a boolean mask, or one of 0 and 1", "other numbers"):
        chex.assert_equal(bool(((values >= 0) & (values <= 1)).all()), True)
    return mask > 0


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    if not 1 <= len(shape) <= len(full):
        return False
    pairs = zip(shape[::-1], full[::-1], strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)
