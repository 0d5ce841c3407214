"""A task: its data, its model head, its loss and metric, floors and published rows.

The trainer knows no particular task. A new one is a file in ``data/``, a file in
``configs/`` and an entry in ``TASKS``.
"""

import ast
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from lra_jax.attention import registry
from lra_jax.configs import Config, DataConfig
from lra_jax.configs.base import Dtype
from lra_jax.data import listops
from lra_jax.data.dataset import SequenceDataset
from lra_jax.models import SequenceClassifier
from lra_jax.models.attention import split_options
from lra_jax.models.encoder import options_by_block
from lra_jax.names import known

Batch = Mapping[str, jax.Array]
Sums = dict[str, jax.Array]


class Published(NamedTuple):
    """A published test accuracy, in percent, and where it was printed."""

    model: str
    accuracy: float
    source: str


@dataclasses.dataclass(frozen=True)
class Task:
    """What the trainer needs of a task.

    Attributes:
      name: as in ``--task``.
      check: raises ValueError for settings that cannot work, before any data are made.
      prepare: makes, or finds, the data.
      make_model: builds the model.
      loss: ``(model, batch, rngs) -> sums``: the weighted sums "loss" and "correct" and
        the weight "count" over a batch, as float32 scalars.
      is_official: whether a config's data follow the distribution that the floors and
        the published rows are about.
      floors: ``(name, percent)`` of readers that learn nothing of interest.
      published: rows to stand beside ours.
    """

    name: str
    check: Callable[[Config], None]
    prepare: Callable[[Config], SequenceDataset]
    make_model: Callable[[Config, SequenceDataset, nnx.Rngs], nnx.Module]
    loss: Callable[[nnx.Module, Batch, nnx.Rngs | None], Sums]
    is_official: Callable[[Config], bool]
    floors: tuple[tuple[str, float], ...] = ()
    published: tuple[Published, ...] = ()


def get_task(name: str) -> Task:
    """The task of that name.

    Raises:
      ValueError: unknown, with the nearest name.
    """
    return TASKS[known("task", name, TASKS)]


def classification_loss(
    model: nnx.Module, batch: Batch, rngs: nnx.Rngs | None = None
) -> Sums:
    """Cross-entropy and accuracy of a sequence classifier, summed over the batch.

    Args:
      model: ``(tokens, lengths, rngs) -> logits [B, classes]``.
      batch: tokens `[B, T]`, lengths `[B]`, labels `[B]`, and weights `[B]` where some
        rows are fill; without weights every row counts once.
      rngs: dropout stream, to train.
    """
    logits = model(batch["tokens"], batch["lengths"], rngs)
    labels = batch["labels"]
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    weights = batch.get("weights")
    weights = jnp.ones_like(losses) if weights is None else weights
    correct = (jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    return {
        "loss": jnp.sum(losses * weights),
        "correct": jnp.sum(correct * weights),
        "count": jnp.sum(weights),
    }


def make_classifier(
    config: Config, dataset: SequenceDataset, rngs: nnx.Rngs
) -> SequenceClassifier:
    """The encoder and head that a config describes, for a dataset's vocabulary."""
    model = config.model
    return SequenceClassifier(
        dataset.vocab_size,
        dataset.num_classes,
        num_layers=model.num_layers,
        embed_dim=model.embed_dim,
        num_heads=model.num_heads,
        qkv_features=model.qkv_dim,
        mlp_dim=model.mlp_dim,
        max_length=model.max_length,
        mechanism=config.attention,
        options=parse_options(model.attention_options),
        pooling=model.pooling,
        positions=model.positions,
        embed_std=model.embed_std,
        dropout=model.dropout,
        qkv_bias=model.qkv_bias,
        dtype=jnp.dtype(config.train.dtype),
        rngs=rngs,
    )


def parse_options(text: str) -> dict[str, Any]:
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
            raise ValueError(
                f"--model.attention_options: expected name=value,..., got {part!r}"
            )
        values = [_literal(v.strip()) for v in value.split("/")]
        options[name.strip()] = tuple(values) if len(values) > 1 else values[0]
    return options


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check_config(config: Config) -> None:
    """Refuses settings that cannot work, before data are made or anything compiles.

    Raises:
      ValueError: with the flag, what was expected and what was given.
    """
    known("--train.dtype", config.train.dtype, get_args(Dtype))
    if config.workdir == "":
        raise ValueError("--workdir must name a folder, got ''")
    _check_ranges(config)
    model = config.model
    mechanism = registry.resolve(config.attention)
    options = parse_options(model.attention_options)
    for block in options_by_block(options, model.num_layers):
        split_options(mechanism, block)
    if model.qkv_dim % model.num_heads:
        raise ValueError(
            f"--model.num_heads must divide --model.qkv_dim={model.qkv_dim}, "
            f"got {model.num_heads}"
        )
    if model.positions == "sinusoidal" and model.embed_dim % 2:
        raise ValueError(
            "--model.embed_dim must be even for sinusoidal positions, "
            f"got {model.embed_dim}"
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
    *("log_every", "adam_eps"),
)
_POSITIVE_MODEL = (
    *("num_layers", "embed_dim", "num_heads", "qkv_dim", "mlp_dim", "max_length"),
    "embed_std",
)
_POSITIVE_DATA = ("num_train", "num_valid", "num_test")
_NOT_NEGATIVE_TRAIN = ("warmup", "weight_decay", "clip_norm")


def _check_listops(config: Config) -> None:
    check_config(config)
    data, longest = config.data, config.model.max_length
    # Trees are shorter than data.max_length, but batches may be padded to it.
    if data.path is None and data.max_length > longest:
        raise ValueError(
            f"--data.max_length={data.max_length} pads sequences beyond "
            f"--model.max_length={longest}"
        )


def _prepare_listops(config: Config) -> SequenceDataset:
    data = config.data
    return listops.prepare(
        data.dir,
        seed=data.seed,
        num_train=data.num_train,
        num_valid=data.num_valid,
        num_test=data.num_test,
        min_length=data.min_length,
        max_length=data.max_length,
        max_depth=data.max_depth,
        max_args=data.max_args,
        processes=data.processes,
        path=data.path,
    )


def _official_listops(config: Config) -> bool:
    grammar = ("min_length", "max_length", "max_depth", "max_args")
    default = DataConfig()
    return config.data.path is not None or all(
        getattr(config.data, name) == getattr(default, name) for name in grammar
    )


_LRA = "LRA paper, arXiv:2011.04006, Table 1"
_FLOWFORMER = "figure of the thuml/Flowformer repository"
_HGRN = "re-run in S4's code base, table of the SiMBA repository from the HGRN paper"

TASKS: dict[str, Task] = {
    "listops": Task(
        name="listops",
        check=_check_listops,
        prepare=_prepare_listops,
        make_model=make_classifier,
        loss=classification_loss,
        is_official=_official_listops,
        floors=(
            ("majority class", 17.05),
            ("root operator alone, best possible", 36.6),
        ),
        published=(
            Published("Transformer", 36.37, _LRA),
            Published("Linear Transformer", 16.13, _LRA),
            Published("Linformer", 35.70, _LRA),
            Published("Performer", 18.01, _LRA),
            Published("cosFormer", 37.90, _FLOWFORMER),
            Published("cosFormer", 36.50, _HGRN),
            Published("Flowformer", 38.70, _FLOWFORMER),
            Published("S5", 62.15, "S5 paper"),
        ),
    )
}
