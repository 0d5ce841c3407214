"""The vocabulary of shapes: axes, dtypes and options, asserted by chex.

Axis letters are those of ``jax.nn.dot_product_attention``: **B** batch, **T** query
length, **S** key length, **N** heads, **H** head width, **Hv** value width. The layout
is always ``[B, T, N, H]``. A caller's mistakes raise ``ValueError``, naming the
argument, what was expected and what was passed, as in ``key: expected [B, S, N, H]=(2,
8, 4, 16), got (2, 8, 4, 32)``. Arrays are checked once, where a call begins; options by
the mechanism that has them.

Keys and values may have fewer heads than the query (multi-query and grouped-query
attention): each of those heads then serves ``N / heads`` neighbouring query heads.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeGuard

import chex
import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.errors import a_thing, did_you_mean, expected

# The size of an axis: a number, a set of allowed numbers, or None for any.
Size = int | set[int] | None


@contextlib.contextmanager
def chex_as_value_error(name: str, needed: object, got: object) -> Iterator[None]:
    """Turns chex's ``AssertionError`` into the library's ``ValueError``."""
    try:
        yield
    except AssertionError:
        raise expected(name, needed, got) from None


def check_shape(name: str, array: Any, axes: str, *sizes: Size) -> None:
    """Raises ``ValueError`` unless this is an array with these axes.

    Args:
      name: the argument.
      array: any array.
      axes: the letters, as in ``"B T N H"``.
      *sizes: one for each letter.
    """
    if not hasattr(array, "shape"):
        raise expected(name, f"an array {layout(axes, *sizes)}", a_thing(array))
    shape = np.shape(array)
    with chex_as_value_error(name, layout(axes, *sizes), shape):
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
        words = map(str, size)  # Sizes cannot be compared if one is symbolic.
        return "|".join(sorted(words, key=lambda word: (len(word), word)))
    return letter if size is None else str(size)


def check_float(name: str, array: Any) -> None:
    """Raises ``ValueError`` unless this is an array of a floating dtype."""
    if not hasattr(array, "dtype"):
        raise expected(name, "a floating array", f"{array!r}")
    dtype = jnp.result_type(array)
    with chex_as_value_error(name, "a floating dtype", dtype):
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
      value: `[B, S, N, Hv]`, or None for weights only.
      is_causal: if True, T must equal S.
    """
    check_flag("is_causal", is_causal)
    arrays = {"query": (query, "B T N H"), "key": (key, "B S N H")}
    if value is not None:
        arrays["value"] = value, "B S N Hv"
    for name, (array, axes) in arrays.items():
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

    def allow(count: int) -> Size:  # If not, the error lists the divisors.
        return count if count in shared else shared

    positions = key.shape[1]
    sizes = batch, positions, allow(key.shape[2]), width
    check_shape("key", key, "B S N H", *sizes)
    if value is not None:
        sizes = batch, positions, allow(value.shape[2]), None
        check_shape("value", value, "B S N Hv", *sizes)
    if is_causal and length != key.shape[1]:
        needed = "query and key of the same length (T == S)"
        if length == 1:
            needed += ", or False for one query that sees all keys, as in decoding"
        raise expected("is_causal", needed, f"T={length} and S={key.shape[1]}")


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
    rows: Any,
) -> None:
    """Raises ``ValueError`` unless the grid is None or fits the inputs.

    ``rows`` are the documents of packed rows, or None.
    """
    if grid is None:
        return
    size = check_sides("grid", grid)
    for name, length in {"query": query.shape[1], "key": key.shape[1]}.items():
        if length != size:
            needed = f"the length of {name}, {length}, as rows * columns"
            raise expected("grid", needed, tuple(grid))
    if is_causal:
        raise expected("is_causal", "False with a grid", True)
    if rows is not None:
        raise expected("segment_ids", "None with a grid", "an array")


SIZES = frozenset({"num_heads", "head_dim", "max_length", "layer", "num_layers"})
"""The sizes of a layer; an ``X_parameters`` ignores those that it does not need."""

# Passed to an ``attention_fn`` by ``flax.nnx.MultiHeadAttention`` and Linen's.
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
    _refuse_unknown(function, flax.keys() - FLAX_KEYWORDS)
    by_layer = deterministic is not None or "deterministic" in flax
    if flax.get("dropout_rate") and not by_layer:
        needed = "0, because there are no weights to drop"
        raise expected("dropout_rate", needed, flax["dropout_rate"])


def check_sizes(function: Callable[..., Any], sizes: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` unless the extra keywords of ``X_parameters`` are sizes."""
    _refuse_unknown(function, sizes.keys() - SIZES)


def _refuse_unknown(function: Callable[..., Any], names: Collection[str]) -> None:
    for name in sorted(names):
        parameters = inspect.signature(function).parameters.values()
        known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        needed = f"a keyword of {function.__name__}"
        raise expected(name, needed, f"an unknown one{did_you_mean(name, known)}")


def refuse_decoding(
    deterministic: bool | None, query: jax.Array, key: jax.Array, name: str
) -> None:
    """Raises ``ValueError`` if a Flax layer passes one query and more than one key.

    With ``decode=True`` that layer caches keys and values, but does not pass on the
    query's position or the earlier queries. Mechanisms that depend on these call this.
    Their parameter ``deterministic`` is not None if a layer calls them: Linen's layer
    passes only keywords that a function names.
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


def refuse_without_gates(
    deterministic: bool | None, name: str, *gates: jax.Array | None
) -> None:
    """Raises ``ValueError`` if a Flax layer calls a mechanism without its gates.

    Gates depend on the input, and that layer has no projections for them. As in
    `refuse_decoding`, ``deterministic`` is not None if a layer calls.
    """
    if deterministic is not None and all(gate is None for gate in gates):
        layer = f"lra_jax.models.MultiHeadAttention(mechanism={name!r})"
        raise expected("attention_fn", f"{layer}, which makes the gates", name)


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


def of_jax(array: Any) -> Any:
    """A NumPy array as a jax array; anything else is unchanged.

    float64 becomes float32, unless jax has 64 bits enabled.
    """
    return jnp.asarray(array) if isinstance(array, np.ndarray) else array


def accumulation_dtype(*arrays: jax.Array) -> jnp.dtype:
    """float64 if any array is float64, else float32.

    NumPy arrays of float64 count as float32 unless jax has 64 bits enabled.
    """
    wide = any(jnp.result_type(array) == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def align(array: jax.Array, rank: int) -> jax.Array:
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
