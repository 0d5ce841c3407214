"""What a user can get wrong in a config, found before data are made or compiled."""

import ast
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lra_jax.attention import registry
from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import Config
from lra_jax.data.length_warmup import LengthWarmup
from lra_jax.errors import known
from lra_jax.models.encoder import check_mlp, options_by_block
from lra_jax.models.options import split_options


def parse_options(text: str, field: str = "attention_options") -> dict[str, Any]:
    """``"clip=5,sharing=none"`` to ``{"clip": 5, "sharing": "none"}``.

    Values are Python literals where they read as one (5, 0.1, None, True) and strings
    otherwise. ``features=256/128`` is a tuple, one value for each block of the model.

    Raises:
      ValueError: a part without ``=``.
    """
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"--model.{field}: expected name=value,..., got {part!r}")
        values = [_literal(v.strip()) for v in value.split("/")]
        options[name.strip()] = tuple(values) if len(values) > 1 else values[0]
    return options


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_config(config: Config, images: bool = False, holds_out: bool = False) -> None:
    """Refuses settings that cannot work, before data are made or anything compiles.

    Args:
      config: the run.
      images: whether the task's sequences are images.
      holds_out: whether the task has no validation split of its own.

    Raises:
      ValueError: with the flag, what was expected and what was given.
    """
    _check_choices(config)
    if config.workdir == "":
        raise ValueError("--workdir must name a folder, got ''")
    _check_ranges(config)
    model = config.model
    mechanism = registry.resolve(config.attention)
    options = parse_options(model.attention_options)
    for block in options_by_block(options, model.num_layers):
        split_options(mechanism, block)
    _check_devices(config, mechanism)
    check_mlp(model.mlp, parse_options(model.mlp_options, "mlp_options"))
    if model.qkv_dim % model.num_heads:
        raise ValueError(
            f"--model.num_heads must divide --model.qkv_dim={model.qkv_dim}, "
            f"got {model.num_heads}"
        )
    _check_implementation(config, mechanism)
    _check_length_warmup(config.train.length_warmup, config.train.steps, images)
    if not images:
        _refuse_images(config)
    if not holds_out and config.data.validation != "holdout":
        raise ValueError(
            f"--data.validation={config.data.validation} is for tasks without a "
            f"validation split, --task={config.task} has one"
        )
    if model.positions == "rotary":
        _check_rotary(config, mechanism)
    if model.positions == "sinusoidal" and model.embed_dim % 2:
        raise ValueError(
            "--model.embed_dim must be even for sinusoidal positions, "
            f"got {model.embed_dim}"
        )


def _check_implementation(config: Config, mechanism: registry.Mechanism) -> None:
    """Refuses kernels that this machine or the model's sizes cannot have."""
    model = config.model
    if mechanism.name not in ("linear", "cosformer", "flow"):
        return
    for block in options_by_block(
        parse_options(model.attention_options), model.num_layers
    ):
        if "implementation" not in block:
            continue
        import jax

        from lra_jax import kernels
        from lra_jax.attention.flow import parts as flow_parts

        width = model.qkv_dim // model.num_heads
        shape = (1, model.max_length, model.num_heads, width)
        array: Any = jax.ShapeDtypeStruct(shape, config.train.dtype)
        phi = block.get("feature_map", "relu")
        arrays = array, array, array
        refusal = None
        try:
            if mechanism.name == "flow":
                refusal = flow_parts.refusal(flow_parts.given(block), False)
            kernels.choose(block["implementation"], *arrays, phi, refusal=refusal)
        except ValueError as error:
            raise ValueError(f"--model.attention_options: {error}") from error


def _check_choices(config: Config) -> None:
    """Refuses values that no command line would have let pass."""
    for part in ("train", "model", "data"):
        values = getattr(config, part)
        for name, kind in get_type_hints(type(values)).items():
            if get_origin(kind) is Literal:
                known(f"--{part}.{name}", getattr(values, name), get_args(kind))


def _check_devices(config: Config, mechanism: registry.Mechanism) -> None:
    given = {
        name: getattr(config, name)
        for name in ("coordinator", "num_processes", "process_id")
    }
    named = [name for name, value in given.items() if value is not None]
    if named and (len(named) < 3 or not config.distributed):
        raise ValueError(
            "--distributed=True, --coordinator, --num_processes and --process_id go "
            f"together, got only {', '.join(f'--{n}={given[n]}' for n in named)}"
        )
    if named:
        _check_processes(config)
    if config.train.seq_devices == 1:
        return
    sequence_parallel(mechanism)
    for name, only in (("pooling", "mean"), ("padding", "lengths")):
        given = getattr(config.model, name)
        if given != only:
            raise ValueError(
                f"--model.{name} must be {only} with --train.seq_devices="
                f"{config.train.seq_devices}, got {given!r}"
            )


def _check_processes(config: Config) -> None:
    host, _, port = (config.coordinator or "").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--coordinator must be HOST:PORT, got {config.coordinator!r}")
    count, index = config.num_processes or 0, config.process_id or 0
    if not 0 <= index < count:
        raise ValueError(
            f"--process_id must be in 0..{count - 1} for --num_processes={count}, "
            f"got {index}"
        )


def _check_length_warmup(text: str, steps: int, images: bool) -> None:
    try:
        LengthWarmup.parse(text, steps)
    except ValueError as error:
        raise ValueError(f"--train.{error}") from error
    if text and images:
        raise ValueError(
            f"--train.length_warmup cuts sequences and images stay whole, got {text!r}"
        )


def _refuse_images(config: Config) -> None:
    for name, only in (("inputs", "linear"), ("positions", "learned_2d")):
        if getattr(config.model, name) == only:
            raise ValueError(
                f"--model.{name}={only} is for images, --task={config.task} has none"
            )


def _check_rotary(config: Config, mechanism: registry.Mechanism) -> None:
    model = config.model
    if not {"query", "key"} <= set(mechanism.projections):
        raise ValueError(
            "--model.positions=rotary turns queries and keys, of which "
            f"--attention={config.attention} has none"
        )
    if model.qkv_dim // model.num_heads % 2:
        raise ValueError(
            "--model.positions=rotary needs heads of an even width, got "
            f"--model.qkv_dim={model.qkv_dim} for --model.num_heads={model.num_heads}"
        )


def check_lengths(config: Config) -> None:
    """Refuses documents that are longer than the model's longest sequence."""
    longest = config.model.max_length
    if config.data.max_length > longest:
        raise ValueError(
            f"--data.max_length={config.data.max_length} pads sequences beyond "
            f"--model.max_length={longest}"
        )


def check_image_size(config: Config, rows: int, columns: int) -> None:
    """Refuses lengths that are not those of the task's images."""
    pixels = rows * columns
    for part in ("data", "model"):
        given = getattr(config, part).max_length
        if given != pixels:
            raise ValueError(
                f"--{part}.max_length must be {pixels} for --task={config.task}, "
                f"images of {rows} x {columns}, got {given}"
            )


def _check_ranges(config: Config) -> None:
    train, model = config.train, config.model
    positive = {
        **{f"train.{n}": getattr(train, n) for n in _POSITIVE_TRAIN},
        **{f"model.{n}": getattr(model, n) for n in _POSITIVE_MODEL},
        **{f"data.{n}": getattr(config.data, n) for n in _POSITIVE_DATA},
    }
    for name, value in positive.items():
        if not 0 < value < math.inf:
            raise ValueError(f"--{name} must be positive and finite, got {value}")
    not_negative = {
        **{f"train.{n}": getattr(train, n) for n in _NOT_NEGATIVE_TRAIN},
        **{"seed": config.seed, "data.seed": config.data.seed},
    }
    for name, value in not_negative.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"--{name} must be finite and not negative, got {value}")
    rates = {
        "model.dropout": model.dropout,
        "train.adam_b1": train.adam_b1,
        "train.adam_b2": train.adam_b2,
    }
    for name, value in rates.items():
        if not 0 <= value < 1:
            raise ValueError(f"--{name} must lie in [0, 1), got {value}")


_POSITIVE_TRAIN = (
    *("steps", "batch_size", "learning_rate", "eval_every", "eval_batch_size"),
    *("log_every", "adam_eps", "seq_devices"),
)
_POSITIVE_MODEL = (
    *("num_layers", "embed_dim", "num_heads", "qkv_dim", "mlp_dim", "max_length"),
    "embed_std",
)
_POSITIVE_DATA = ("num_train", "num_valid", "num_test", "max_length")
_NOT_NEGATIVE_TRAIN = ("warmup", "weight_decay", "clip_norm")
