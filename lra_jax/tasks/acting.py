"""The model, the objective and the score of control: a model that acts."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.configs.base import Config
from lra_jax.data.control import ControlDataset
from lra_jax.data.environments import Act, play
from lra_jax.errors import expected
from lra_jax.models.decision import DecisionTransformer
from lra_jax.models.decoding import state_size
from lra_jax.tasks.base import Batch, Sums, add_up, encoder_config, weigh

_EPISODES = {"train": 10, "valid": 10, "test": 100}


def make_model(config: Config, dataset: ControlDataset, rngs: Any) -> Any:
    """A decision transformer that is long enough for acting.

    Raises:
      ValueError: the attention has no stream, but ``--data.acting`` is one.
    """
    world, streams = dataset.environment, dataset.acting == "stream"
    steps = max(world.horizon if streams else 0, dataset.context)
    sized = encoder_config(config.replace(model={"max_length": 3 * steps}))
    sizes = world.state_dim, world.action_dim, world.horizon
    model = DecisionTransformer(*sizes, config=sized, rngs=rngs)
    if streams and state_size(model.encoder) is None:
        needed = f"context for {config.mixers} attention, which has no stream"
        raise expected("--data.acting", needed, "stream")
    return model


def loss(model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None) -> Sums:
    """Squared error of the actions, averaged over their parts, summed over steps."""
    actor: Any = model
    predicted = actor(*(batch[name] for name in actor.INPUTS), rngs)
    real = jnp.arange(predicted.shape[1])[None] < batch["lengths"][:, None]
    errors = jnp.square(predicted - batch["actions"]).mean(-1)
    return add_up(errors, jnp.zeros(()), weigh(real, batch))


def scores(
    dataset: ControlDataset, split: str, loss: float, model: Any
) -> dict[str, float]:
    """The mean return of acting, from 0 for random actions to 1 for the expert policy,
    and in the environment's own units. Each split has episodes of its own."""
    first = 1_000 * [*_EPISODES].index(split)
    seeds = range(first, first + _EPISODES[split])
    episodes = play(dataset.environment, make_act(dataset, model, len(seeds)), seeds)
    raw = float(episodes.returns.mean())
    return {"return": dataset.normalise(raw), "raw_return": raw}


def make_act(dataset: ControlDataset, model: Any, count: int) -> Act:
    """The model as a policy for this many episodes, compiled once for all of them."""
    graphdef, params = nnx.split(model)
    stream, reread = _programs(graphdef)
    # On one device: these batches are small.
    params = jax.device_put(jax.device_get(params), jax.local_devices()[0])
    world, context = dataset.environment, dataset.context
    shape, widths = (count, world.horizon + context), (1, world.state_dim)
    arrays = [np.zeros((*shape, n), np.float32) for n in (*widths, world.action_dim)]
    returns, states, actions = arrays
    steps = np.minimum(np.arange(shape[1], dtype=np.int32), world.horizon - 1)
    rows, past = (*arrays, np.broadcast_to(steps, shape)), None
    left = np.full(count, dataset.target, np.float64)

    def act(step: int, now: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        nonlocal left, past
        left = left - rewards
        returns[:, step, 0] = dataset.show_returns(left)
        states[:, step] = dataset.standardise(now)
        if dataset.acting == "stream":
            places = step, step, step - 1, step
            inputs = [row[:, place] for row, place in zip(rows, places, strict=True)]
            chosen, past = stream(params, inputs, past)
        else:
            first = max(0, step + 1 - context)
            inputs = [row[:, first : first + context] for row in rows]
            chosen = reread(params, inputs, np.int32(step - first))
        actions[:, step] = chosen
        return actions[:, step]

    return act


@functools.lru_cache(maxsize=4)
def _programs(graphdef: Any) -> tuple[Any, Any]:
    """How a model acts by a stream and by its context, each compiled once in a run."""

    @jax.jit
    def stream(params: Any, inputs: Any, past: Any) -> Any:
        model: Any = nnx.merge(graphdef, params)
        return model.step(*inputs, past)

    @jax.jit
    def reread(params: Any, inputs: Any, last: Any) -> jax.Array:
        """The actions at a step of a window, whose later steps are not real."""
        model: Any = nnx.merge(graphdef, params)
        lengths = jnp.full(len(inputs[0]), last + 1)
        actions = model(*inputs, lengths)
        return jax.lax.dynamic_index_in_dim(actions, last, 1, keepdims=False)

    return stream, reread
