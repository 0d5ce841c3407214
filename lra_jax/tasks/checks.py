"""Finds mistakes in a config before data are made or anything compiles."""

import functools
from typing import Any

from lra_jax.attention import registry
from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import Config, TrainConfig
from lra_jax.data.length_warmup import LengthWarmup
from lra_jax.errors import check_choices, expected, not_negative, positive
from lra_jax.models import EncoderConfig
from lra_jax.tasks.encoder import encoder_config
from lra_jax.tasks.task import Task


def check_config(config: Config, task: Task) -> None:
    """Refuses settings that cannot work, before data are made or anything compiles.

    Args:
      config: the run.
      task: its task.

    Raises:
      ValueError: with the flag, what was expected and what was given.
    """
    if type(config.data) is not task.data:
        got = type(config.data).__name__
        raise expected("--data", f"{task.data.__name__} for --task={task.name}", got)
    for part in ("train", "model", "data"):  # No command line let these pass.
        check_choices(getattr(config, part), f"--{part}.")
    if config.workdir == "":
        raise expected("--workdir", "a folder", "''")
    _check_ranges(config)
    config.data.check()
    _check_length_warmup(config.train, task)
    if task.image_shape is None:
        _refuse_images(config)
    _check_lengths(config, task)
    _check_devices(config)
    encoder = encoder_config(config, task.image_shape)
    _check_implementation(config, encoder)


def _check_implementation(config: Config, encoder: EncoderConfig) -> None:
    """Refuses kernels that this machine, the model's sizes or options cannot have."""
    layer = encoder.attention(0)
    if not layer.mechanism.kernels:
        return
    for block in encoder.block_options:
        if "implementation" not in block:
            continue
        import jax

        shape = (1, encoder.max_length, layer.num_heads, layer.widths.head_dim)
        array: Any = jax.ShapeDtypeStruct(shape, config.train.dtype)
        call = functools.partial(layer.mechanism.attention, **block)
        try:
            jax.eval_shape(call, array, array, array)
        except ValueError as error:
            raise ValueError(f"--model.attention_options: {error}") from error


def _check_devices(config: Config) -> None:
    given = {
        name: getattr(config, name)
        for name in ("coordinator", "num_processes", "process_id")
    }
    named = [name for name, value in given.items() if value is not None]
    if named and (len(named) < 3 or not config.distributed):
        raise expected(
            "--distributed",
            "True with --coordinator, --num_processes and --process_id, or none",
            ", ".join([str(config.distributed), *(f"--{n}={given[n]}" for n in named)]),
        )
    if named:
        _check_processes(config)
    if config.train.seq_devices == 1:
        return
    sequence_parallel(registry.resolve(config.attention))
    for name, only in (("pooling", "mean"), ("padding", "lengths")):
        given = getattr(config.model, name)
        if given != only:
            wanted = f"{only} with --train.seq_devices={config.train.seq_devices}"
            raise expected(f"--model.{name}", wanted, repr(given))


def _check_processes(config: Config) -> None:
    host, _, port = (config.coordinator or "").rpartition(":")
    if not host or not port.isdecimal():
        raise expected("--coordinator", "HOST:PORT", repr(config.coordinator))
    count, index = config.num_processes or 0, config.process_id or 0
    if not 0 <= index < count:
        wanted = f"0..{count - 1} for --num_processes={count}"
        raise expected("--process_id", wanted, index)


def _check_length_warmup(train: TrainConfig, task: Task) -> None:
    try:
        LengthWarmup.parse(train.length_warmup, train.steps)
    except ValueError as error:
        raise ValueError(f"--train.{error}") from error
    if train.length_warmup and task.image_shape is not None:
        wanted = "nothing for images, which stay whole"
        raise expected("--train.length_warmup", wanted, repr(train.length_warmup))


def _refuse_images(config: Config) -> None:
    for name, only in (("inputs", "linear"), ("positions", "learned_2d")):
        if getattr(config.model, name) == only:
            wanted = f"another value for --task={config.task}, which has no images"
            raise expected(f"--model.{name}", wanted, only)


def _check_lengths(config: Config, task: Task) -> None:
    """Refuses a model whose longest sequence is not that of the data."""
    given, longest = config.model.max_length, config.data.longest
    if task.image_shape is not None:
        rows, columns = task.image_shape
        if given != rows * columns:
            wanted = (
                f"{rows * columns} for the {rows} x {columns} of --task={task.name}"
            )
            raise expected("--model.max_length", wanted, given)
    elif longest is not None and longest > given:
        wanted = f"at most --model.max_length={given}"
        raise expected("--data.max_length", wanted, longest)


def _check_ranges(config: Config) -> None:
    for part, names in _POSITIVE.items():
        for name in names:
            positive(f"--{part}.{name}", getattr(getattr(config, part), name))
    for name in _NOT_NEGATIVE_TRAIN:
        not_negative(f"--train.{name}", getattr(config.train, name))
    not_negative("--seed", config.seed)
    shares = {
        "model.dropout": config.model.dropout,
        "train.adam_b1": config.train.adam_b1,
        "train.adam_b2": config.train.adam_b2,
    }
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise expected(f"--{name}", "a number in [0, 1)", value)


_POSITIVE = {
    "train": (
        *("steps", "batch_size", "learning_rate", "eval_every", "eval_batch_size"),
        *("log_every", "adam_eps", "seq_devices"),
    ),
    "model": (
        *("num_layers", "embed_dim", "num_heads", "qkv_dim", "mlp_dim", "max_length"),
        "embed_std",
    ),
}
_NOT_NEGATIVE_TRAIN = ("warmup", "weight_decay", "clip_norm")
