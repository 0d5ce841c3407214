"""Kernel calls on several devices: each computes its own samples.

The compiler cannot split a kernel call, but samples are independent. So on a mesh of
``jax.set_mesh`` whose axis "data" spans all devices, a call is made inside
``jax.shard_map``, with a part of the samples on each.
"""

from collections.abc import Callable

import jax
from jax.sharding import AxisType, PartitionSpec

from lra_jax.kernels.spec import Inputs

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
    # Of explicit axes the arrays may be split in other ways.
    return count if splits and set(mesh.axis_types) == {AxisType.Auto} else None


def on_each_device(attend: Callable[[Inputs], jax.Array], given: Inputs) -> jax.Array:
    """``attend(given)``, `[B, T, N, Hv]`, by `parts`."""
    batch, _, heads, _ = given.query.shape
    if (parts(batch) or 1) == 1:
        return attend(given)

    def local(query: jax.Array, key: jax.Array, value: jax.Array, *rest) -> jax.Array:
        arrays = (_by_head(x, heads) for x in (query, key, value))
        return _merged(attend(Inputs(*arrays, *rest)))

    samples = PartitionSpec(_AXIS)
    split = jax.shard_map(local, in_specs=samples, out_specs=samples)
    # A TPU's compiler copies arrays whose heads are split off on one side of the call
    # and merged again on the other.
    return _by_head(split(*(_merged(x) for x in given[:3]), *given[3:]), heads)


def _merged(x: jax.Array) -> jax.Array:
    batch, length, heads, width = x.shape
    return x.reshape(batch, length, heads * width)


def _by_head(x: jax.Array, heads: int) -> jax.Array:
    batch, length, width = x.shape
    return x.reshape(batch, length, heads, width // heads)
