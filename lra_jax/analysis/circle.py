"""The circle: a recurrent layer learns to step along it, and is then rolled out
(Dong, Cordonnier and Loukas 2021, Figure 6).

A sequence is two points half a circle apart; the target is the next two points. After
training the layer runs on its own output. Without a skip connection around it and
without an MLP, the two points converge to one place: the rank collapses.

As in the published code, the layer has its own skip connection around attention in
every variant; the variants differ in one around the whole layer. In training that
connection adds the *previous batch*, not the output of the previous step; the roll-out
adds the correct one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lra_jax.analysis.fitting import fit_epochs
from lra_jax.analysis.path_network import PathNetwork, PathSettings
from lra_jax.analysis.path_tasks import circle


@dataclasses.dataclass(frozen=True)
class CircleSettings:
    """How the layer is trained; the defaults are those of the published command.

    Attributes:
      width, num_heads: of the single layer.
      num_points: on the circle.
      epochs, batch_size, learning_rate: of Adam, with batches in circle order.
      steps: of the roll-out.
      dropout: while training.
    """

    width: int = 32
    num_heads: int = 2
    num_points: int = 1000
    epochs: int = 70
    batch_size: int = 30
    learning_rate: float = 1e-5
    steps: int = 300
    dropout: float = 0.1


TRAINED_CIRCLE = CircleSettings(learning_rate=1e-3)
"""As published, except for a learning rate at which the layer learns more."""


class CircleRun(NamedTuple):
    """Attributes: `trajectory`, `[steps, 2, 2]`: step, point, coordinate; `losses`, the
    mean squared error of a step, summed over a sequence, by epoch."""

    trajectory: np.ndarray
    losses: np.ndarray

    @property
    def spread(self) -> np.ndarray:
        """Distance between the two points at each step."""
        return np.linalg.norm(self.trajectory[:, 0] - self.trajectory[:, 1], axis=-1)


def run_circle(
    settings: CircleSettings,
    *,
    skip: bool,
    mlp: bool,
    mechanism: str = "softmax",
    seed: int = 0,
) -> CircleRun:
    """Trains one layer and rolls it out.

    Args:
      settings: of the training.
      skip: add a skip connection around the layer.
      mlp: add an MLP.
      mechanism: attention of the layer.
      seed: of weights and dropout.
    """
    shape = PathSettings(
        settings.width,
        num_layers=1,
        num_heads=settings.num_heads,
        num_outputs=2,
        mlp=mlp,
        dropout=settings.dropout,
    )
    points = circle(settings.num_points)
    half = settings.num_points // 2 - 1
    here = np.stack([points[:half], points[half : 2 * half]], 1)
    there = np.stack([points[1 : half + 1], points[half + 1 : 2 * half + 1]], 1)
    model = PathNetwork(shape, mechanism, rngs=nnx.Rngs(seed))
    graph, params = nnx.split(model, nnx.Param)
    params, losses = _fit(graph, params, here, there, settings, skip, seed)
    path = _roll_out(graph, params, jnp.asarray(here[:1]), settings.steps, skip)
    return CircleRun(np.asarray(path), losses)


def _fit(
    graph: Any,
    params: Any,
    here: np.ndarray,
    there: np.ndarray,
    settings: CircleSettings,
    skip: bool,
    seed: int,
) -> tuple[Any, np.ndarray]:
    size = settings.batch_size
    steps = len(here) // size
    # The published code adds the previous batch to each batch.
    before = np.concatenate([np.zeros_like(here[:size]), here])[: len(here)]
    given = here + before if skip else here
    data = tuple(
        jnp.asarray(array[: steps * size].reshape(steps, size, 2, 2))
        for array in (given, there)
    )
    optimizer = optax.adam(settings.learning_rate)

    def loss(params: Any, inputs: Any, targets: Any, key: Any) -> jax.Array:
        out = nnx.merge(graph, params)(inputs, None, nnx.Rngs(dropout=key))
        return jnp.sum((out - targets) ** 2)

    params, losses = fit_epochs(loss, params, data, optimizer, settings.epochs, seed)
    return params, losses / size


def _roll_out(
    graph: Any, params: Any, start: jax.Array, steps: int, skip: bool
) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        out = nnx.merge(graph, params)(x)
        return (x + out if skip else out), out

    _, outs = jax.lax.scan(step, start, None, length=steps - 1)
    return jnp.concatenate([start, outs[:, 0]])
