"""Many evaluation steps, one after the other, on more CPU devices than cores.

    python many_calls.py DEVICES CALLS

Prints the sum over all calls; `test_sharding.py` runs it.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

from lra_jax.training import sharding


def add_batch(weights: jax.Array, sums: jax.Array, batch: dict) -> jax.Array:
    """Adds a batch to the sums, by six all-reduces in turn."""
    x = batch["x"]
    for _ in range(6):
        x = jnp.tanh(x @ weights)
        x += 1 - x.mean(0, keepdims=True)
    return sums + x.sum()


def main(devices: int, calls: int) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = sharding.make_mesh((devices,))
    step = sharding.under_mesh(mesh, jax.jit(add_batch, donate_argnums=1))
    weights = sharding.replicate(mesh, np.eye(256, dtype=np.float32))
    sums = sharding.replicate(mesh, np.zeros((), np.float32))
    rows = np.ones((8 * devices, 256), np.float32)
    for _ in range(calls):
        sums = step(weights, sums, sharding.shard_batch(mesh, {"x": rows}))
    print(float(sums))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
