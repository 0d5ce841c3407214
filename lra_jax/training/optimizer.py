"""Learning-rate schedules by name, and the optimizer that a config describes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from lra_jax.configs import TrainConfig
from lra_jax.configs.base import PretrainConfig, Schedule
from lra_jax.errors import expected, known
from lra_jax.models.config import parse_options
from lra_jax.models.parts import make_part


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
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps)
    if config.schedule.startswith("lra"):
        return functools.partial(_lra, config=config)
    rise = optax.constant_schedule(peak)  # Optax does not accept a ramp of 0 steps.
    if warmup:
        rise = optax.linear_schedule(0.0, peak, warmup)
    if config.schedule == "constant":
        return rise
    top = warmup if config.schedule == "linear" else falls
    fall = optax.linear_schedule(peak, 0.0, steps - top)
    return optax.join_schedules([rise, fall], [top])


def _lra(step: jax.typing.ArrayLike, config: TrainConfig) -> jax.Array:
    """The schedules "lra" and "lra_cosine"."""
    peak, warmup = config.learning_rate, config.warmup
    done = jnp.asarray(step, jnp.float32)
    ramp = jnp.minimum(1.0, done / warmup) if warmup else jnp.float32(1)
    if config.schedule == "lra":
        return peak * ramp / jnp.sqrt(jnp.maximum(done, max(warmup, 1)))
    part = jnp.mod(jnp.maximum(0.0, done - warmup) / config.steps, 1.0)
    return peak * ramp * jnp.maximum(0.0, 0.5 * (1 + jnp.cos(jnp.pi * part)))


def make_optimizer(
    config: TrainConfig, pretrain: PretrainConfig | None = None
) -> optax.GradientTransformation:
    """The optimizer on the schedule, after clipping to ``clip_norm`` unless it is 0.

    Weight decay is decoupled for all of them. Without ``decay_vectors``, it skips
    arrays of one axis and norms' scales.

    Any function other than Adam's is called as ``function(schedule, **options)``, and
    returns an `optax.GradientTransformation` that includes the learning rate. Its
    parameter ``labels``, if it has one, gets `label_parameters`, and ``weight_decay``
    gets 0 unless it is among the options.

    Raises:
      ValueError: there is no such function, it does not take a schedule and these
        options, or it returns something else; or it counts the schedule's steps where
        `renew` cannot find them, although there is pretraining.
    """
    schedule = make_schedule(config, pretrain)
    mask = None if config.decay_vectors else _is_matrix
    decay = (
        optax.add_decayed_weights(config.weight_decay, mask),
        optax.scale_by_learning_rate(schedule),
    )
    options = parse_options(config.optimizer_options, "--train.optimizer_options")
    if config.optimizer in _ADAMS:
        moments = {
            name: getattr(config, f"adam_{name}") for name in ("b1", "b2", "eps")
        }
        scale = _make(config.optimizer, _ADAMS, {}, moments | options)
        steps = optax.chain(scale, *decay)
    else:
        steps = _make(config.optimizer, _OTHERS, {"schedule": schedule}, options)
        if pretrain is not None and pretrain.steps and not _keeps_schedule(steps):
            needed = f"0 with --train.optimizer={config.optimizer}, which has no "
            needed += "optax.scale_by_schedule to go on"
            raise expected("--pretrain.steps", needed, pretrain.steps)
        if config.weight_decay:
            steps = _add_updates(steps, optax.chain(*decay))
    if config.clip_norm == 0:
        return steps
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), steps)


def label_parameters(params: Any) -> Any:
    """A label for each parameter, in a tree like theirs.

    "matrix": the kernel of a layer between the inputs and the logits, `[in, out]`.
    "table": any other array of two axes or more, such as embeddings, positions, the
    kernel of the logits and those of convolutions. "vector": an array of one axis or
    none, or a norm's scale, which has an axis for heads if each has its own norm.
    """

    def label(path: tuple[Any, ...], x: jax.Array) -> str:
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        if x.ndim < 2 or "gain" in names:
            return "vector"
        is_layer = "kernel" in names and not _OUTER & {*names}
        return "matrix" if is_layer and x.ndim == 2 else "table"

    return jax.tree_util.tree_map_with_path(label, params)


def renew(state: optax.OptState, fresh: optax.OptState) -> optax.OptState:
    """The fresh state of an optimizer, in which the schedule goes on."""
    return jax.tree.map(
        lambda new, old: old if _is_schedule(old) else new,
        fresh,
        state,
        is_leaf=_is_schedule,
    )


def _is_schedule(part: Any) -> bool:
    return isinstance(part, optax.ScaleByScheduleState)


def _keeps_schedule(optimizer: optax.GradientTransformation) -> bool:
    """Whether `renew` finds the step of the schedule in the optimizer's state."""
    with jax.numpy_dtype_promotion("standard"):  # Optax relies on it.
        state = jax.eval_shape(optimizer.init, {"kernel": jnp.zeros((2, 2))})
    return any(map(_is_schedule, jax.tree.leaves(state, is_leaf=_is_schedule)))


def _muon(
    schedule: optax.Schedule, labels: Callable[[Any], Any], **options: Any
) -> optax.GradientTransformation:
    """Optax's Muon, for matrices; Adam for the other parameters."""
    from optax import contrib

    def dimensions(params: Any) -> Any:
        number = contrib.MuonDimensionNumbers()
        return jax.tree.map(lambda x: number if x == "matrix" else None, labels(params))

    more = {"muon_weight_dimension_numbers": dimensions, **options}
    return _make("muon", {"muon": contrib.muon}, {"schedule": schedule}, more)


_ADAMS = {"adamw": optax.scale_by_adam, "radam": optax.scale_by_radam}
_OTHERS = {
    "adafactor": optax.adafactor,
    "lion": optax.lion,
    "muon": _muon,
    "sgd": optax.sgd,
}
_OUTER = {
    *("embed", "convs", "logits", "tokens"),
    *("returns", "states", "actions", "head"),  # Of a decision transformer.
}


def _make(
    name: str, parts: dict[str, Any], args: dict[str, Any], options: dict[str, Any]
) -> optax.GradientTransformation:
    """An optimizer, or its direction, by its name or path; see `make_optimizer`."""
    offers = {"labels": label_parameters, "weight_decay": 0.0}
    kind = optax.GradientTransformation
    flag = "--train.optimizer"
    return make_part(flag, name, parts, args, options, kind=kind, offers=offers)


def _add_updates(
    first: optax.GradientTransformation, second: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The updates of the first, plus those of the second for gradients of zero."""

    def init(params: Any) -> optax.OptState:
        return first.init(params), second.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        zeros = jax.tree.map(jnp.zeros_like, updates)
        updates, one = first.update(updates, state[0], params)
        more, two = second.update(zeros, state[1], params)
        return jax.tree.map(jnp.add, updates, more), (one, two)

    return optax.GradientTransformation(init, update)


def _is_matrix(params: Any) -> Any:
    """Which parameters decay without ``decay_vectors``."""
    return jax.tree.map(lambda label: label != "vector", label_parameters(params))
