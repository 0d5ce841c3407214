"""The encoder that a run's config describes."""

import ast
import dataclasses
from typing import Any

import jax.numpy as jnp

from lra_jax.attention import registry
from lra_jax.attention.sharded.sequence import sequence_parallel
from lra_jax.configs import Config
from lra_jax.errors import expected, known
from lra_jax.models import EncoderConfig
from lra_jax.models.settings import EncoderSettings


def encoder_config(
    config: Config, image_shape: tuple[int, int] | None = None
) -> EncoderConfig:
    """The encoder of a run, for images of this shape if the task has any.

    Raises:
      ValueError: see `EncoderConfig`.
    """
    model = config.model
    split = config.train.seq_devices > 1
    main = registry.resolve(config.attention, "--attention")
    mechanism: Any = sequence_parallel(main) if split else config.attention
    settings = {
        field.name: getattr(model, field.name)
        for field in dataclasses.fields(EncoderSettings)
    }
    encoder = EncoderConfig(
        **settings,
        qkv_features=model.qkv_dim,
        mlp_options=parse_options(model.mlp_options, "--model.mlp_options"),
        mechanism=mechanism,
        options=parse_options(model.attention_options),
        hybrid=tuple(
            mechanism
            if name == config.attention or registry.MECHANISMS.get(name) == main
            else _other(name, split)
            for name in (model.hybrid.split(",") if model.hybrid else ())
        ),
        reconstructs=config.pretrain.steps > 0,
        cls_token=model.pooling == "cls",
        cutoffs=_cutoffs(model.cutoffs),
        grid=image_shape,
        remat=config.train.remat,
        dtype=jnp.dtype(config.train.dtype),
    )
    _ = encoder.layers  # Made here, so that what is wrong with one is said here.
    return encoder


def _other(name: str, split: bool) -> str | registry.Mechanism:
    """A hybrid's other mechanism; only a name, so that no other code is imported."""
    known("--model.hybrid", name, registry.MECHANISMS)
    return sequence_parallel(name) if split else name


def _cutoffs(text: str) -> tuple[int, ...]:
    """Parses ``"20000,60000"``."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        needed = "token ids, as in 20000,60000"
        raise expected("--model.cutoffs", needed, f"{text!r}") from None


def parse_options(text: str, flag: str = "--model.attention_options") -> dict[str, Any]:
    """Parses ``"clip=5,sharing=none"`` to ``{"clip": 5, "sharing": "none"}``.

    Values are parsed as Python literals if possible (5, 0.1, None, True), also true and
    false, and are strings otherwise. ``features=256/128`` is a tuple, one value for
    each block of the model.
    ``flag`` is the name used in errors.

    Raises:
      ValueError: a part without ``=``, or a repeated name.
    """
    options: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise expected(flag, "name=value,...", repr(part))
        if name.strip() in options:
            got = f"{name.strip()!r} twice"
            raise expected(flag, "each option once", got)
        values = [_literal(v.strip()) for v in value.split("/")]
        options[name.strip()] = tuple(values) if len(values) > 1 else values[0]
    return options


# As written for other settings, besides Python's own words.
_FLAG = {"true": True, "false": False}


def _literal(text: str) -> Any:
    """A text as a number, boolean or None, or else the text itself."""
    if text in _FLAG:
        return _FLAG[text]
    try:
        value = ast.literal_eval(text)
    # The last two: raised by thousands of brackets.
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, bool | int | float | None) else text
