"""How arrays are placed on devices: one mesh over all of them; jit does the rest.

The mesh has the axes "data", which splits the batch, and "seq", which splits each
sequence (`lra_jax.attention.sharded.sequence`); parameters are replicated.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lra_jax.errors import expected


def make_mesh(
    batch_sizes: tuple[int, ...], seq_devices: int = 1, training: bool = True
) -> Mesh:
    """A mesh ``("data", "seq")`` of shape (devices / seq_devices, seq_devices).

    For training on an accelerator it spans all devices. Otherwise it takes as many as
    divide the batch sizes: on a CPU, devices only serve to use the cores, and a run may
    be scored on more devices than it was trained on.

    Raises:
      ValueError: seq_devices does not divide the devices, or these a batch size.
    """
    devices = jax.devices()
    if len(devices) % seq_devices:
        needed = f"a divisor of {len(devices)}, the number of devices"
        raise expected("--train.seq_devices", needed, seq_devices)
    count = len(devices) // seq_devices
    fewer = jax.default_backend() == "cpu" or not training
    if fewer and jax.process_count() == 1:
        while any(size % count for size in batch_sizes):
            count -= 1
    for size in batch_sizes:
        if size % count:
            raise expected(
                "--train.batch_size and --train.eval_batch_size",
                f"multiples of the {count} devices that split the batch",
                size,
            )
    # Auto, not Explicit: nnx.Embed cannot look up a batch-sharded array otherwise.
    return jax.make_mesh(
        (count, seq_devices),
        ("data", "seq"),
        axis_types=(AxisType.Auto,) * 2,
        devices=devices[: count * seq_devices],
    )


def padded_length(mesh: Mesh, length: int) -> int:
    """The length to which sequences are padded so that the devices divide it."""
    parts = mesh.shape["seq"]
    return -(-length // parts) * parts


def under_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called under ``jax.set_mesh``.

    That is how kernels, split sequences and the dense layers find the mesh.

    On CPU devices a call returns when its work is done. XLA has one thread for each of
    them; if several programs were under way, those of one device could occupy all
    threads and wait there for an all-reduce with another device, which never starts.
    """
    waits = mesh.devices.flat[0].platform == "cpu"

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        # Where jax itself turns the search for NaN off, it may stay off (jax 0.10).
        nans = jax.config.jax_debug_nans  # pyright: ignore
        with jax.set_mesh(mesh), jax.debug_nans(nans):
            result = function(*args)
        return jax.block_until_ready(result) if waits else result

    return call


@functools.cache
def data_shard(mesh: Mesh) -> tuple[int, int]:
    """Which part of each batch this process reads: its index, and how many there are.

    Processes whose devices hold parts of the same sequences read the same rows.

    Raises:
      ValueError: this process's devices are not adjacent on the data axis.
    """
    total = mesh.shape["data"]
    rows: dict[int, list[int]] = {jax.process_index(): []}
    for (row, *_), device in np.ndenumerate(mesh.devices):
        held = rows.setdefault(device.process_index, [])
        held += [row] if row not in held else []
    for held in rows.values():  # Of every process: all of them must stop.
        size, first = len(held), min(held, default=0)
        is_part = bool(size) and not total % size and not first % size
        if not is_part or held != list(range(first, first + size)):
            raise expected(
                "--train.seq_devices",
                "the devices of a process side by side on the data axis of the mesh",
                f"its rows {held} of {total}",
            )
    mine = rows[jax.process_index()]
    return mine[0] // len(mine), total // len(mine)


def replicated_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Replicates a tree on every device; all processes must pass the same one."""
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(
            replicated_sharding(mesh), np.asarray(x), np.shape(x)
        ),
        tree,
    )


def shard_batch(mesh: Mesh, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Splits a batch over the mesh: samples over "data", positions over "seq".

    The batch has the rows that this process reads (`data_shard`); arrays of two axes or
    more are sequences, padded with zeros to `padded_length`.
    """
    _, count = data_shard(mesh)

    def place(rows: np.ndarray) -> jax.Array:
        if rows.ndim > 1:
            missing = padded_length(mesh, rows.shape[1]) - rows.shape[1]
            widths = ((0, 0), (0, missing), *((0, 0),) * (rows.ndim - 2))
            rows = np.pad(rows, widths) if missing else rows
        names = ("data", "seq") if rows.ndim > 1 else ("data",)
        sharding = NamedSharding(mesh, PartitionSpec(*names))
        shape = (len(rows) * count, *rows.shape[1:])
        return jax.make_array_from_process_local_data(sharding, rows, shape)

    return {name: place(rows) for name, rows in batch.items()}
