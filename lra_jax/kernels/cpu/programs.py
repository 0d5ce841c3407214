"""Linear attention and its relatives by the C++ kernels.

See causal.h, whole.h and packed.h.

A task walks up to four neighbouring heads, whose rows are neighbours in memory, through
their chunks of 64 positions. Features, masks, angles and denominators exist only for
one chunk, in the caches. In the causal form the state is carried along; backward, one
walk from the first position computes the queries' gradient, and one from the last
position those of keys and values. Where there are fewer heads than threads, sequences
are cut into segments, whose sums are computed first. Decays that are not causal take a
walk for the keys after each query and one for the others. Otherwise one pass adds up
keys and values, and another reads the sums, in packed rows for each document.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.kernels.cpu import library
from lra_jax.kernels.spec import Gradients, Inputs, Spec

MAPS = ("identity", "elu", "relu", "leaky_relu", "sigmoid", "silu")
"""The feature maps, in the order of `with_map` in vectors.h."""

_DENOMINATORS = ("add", "clamp", "none", "argument", "absolute")


def forward(spec: Spec, operands: Inputs, save: bool) -> tuple[jax.Array, Any]:
    """The output `[B, T, N, Hv]` and, if asked for, what `backward` needs."""
    query, value = operands.query, operands.value
    shapes = [(*query.shape[:3], value.shape[3]), query.shape[:3]]
    kind, arrays = _arrays(spec, operands)
    if kind == "causal":
        arrays.append(absent())  # without scales of rows
    elif kind == "whole":
        shapes.append(sums_shape(query, value, spec.terms))
    name = f"lra_{kind}_forward"
    out, *saved = call(name, shapes, arrays, **_attributes(spec))
    return out, ((out, *saved) if save else ())


def backward(spec: Spec, operands: Inputs, saved: Any, of_out: jax.Array) -> Gradients:
    """The gradients of query, key and value."""
    shapes = [x.shape for x in operands[:3]]
    kind, arrays = _arrays(spec, operands)
    if kind == "causal":
        # There are no weights, so neither they nor the scales need a gradient.
        shapes += [(0,), (0,)]
    arrays += [*saved, of_out]
    name = f"lra_{kind}_backward"
    of_query, of_key, of_value, *_ = call(name, shapes, arrays, **_attributes(spec))
    return of_query, of_key, of_value


def _arrays(spec: Spec, operands: Inputs) -> tuple[str, list[jax.Array]]:
    """The kind of a call, and the arguments that begin it."""
    arrays: list[Any] = [*operands[:3], mask_of(operands.mask), operands.scale]
    arrays.append(units(operands.query))
    if not _walks(spec):
        if operands.documents is None:
            return "whole", arrays
        return "packed", [*arrays, operands.documents]
    factors = operands.slopes, operands.documents
    arrays += [absent() if x is None else x for x in factors]
    return "causal", [*arrays, absent()]  # without weights of rows


def call(
    name: str,
    shapes: list,
    arrays: list,
    added_to: tuple[jax.Array, ...] = (),
    **attributes: Any,
) -> list[jax.Array]:
    """A call of the library, which returns float32 arrays.

    Args:
      name: one of `library.CALLS`.
      shapes: of the results.
      arrays: the arguments.
      added_to: further arguments, to which the first results are added in place.
      **attributes: numbers of the types that the library expects.
    """
    # Inside ``jax.shard_map`` results vary along each mesh axis along which one of the
    # arguments does.
    varies = jax.typeof(sum(x[:0].sum() for x in (*arrays, *added_to)))
    results = [
        jax.ShapeDtypeStruct(
            shape,
            jnp.float32,
            sharding=varies.sharding,
            manual_axis_type=varies.manual_axis_type,
        )
        for shape in shapes
    ]
    function = jax.ffi.ffi_call(
        name,
        results,
        vmap_method="broadcast_all",
        input_output_aliases={len(arrays) + i: i for i in range(len(added_to))},
    )
    return list(function(*arrays, *added_to, **attributes))


def number(feature_map: str) -> np.int64:
    """The number by which the library knows a feature map."""
    return np.int64(MAPS.index(feature_map))


def absent() -> jax.Array:
    """An empty array, in place of one that a call does not have."""
    return jnp.zeros((0,), jnp.float32)


def mask_of(mask: jax.Array | None) -> jax.Array:
    """A mask of `Inputs`, without the axis of heads."""
    return absent() if mask is None else mask[:, 0]


def units(query: jax.Array) -> jax.Array:
    """Features as they are, `[B]`."""
    return jnp.ones(query.shape[:1], jnp.float32)


def denominator(name: str) -> np.int64:
    """The number by which the library knows a denominator.

    With "argument" there is none: the scale of each row is an argument.
    """
    return np.int64(_DENOMINATORS.index(name))


def _walks(spec: Spec) -> bool:
    """Whether sums pass from chunk to chunk: also for decays."""
    return spec.is_causal or spec.decay


def _attributes(spec: Spec) -> dict[str, Any]:
    sides = {"both_sides": not spec.is_causal} if _walks(spec) else {}
    return {
        "map": number(spec.feature_map),
        "turned": spec.rotate,
        "denominator": denominator(spec.denominator),
        "eps": np.float32(spec.eps),
        **sides,
    }


def sums_shape(query: jax.Array, value: jax.Array, terms: int = 1) -> tuple[int, ...]:
    """The sums of whole sequences, `Sums` in chunk.h."""
    width = round_up(query.shape[3]) * terms
    return (query.shape[0], query.shape[2], width * (round_up(value.shape[3]) + 1))


def round_up(size: int) -> int:
    """A number of columns, rounded up to whole registers."""
    lanes = library.lanes()
    return -(-size // lanes) * lanes
