"""The encoder that a run's config describes."""

import ast
from typing import Any

import jax.numpy as jnp

from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import Config
from lra_jax.errors import expected
from lra_jax.models import EncoderConfig


def encoder_config(
    config: Config, image_shape: tuple[int, int] | None = None
) -> EncoderConfig:
    """The encoder of a run, for images of this shape if they are any.

    Raises:
      ValueError: what `EncoderConfig` raises, with the flag in place of its field.
    """
    try:
        return _encoder_config(config, image_shape)
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        if name not in _FLAGS:
            raise
        rest = rest.replace("qkv_features", _FLAGS["qkv_features"])
        raise ValueError(f"{_FLAGS[name]}{colon}{rest}") from None


def _encoder_config(
    config: Config, image_shape: tuple[int, int] | None
) -> EncoderConfig:
    model, mechanism = config.model, config.attention
    return EncoderConfig(
        num_layers=model.num_layers,
        embed_dim=model.embed_dim,
        num_heads=model.num_heads,
        qkv_features=model.qkv_dim,
        mlp_dim=model.mlp_dim,
        mlp=model.mlp,
        mlp_options=parse_options(model.mlp_options, "mlp_options"),
        max_length=model.max_length,
        mechanism=(
            mechanism if config.train.seq_devices == 1 else sequence_parallel(mechanism)
        ),
        options=parse_options(model.attention_options),
        inputs=model.inputs,
        positions=model.positions,
        grid=image_shape,
        embed_std=model.embed_std,
        dropout=model.dropout,
        remat=config.train.remat,
        qkv_bias=model.qkv_bias,
        dtype=jnp.dtype(config.train.dtype),
    )


_FLAGS = {
    name: f"--model.{name}"
    for name in (
        *("num_layers", "embed_dim", "num_heads", "mlp_dim", "mlp", "mlp_options"),
        *("max_length", "inputs", "positions", "dropout"),
    )
} | {"qkv_features": "--model.qkv_dim", "rotary": "--model.positions=rotary"}


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
            raise expected(f"--model.{field}", "name=value,...", repr(part))
        values = [_literal(v.strip()) for v in value.split("/")]
        options[name.strip()] = tuple(values) if len(values) > 1 else values[0]
    return options


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
