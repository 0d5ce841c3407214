"""Refuses runs that would silently compute something other than what was asked.

Anything else that is wrong raises an error where it is used.
"""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax.configs import Config, ModelConfig
from lra_jax.data.buckets import parse_buckets
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.stages import Curriculum, LengthWarmup
from lra_jax.errors import InputError, expected
from lra_jax.models import Buffer, MultiHeadAttention, TransformerEncoder
from lra_jax.models.encoder import Block, make_block
from lra_jax.tasks.base import (
    classification_loss,
    encoder_config,
    supervised_loss,
)
from lra_jax.tasks.probes import check_heeds
from lra_jax.tasks.task import Task

_COMPARED = 64  # sequences of two splits with the same labels


def check_config(config: Config, task: Task) -> None:
    """Refuses invalid settings, before data are made.

    Raises:
      ValueError: with the flag, and what is expected.
    """
    if type(config.data) is not task.data:
        got = type(config.data).__name__
        raise expected("--data", f"{task.data.__name__} for --task={task.name}", got)
    config.check_types()
    config.data.check()
    parse_buckets(config.data.buckets)
    _make_blocks(encoder_config(config, task.shape_of(config.data)))
    task.training_loss(config.train)
    _check_lengths(config, task)
    _check_processes(config)
    _check_split(config, task)
    train, has_images = config.train, task.shape_of(config.data) is not None
    for kind in (LengthWarmup, Curriculum):
        stages = kind.parse(getattr(train, kind.name), train.steps).stages
        if stages and task.per_position:
            needed = f"nothing for --task={task.name}, whose answers would be cut off"
            raise _unfit(config, f"train.{kind.name}", needed)
    takes_mixed = task.loss in (classification_loss, supervised_loss)
    for name in ("mixup", "cutmix"):
        if getattr(train, name) and not (has_images and takes_mixed):
            needed = f"0 for --task={task.name}, which has no images with a class each"
            raise _unfit(config, f"train.{name}", needed)
    if config.pretrain.steps >= train.steps:
        raise _unfit(config, "pretrain.steps", f"less than --train.steps={train.steps}")
    if config.pretrain.steps and task.per_position:
        needed = f"0 for --task={task.name}, whose labels are for single positions"
        raise _unfit(config, "pretrain.steps", needed)
    if task.is_causal and not config.model.is_causal:
        needed = f"True for --task={task.name}, whose answers come next"
        raise _unfit(config, "model.is_causal", needed)
    if config.data.packing and not task.can_pack:
        needed = f"False for --task={task.name}, whose rows hold one example each"
        raise _unfit(config, "data.packing", needed)


def _unfit(config: Config, flag: str, needed: str) -> InputError:
    part, _, name = flag.partition(".")
    return expected(f"--{flag}", needed, getattr(getattr(config, part), name))


def _check_lengths(config: Config, task: Task) -> None:
    shape, limit = task.shape_of(config.data), config.max_length
    longest = config.data.longest if shape is None else shape[0] * shape[1]
    if longest is not None and longest > limit:
        needed = f"at least {longest}, the longest sequence"
        raise expected("--model.max_length", needed, limit)


def _check_processes(config: Config) -> None:
    """Refuses processes that would each train alone, in the same directory."""
    places = ("coordinator", "num_processes", "process_id")
    named = [name for name in places if getattr(config, name) is not None]
    if named and not config.distributed:
        raise expected("--distributed", f"True with --{named[0]}", False)
    if ":" not in (config.coordinator or ":"):
        raise expected("--coordinator", "HOST:PORT", f"{config.coordinator!r}")


def _check_split(config: Config, task: Task) -> None:
    """Refuses what neither packed rows nor parts of sequences can have."""
    devices, packs = config.train.seq_devices, config.data.packing
    if devices > 1 and (task.per_position or packs):
        reason = "--data.packing" if packs else f"--task={task.name}"
        needed = f"1 with {reason}, which has several labels in a row"
        raise _unfit(config, "train.seq_devices", needed)
    for name, value in {"pooling": "cls", "padding": "zeros"}.items():
        if (packs or devices > 1) and getattr(config.model, name) == value:
            reason = "data.packing" if packs else f"train.seq_devices={devices}"
            raise _unfit(config, f"model.{name}", f"another value with --{reason}")


def check_data(config: Config, task: Task, dataset: SequenceDataset) -> None:
    """Refuses settings of training that do not fit the labels. Except for language
    models, also refuses a user's files whose validation split is their test split, in
    the same order: the best checkpoint would be chosen on it.

    `check_config` has accepted the config.

    Raises:
      ValueError: with the flag, and what is expected.
    """
    data, train = config.data, config.train
    unfit = ["label_smoothing"] * dataset.has_numbers
    unfit += ["mixup", "cutmix"] * (dataset.has_numbers or dataset.several)
    for name in unfit:
        if getattr(train, name):
            needed = "0 for labels that are not one class each"
            raise _unfit(config, f"train.{name}", needed)
    if dataset.several and train.seq_devices > 1:
        raise _unfit(config, "train.seq_devices", "1 for examples of several classes")
    can_be_same = not (data.is_own or data.chosen_on_test or task.packs_rows)
    if can_be_same and _same_examples(dataset):
        but = " (or --data.validation=test)" if hasattr(data, "validation") else ""
        needed = f"a validation split other than the test split{but}"
        raise expected("--data.path", needed, "the same examples in both")


def _same_examples(dataset: SequenceDataset) -> bool:
    """Whether valid and test have the same labels, and the same first sequences."""
    labels = dataset.labels("valid")
    if not np.array_equal(labels, dataset.labels("test")):
        return False
    first = list(range(min(_COMPARED, len(labels))))
    rows = (dataset.source(split).__getitems__(first) for split in ("valid", "test"))
    return all(
        np.array_equal(a[name], b[name])
        for a, b in zip(*rows, strict=True)
        for name in dataset.sequences
    )


def check_on_devices(config: Config, task: Task) -> None:
    """Refuses an attention that fails on the shapes of the run, by tracing it.

    `check_config` has accepted the config, and the processes of a run are connected.

    Raises:
      ValueError: with the flag, and what is expected.
    """
    # On one device: the trainer checks whether the devices divide the sequence.
    shape = task.shape_of(config.data)
    encoder = encoder_config(config.replace(train={"seq_devices": 1}), shape)
    longest = min(encoder.max_length, config.data.longest or encoder.max_length)
    # All images are of one size, so they have no padding.
    padded = shape is None or config.model.padding == "zeros"
    packs = task.packs_rows or config.data.packing
    if encoder.own_parts:
        _trace_encoder(encoder, longest)
    for index, block in _make_blocks(encoder).items():
        _check_variables(block)
        layer, length = block.attention, encoder.at(index).num_positions(longest)
        _trace(layer, encoder.dtype, length, padded, packs)
        if layer.mechanism.foreign:
            masked = padded and layer.accepts("mask")
            check_heeds(encoder, index, length, masked, packs)


def _trace_encoder(encoder: ModelConfig, length: int) -> None:
    """Traces an encoder on two sequences, so that a block, MLP or positions of the
    user's own that do not fit fail before the data are made."""
    width = encoder.channels if encoder.channels > 1 else 1
    has_vectors = encoder.inputs == "vectors" or encoder.channels > 1
    shape = (2, length, width) if has_vectors else (2, length)
    dtype = jnp.float32 if encoder.inputs == "vectors" else jnp.int32

    def encode(tokens: jax.Array) -> jax.Array:
        model = TransformerEncoder(width, config=encoder, rngs=nnx.Rngs(0))
        return model(tokens, rngs=nnx.Rngs(dropout=0))

    jax.eval_shape(encode, jax.ShapeDtypeStruct(shape, dtype))


def _make_blocks(encoder: ModelConfig) -> dict[int, Block]:
    """A block of each kind by its index, without arrays."""
    kinds = {
        (encoder.block_mechanism(index), repr(options), encoder.stage(index)): index
        for index, options in reversed([*enumerate(encoder.block_options)])
    }
    return {
        index: nnx.eval_shape(
            lambda index=index: make_block(encoder, index, nnx.Rngs(0))
        )
        for index in kinds.values()
    }


def _check_variables(block: Block) -> None:
    """Refuses state that the trainer would not keep, such as a dropout's random state,
    and parameters without a gradient."""
    needed = "an nnx.Param of floating-point numbers or a lra_jax.models.Buffer"
    for path, variable in nnx.to_flat_state(nnx.state(block)):
        kind, dtype = type(variable), variable.dtype
        is_trained = issubclass(kind, nnx.Param) and jnp.issubdtype(dtype, jnp.inexact)
        if not is_trained and not issubclass(kind, Buffer):
            name = ".".join(map(str, path))
            raise expected(name, needed, f"{kind.__name__} of {dtype}")


def _trace(
    layer: MultiHeadAttention, dtype: Any, length: int, padded: bool, packs: bool
) -> None:
    """Traces a layer and its gradient on two sequences, so that an attention that does
    not fit the run fails before the data are made."""
    shape = (2, length, layer.in_features)
    arrays: dict[str, Any] = {}
    if padded:
        arrays["mask"] = jax.ShapeDtypeStruct(shape[:2], bool)
    if packs:
        arrays["segment_ids"] = jax.ShapeDtypeStruct(shape[:2], jnp.int32)

    graph, params, buffers = nnx.split(layer, nnx.Param, Buffer)  # As in training.

    def total(params: Any, inputs: jax.Array, buffers: Any, arrays: Any) -> jax.Array:
        layer = nnx.merge(graph, params, buffers)
        return layer(inputs, **arrays).astype(jnp.float32).sum()

    inputs = jax.ShapeDtypeStruct(shape, dtype)
    with warnings.catch_warnings():  # The run itself will warn.
        warnings.simplefilter("ignore", UserWarning)
        jax.eval_shape(jax.grad(total, (0, 1)), params, inputs, buffers, arrays)
