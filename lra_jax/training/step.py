"""The training state, and the two functions that are compiled."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.core import Tracer

from lra_jax.models.norms import RunningMean
from lra_jax.tasks.base import Batch, Sums
from lra_jax.training.optimizer import renew

Loss = Callable[[nnx.Module, Batch, nnx.Rngs | None], Sums]

NO_STEP = -1


class TrainState(NamedTuple):
    """Everything that a step changes; all of it is saved in checkpoints.

    Attributes:
      step: int32 scalar, number of steps done.
      params: float32 parameters, and the model's buffers; steps change only those
        that are running means of batch norms.
      opt_state: state of the optimizer.
      sums: metric sums since they were last drained.
      bad_step: int32 scalar, the first step (from 1) whose loss was not finite, or -1.
      peak: float32 scalar, the largest loss of a step since the sums were drained.
      average: that of the parameters and running means over the steps, for evaluation;
        None = none is kept.
    """

    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState
    sums: Sums
    bad_step: jax.Array
    peak: jax.Array
    average: nnx.State | None = None


def init_state(
    params: nnx.State,
    optimizer: optax.GradientTransformation,
    ema: float = 0.0,
    classes: int = 0,
) -> TrainState:
    """The state before the first step; the optimizer sees only the parameters.

    With ``ema``, the state also keeps an average of the parameters; ``classes`` is that
    of `zero_sums`.
    """
    # A user's parameter may be weakly typed, as jnp.full(4, 2.0) is; after a step it
    # would no longer be, and the step would be compiled again.
    params = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), params)
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
        opt_state = optimizer.init(nnx.filter_state(params, nnx.Param))
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=opt_state,
        sums=zero_sums(classes),
        bad_step=jnp.full((), NO_STEP, jnp.int32),
        peak=jnp.zeros((), jnp.float32),
        # Copies: a step overwrites the state that it gets.
        average=jax.tree.map(jnp.copy, _moving(params)) if ema else None,
    )


def _moving(params: nnx.State) -> nnx.State:
    """The arrays that steps change: parameters, and running means of batch norms."""
    return nnx.filter_state(params, (nnx.Param, RunningMean))


def scored_params(state: TrainState) -> nnx.State:
    """The parameters that evaluations use: the averages, if the state keeps them."""
    if state.average is None:
        return state.params
    return nnx.merge_state(state.params, state.average)


def compiled_step(
    function: Callable[[TrainState, Batch], TrainState],
    shapes: int | None = None,
    placed: jax.sharding.Sharding | None = None,
) -> Callable[[TrainState, Batch], TrainState]:
    """A `step_function`, compiled once for each batch shape; the state is donated.

    More than ``shapes`` batch shapes raise an AssertionError, since each of them costs
    a compilation. ``placed`` is the sharding of the new state; None leaves it to XLA,
    which may split parameters that meet split sequences, such as a table of positions.
    """
    return jax.jit(
        _traced_at_most(shapes, function),
        donate_argnums=0,
        out_shardings=placed,
        compiler_options=_compiler_options(),
    )


def _compiler_options() -> dict[str, str] | None:
    """On a CPU, XLA orders the operations of a step so that they need little memory.

    Its default keeps more of them ready to run at once, which takes up to a quarter
    more memory for the same time, within 3 %, on two cores (docs/performance.md).
    """
    if jax.default_backend() != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def step_function(
    loss: Loss,
    graphdef: Any,
    optimizer: optax.GradientTransformation,
    seed: int,
    learns: Any = nnx.Param,
    renewed_at: int = 0,
    ema: float = 0.0,
) -> Callable[[TrainState, Batch], TrainState]:
    """One training step for a task's objective.

    The dropout key of a step is ``fold_in(key(seed), step)``, so no random state has to
    be saved. Parameters that ``learns``, a filter of Flax NNX, does not select keep
    their values, and their gradients count as zero. After ``renewed_at`` steps, if that
    is not 0, the optimizer's moments and the average start afresh: the old ones belong
    to another loss, or to parameters that were not trained.

    With decay d = ``ema``, the average after t steps is the sum of ``d^(t - k) p_k``
    over the parameters p_k after steps k = 1 to t, divided by that of ``d^(t - k)``.
    """

    def train_step(state: TrainState, batch: Batch) -> TrainState:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        trained, means, buffers = nnx.split_state(
            state.params, nnx.Param, RunningMean, ...
        )
        learned, kept = nnx.split_state(trained, learns, ...)

        def mean_loss(learned: nnx.State) -> tuple[jax.Array, tuple[Sums, nnx.State]]:
            # Copies, which the model may change under the derivative.
            before = jax.tree.map(lambda x: x, means)
            model = nnx.merge(graphdef, learned, kept, before, buffers)
            sums = loss(model, batch, nnx.Rngs(dropout=key))
            return sums["loss"] / sums["count"], (sums, nnx.state(model, RunningMean))

        grads, (sums, moved) = jax.grad(mean_loss, has_aux=True)(learned)
        grads = nnx.merge_state(grads, jax.tree.map(jnp.zeros_like, kept))
        opt_state = state.opt_state
        with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
            if renewed_at:
                begins = state.step == renewed_at
                opt_state = jax.tree.map(
                    lambda new, old: jnp.where(begins, new, old),
                    renew(opt_state, optimizer.init(trained)),
                    opt_state,
                )
            updates, opt_state = optimizer.update(grads, opt_state, trained)
        trained: Any = optax.apply_updates(trained, updates)
        learned, _ = nnx.split_state(trained, learns, ...)
        step = state.step + 1
        first_bad = ~jnp.isfinite(sums["loss"]) & (state.bad_step == NO_STEP)
        params = nnx.merge_state(learned, kept, moved, buffers)
        average: Any = state.average
        if average is not None:
            steps = jnp.maximum(step - renewed_at, 1).astype(jnp.float32)
            share = (1 - ema) / -jnp.expm1(steps * math.log(ema))
            average = optax.incremental_update(_moving(params), average, share)
        return TrainState(
            step=step,
            params=params,
            opt_state=opt_state,
            # Pretraining counts no members of classes.
            sums={name: x + sums.get(name, 0.0) for name, x in state.sums.items()},
            bad_step=jnp.where(first_bad, step, state.bad_step),
            peak=jnp.maximum(state.peak, sums["loss"] / sums["count"]),
            average=average,
        )

    return train_step


def make_eval_step(
    loss: Loss, graphdef: Any, shapes: int | None
) -> Callable[[Any, Sums, Batch], Sums]:
    """Adds the metric sums of a batch, without dropout, to the sums so far.

    ``shapes`` is as in :func:`compiled_step`.
    """

    def eval_step(params: nnx.State, sums: Sums, batch: Batch) -> Sums:
        model = nnx.merge(graphdef, params)
        return jax.tree.map(jnp.add, sums, loss(model, batch, None))

    return jax.jit(_traced_at_most(shapes, eval_step), donate_argnums=1)


def _traced_at_most(
    count: int | None, function: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, which raises an AssertionError when traced more often."""
    if count is None:
        return function
    traces = 0

    @functools.wraps(function)  # jax names the compiled program by the function.
    def traced(*args: Any) -> Any:
        nonlocal traces
        # With JAX_DEBUG_NANS, jax also calls it on arrays.
        traces += isinstance(jax.tree.leaves(args)[0], Tracer)
        if traces > count:
            raise AssertionError(f"{function.__name__!r} is traced > {count} times")
        return function(*args)

    return traced


@jax.jit
def drain(state: TrainState) -> tuple[Sums, jax.Array, jax.Array]:
    """Copies of the metric sums, ``bad_step`` and ``peak``, as the state is donated."""
    return jax.tree.map(jnp.copy, (state.sums, state.bad_step, state.peak))


@jax.jit
def all_finite(params: nnx.State) -> jax.Array:
    """Whether no parameter or buffer is infinite or NaN."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(params)]
    return jnp.stack(finite).all()


def zero_sums(classes: int = 0) -> Sums:
    """Metric sums before any batch; ``classes`` if an example has several of them."""
    zeros = {x: jnp.zeros((), jnp.float32) for x in ("loss", "correct", "count")}
    for name in ("hits", "claims", "members") if classes else ():
        zeros[name] = jnp.zeros(classes, jnp.float32)
    return zeros
