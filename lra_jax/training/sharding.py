"""Data parallelism: one mesh over all devices, jit does the rest."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def make_mesh(batch_sizes: tuple[int, ...]) -> Mesh:
    """A mesh ``("data", "seq")`` of shape (devices, 1).

    On an accelerator it spans all devices. On CPU, where devices are only a way to use
    the cores, it takes as many as divide the batch sizes.

    Raises:
      ValueError: the devices do not divide a batch size.
    """
    devices = jax.devices()
    count = len(devices)
    if jax.default_backend() == "cpu" and jax.process_count() == 1:
        while any(size % count for size in batch_sizes):
            count -= 1
    for size in batch_sizes:
        if size % count:
            raise ValueError(
                f"--train.batch_size and --train.eval_batch_size must be multiples of "
                f"the {count} devices, got {size}"
            )
    # Auto, not Explicit: nnx.Embed cannot look up a batch-sharded array otherwise.
    return jax.make_mesh(
        (count, 1),
        ("data", "seq"),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[:count],
    )


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Places a tree whole on every device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Splits a host's rows of a batch over the data axis."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    return {
        name: jax.make_array_from_process_local_data(sharding, array)
        for name, array in batch.items()
    }
