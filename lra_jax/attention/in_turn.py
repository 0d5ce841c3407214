"""Packed rows for mechanisms that cannot compute all documents at once.

These mechanisms mix positions by a transform, a hash, a block pattern or learned
columns that are tied to the start of a sequence. So the documents of a row are moved to
its start one after another, and each is computed there like a padded sample: exactly,
at the cost of a whole row per document. Memory does not depend on the number of
documents, even in the gradient, because intermediate results are recomputed. The number
of documents is not known when a program is compiled, so a packed row has a gradient,
but no gradient of the gradient.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, cast

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.attention import inputs, masking, packed
from lra_jax.attention.call import bind
from lra_jax.attention.table import MECHANISMS

P = ParamSpec("P")

# Arguments with one entry for each position.
_BY_POSITION = ("query", "key", "value", "gate")


def documents_in_turn(
    attention: Callable[P, jax.Array],
    check: Callable[[dict[str, Any]], None] | None = None,
) -> Callable[P, jax.Array]:
    """Makes an ``X_attention`` that declares ``segment_ids`` support packed rows.

    It also checks what needs no array: keywords, and whether X has a causal form.

    Args:
      attention: a function of query, key, value, a mask and options, exact under
        padding on the right. It is itself never called with ``segment_ids``.
      check: raises if the arguments of a packed row hold an option under which padding
        is not exact; None = there is none.
    """
    signature, function = inspect.signature(attention), cast(Any, attention)
    entry = MECHANISMS[function.__name__.removesuffix("_attention")]

    @functools.wraps(attention)
    def with_documents(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
        keywords = bind(function.__name__, signature, args, kwargs)
        flax, layer = keywords.pop("flax"), keywords.get("deterministic")
        inputs.check_keywords(attention, flax, layer)
        if not entry.causal:
            reason = f"{entry.name} attention has no causal form"
            inputs.refuse_causal(keywords["is_causal"], reason)
        keywords["query"] = inputs.of_jax(keywords["query"])
        if (ids := keywords.pop("segment_ids")) is None:
            return function(**keywords)
        if check is not None:
            check(keywords)
        rows: Any = packed.documents(ids, keywords["query"], keywords["key"])
        masks = {"mask": _mask("mask", keywords, rows)}
        if "query_mask" in signature.parameters:
            masks["query_mask"] = _mask("query_mask", keywords, rows)
        arrays: dict[str, Any] = {}  # [B, T, ...]
        parameters: dict[str, Any] = {}  # others with a gradient
        fixed: dict[str, Any] = {}  # others without
        options: dict[str, Any] = {}
        for name, x in keywords.items():
            if not isinstance(x, jax.Array | np.ndarray):
                options[name] = x
            elif name in _BY_POSITION:
                arrays[name] = x
            elif jnp.issubdtype(x.dtype, jnp.floating):
                parameters[name] = x
            else:
                fixed[name] = x

        def alone(arrays: dict, masks: dict, parameters: dict, fixed: dict) -> Any:
            return function(**arrays, **masks, **parameters, **fixed, **options)

        return _in_turn(alone, arrays, parameters, (rows.label, masks, fixed))

    return with_documents


def _mask(name: str, keywords: dict[str, Any], rows: packed.Packed) -> jax.Array | None:
    """The real positions of documents that a mask leaves."""
    batch, length = rows.real.shape
    mask = masking.padding_mask(keywords.pop(name), batch, length, name)
    return packed.real_positions(mask, rows)


class _Place(NamedTuple):
    """Where one document of each row is."""

    there: jax.Array  # `[B, T]` indices: position i of the document, in the row
    back: jax.Array  # position i of the row, in the document
    inside: jax.Array  # which positions of the row belong to the document, boolean
    real: jax.Array  # which positions it fills when moved to the start, boolean


def _place(label: jax.Array, number: jax.Array) -> _Place:
    length = label.shape[1]
    at = jnp.arange(length, dtype=jnp.int32)[None]
    inside = label == number
    first = jnp.argmax(inside, 1).astype(jnp.int32)[:, None]
    return _Place(
        jnp.minimum(at + first, length - 1),
        jnp.maximum(at - first, 0),
        inside,
        at < inside.sum(1, dtype=jnp.int32)[:, None],
    )


def _take(x: jax.Array, index: jax.Array, where: jax.Array) -> jax.Array:
    """`[B, T, ...]` in another order, zero except at ``where``."""
    x = jnp.take_along_axis(x, inputs.align(index, x.ndim), 1)
    # Typed, because masks are moved too, and a number would not stay boolean.
    return jnp.where(inputs.align(where, x.ndim), x, jnp.zeros((), x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_turn(
    alone: Callable[..., jax.Array], arrays: dict, parameters: dict, fixed: tuple
) -> jax.Array:
    label, masks, others = fixed

    def turn(number: jax.Array, out: jax.Array) -> jax.Array:
        place = _place(label, number)
        moved, shown = _move(place, arrays), _move(place, masks)
        part = alone(moved, shown, parameters, others)
        return out + _take(part, place.back, place.inside)

    like = jax.eval_shape(alone, arrays, masks, parameters, others)
    start = jnp.zeros_like(like, device=like.sharding)
    return jax.lax.fori_loop(1, label.max() + 1, turn, start)


def _forward(
    alone: Callable[..., jax.Array], *arguments: Any
) -> tuple[jax.Array, tuple]:
    return _in_turn(alone, *arguments), arguments


def _backward(
    alone: Callable[..., jax.Array], arguments: tuple, of_out: jax.Array
) -> tuple:
    arrays, parameters, fixed = arguments
    label, masks, others = fixed

    def turn(number: jax.Array, slopes: tuple) -> tuple:
        place = _place(label, number)
        shown = _move(place, masks)

        def call(arrays: dict, parameters: dict) -> jax.Array:
            return alone(arrays, shown, parameters, others)

        pull = jax.vjp(call, _move(place, arrays), parameters)[1]
        of_moved, of_parameters = pull(_take(of_out, place.there, place.real))
        of_arrays = jax.tree.map(lambda x: _take(x, place.back, place.inside), of_moved)
        return jax.tree.map(
            lambda total, part: total + part.astype(total.dtype),
            slopes,
            (of_arrays, of_parameters),
        )

    # Every document adds to the slopes of the parameters.
    wide = jax.tree.map(lambda x: x.astype(inputs.accumulation_dtype(x)), parameters)
    start = jax.tree.map(jnp.zeros_like, (arrays, wide))
    of_arrays, of_wide = jax.lax.fori_loop(1, label.max() + 1, turn, start)
    of_parameters = jax.tree.map(lambda x, y: x.astype(y.dtype), of_wide, parameters)
    return of_arrays, of_parameters, None


_in_turn.defvjp(_forward, _backward)


def _move(place: _Place, tree: Any) -> Any:
    """Every array with the document's positions at the start, followed by zeros."""
    return jax.tree.map(lambda x: _take(x, place.there, place.real), tree)
