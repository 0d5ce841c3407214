"""Calls on several devices, each of which computes its own samples.

The compiler cannot split the call of a kernel, nor some operations of its own, such as
a Fourier transform, but samples are independent. So on a mesh of ``jax.set_mesh`` whose
axis "data" spans all devices, a call is made inside ``jax.shard_map``, with a part of
the samples on each.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, PartitionSpec

from lra_jax.kernels.spec import Inputs

Result = TypeVar("Result")

_AXIS = "data"


def parts(batch: int) -> int | None:
    """The number of parts into which a call is split; None = it cannot be.

    Inside ``jax.shard_map`` over the whole mesh, and on a single device, it is 1.

    Args:
      batch: the number of samples, B, which the devices must divide.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        return 1 if jax.device_count() == 1 else None
    if mesh.size == 1 or set(mesh.manual_axes) == set(mesh.axis_names):
        return 1
    count = mesh.shape.get(_AXIS, 0)
    splits = count == mesh.size and batch % count == 0
    # Along explicit axes, arrays may be split in other ways.
    return count if splits and set(mesh.axis_types) == {AxisType.Auto} else None


def on_each_device(
    attend: Callable[[Inputs], jax.Array], operands: Inputs
) -> jax.Array:
    """``attend(operands)``, `[B, T, N, Hv]`, by `parts`."""
    batch, _, heads, _ = operands.query.shape
    if (parts(batch) or 1) == 1:
        return attend(operands)

    # Arrays pass with their heads side by side: of others, whose heads are split off
    # before this call and merged again inside, a TPU's compiler makes copies.
    def local(operands: Inputs) -> jax.Array:
        return _merge_heads(
            attend(_map_arrays(operands, lambda x: _split_heads(x, heads)))
        )

    return _split_heads(by_sample(local, _map_arrays(operands, _merge_heads)), heads)


def by_sample(
    function: Callable[..., Result], *arrays: Any, shared: tuple[Any, ...] = ()
) -> Result:
    """``function(*shared, *arrays)``, by `parts`, or by the split of an explicit axis.

    Args:
      function: of trees of arrays to such a tree; the first axis of each array is that
        of the samples, or of something else that is computed separately.
      *arrays: its arguments.
      shared: arguments before these that every device has whole.
    """
    leaves = jax.tree.leaves(arrays)
    axis = _AXIS if (parts(leaves[0].shape[0]) or 1) > 1 else _explicit_axis(leaves)
    if axis is None:
        return function(*shared, *arrays)
    samples = PartitionSpec(axis)
    specs = (*[PartitionSpec()] * len(shared), *[samples] * len(arrays))
    by_device = jax.shard_map(function, in_specs=specs, out_specs=samples)
    return by_device(*shared, *arrays)


def _explicit_axis(arrays: list[jax.Array]) -> Any:
    """The explicit axis along which the samples of all arrays are split, and nothing
    else is; None = there is none."""
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    first = {spec[0] for spec in specs}
    others = {axis for spec in specs for axis in spec[1:]}
    return first.pop() if len(first) == 1 and others <= {None} else None


def _map_arrays(operands: Inputs, change: Callable[[jax.Array], jax.Array]) -> Inputs:
    """The inputs with query, key and value in another form."""
    return operands._replace(
        query=change(operands.query),
        key=change(operands.key),
        value=change(operands.value),
    )


def _merge_heads(x: jax.Array) -> jax.Array:
    batch, length, heads, width = x.shape
    return x.reshape(batch, length, heads * width)


def _split_heads(x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads)
