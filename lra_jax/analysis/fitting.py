"""Training for the small networks of the path experiments; an epoch is one program."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from lra_jax import progress


def fit_epochs(
    loss: Callable[..., jax.Array],
    params: Any,
    data: tuple[jax.Array, ...],
    optimizer: optax.GradientTransformation,
    epochs: int,
    seed: int,
) -> tuple[Any, np.ndarray]:
    """Trains on the batches in the same order in every epoch.

    Args:
      loss: maps ``(params, *batch, key)`` to a scalar; the key is for dropout.
      params: initial parameters.
      data: arrays `[steps, ...]`, one batch per step.
      optimizer: for all parameters.
      epochs: number of epochs.
      seed: of the keys.

    Returns:
      The parameters, and the mean loss of each epoch.
    """

    def step(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, state, key = carry
        key, own = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, *batch, own)
        with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
            updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, key), value

    epoch = jax.jit(lambda carry, data: jax.lax.scan(step, carry, data))
    carry = (params, optimizer.init(params), jax.random.key(seed))
    losses = []
    for _ in progress.told(range(epochs), "epochs", epochs):
        carry, values = epoch(carry, data)
        losses.append(float(values.mean()))
    return carry[0], np.array(losses)
