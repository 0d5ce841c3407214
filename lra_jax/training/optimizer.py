"""Learning-rate schedules by name, and the optimiser that a config describes."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from lra_jax.configs import TrainConfig
from lra_jax.configs.base import PretrainConfig, Schedule
from lra_jax.errors import expected, known


def make_schedule(
    config: TrainConfig, pretrain: PretrainConfig | None = None
) -> optax.Schedule:
    """Learning rate as a function of the step, counted from 0.

    Pretraining steps, the first of a run, have their own schedule, as if they were a
    run, and their own peak if one is given.

    With w = ``warmup`` and n = ``steps``:
      cosine: linear to the peak over w steps, then half a cosine to 0 at n.
      linear: linear to the peak over w steps, then linear to 0 at n.
      lra: ``base * min(1, s / w) / sqrt(max(s, w))``, as in the LRA code for text.
      lra_cosine: ``base * min(1, s / w) * (1 + cos(pi max(0, s - w) / n)) / 2``, as in
        the LRA code for images, where one cycle is the whole run.
      constant: linear to the peak over w steps, then constant.
      trapezoid: linear to the peak over w steps, constant up to 4 n / 5, linear to 0
        at n (the warm-up, stable, decay schedule of MiniCPM, arXiv:2404.06395, with a
        linear decay as in arXiv:2405.18392).

    Raises:
      ValueError: an unknown name, or a warm-up as long as the run if the schedule ends
        at its last step.
    """
    known("--train.schedule", config.schedule, get_args(Schedule))
    if pretrain is None or not pretrain.steps:
        return _one_schedule(config, "--train.steps")
    peak = pretrain.learning_rate or config.learning_rate
    first = dataclasses.replace(config, steps=pretrain.steps, learning_rate=peak)
    rest = dataclasses.replace(config, steps=config.steps - pretrain.steps)
    parts = [
        _one_schedule(first, "--pretrain.steps"),
        _one_schedule(rest, "--train.steps less --pretrain.steps"),
    ]
    return optax.join_schedules(parts, [pretrain.steps])


def _one_schedule(config: TrainConfig, name: str) -> optax.Schedule:
    """The schedule of one part of a run, whose number of steps has this name."""
    peak, warmup, steps = config.learning_rate, config.warmup, config.steps
    falls = config.falls
    if config.too_warm:
        limit = "" if falls == steps else f"{falls}, four fifths of "
        needed = f"less than {limit}{name}={steps}"
        raise expected("--train.warmup", needed, warmup)
    match config.schedule:
        case "cosine":
            return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps)
        case "constant":
            return _constant(peak, warmup)
        case "linear" | "trapezoid":
            top = warmup if config.schedule == "linear" else falls
            fall = optax.linear_schedule(peak, 0.0, steps - top)
            return optax.join_schedules([_constant(peak, warmup), fall], [top])
        case "lra":
            start = max(warmup, 1)
            return lambda step: (
                peak * _ramp(step, warmup) / jnp.sqrt(jnp.maximum(_f32(step), start))
            )
        case _:  # lra_cosine
            return lambda step: (
                peak * _ramp(step, warmup) * _cosine(step, warmup, steps)
            )


def make_optimizer(
    config: TrainConfig, pretrain: PretrainConfig | None = None
) -> optax.GradientTransformation:
    """AdamW, or RAdam, on the schedule, after clipping to ``clip_norm`` unless it is 0.

    Without ``decay_vectors``, weight decay skips arrays of one axis and norms' scales.
    """
    is_radam = config.optimizer == "radam"
    scale = optax.scale_by_radam if is_radam else optax.scale_by_adam
    steps = optax.chain(
        scale(b1=config.adam_b1, b2=config.adam_b2, eps=config.adam_eps),
        optax.add_decayed_weights(
            config.weight_decay, None if config.decay_vectors else _matrices
        ),
        optax.scale_by_learning_rate(make_schedule(config, pretrain)),
    )
    if config.clip_norm == 0:
        return steps
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), steps)


def _constant(peak: float, warmup: int) -> optax.Schedule:
    """Linear to the peak, then constant; Optax does not accept a ramp of 0 steps."""
    if warmup == 0:
        return optax.constant_schedule(peak)
    return optax.linear_schedule(0.0, peak, warmup)


def without_moments(state: optax.OptState) -> optax.OptState:
    """The optimiser's state with Adam's moments, and the count of their steps, at zero;
    the schedule goes on."""

    def renewed(part: Any) -> Any:
        is_adam = isinstance(part, optax.ScaleByAdamState)
        return jax.tree.map(jnp.zeros_like, part) if is_adam else part

    return jax.tree.map(
        renewed, state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState)
    )


def _matrices(params: Any) -> Any:
    """Which parameters have two axes or more, and are not a norm's scale, which has an
    axis for heads if each of them has its own norm."""

    def is_matrix(path: tuple[Any, ...], x: jax.Array) -> bool:
        return x.ndim >= 2 and "gain" not in {getattr(key, "key", "") for key in path}

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _f32(step: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(step, jnp.float32)


def _ramp(step: jax.typing.ArrayLike, warmup: int) -> jax.Array:
    return jnp.minimum(1.0, _f32(step) / warmup) if warmup else jnp.float32(1)


def _cosine(step: jax.typing.ArrayLike, warmup: int, cycle: int) -> jax.Array:
    progress = jnp.mod(jnp.maximum(0.0, _f32(step) - warmup) / cycle, 1.0)
    return jnp.maximum(0.0, 0.5 * (1 + jnp.cos(jnp.pi * progress)))
