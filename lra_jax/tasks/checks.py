"""Finds mistakes in a config before data are made or anything is compiled."""

import dataclasses
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import lra_jax
from lra_jax.attention import registry
from lra_jax.configs import Config, TrainConfig
from lra_jax.configs.base import PretrainConfig
from lra_jax.data.buckets import parse_buckets
from lra_jax.data.curriculum import Curriculum
from lra_jax.data.dataset import SequenceDataset
from lra_jax.data.length_warmup import LengthWarmup
from lra_jax.errors import (
    expected,
    first_line,
    known,
    positive,
    renamed,
    within,
)
from lra_jax.models import AttentionConfig, Buffer, MultiHeadAttention
from lra_jax.models.pooling import is_blind, why_constant
from lra_jax.tasks.device_memory import check_memory
from lra_jax.tasks.encoder import encoder_config
from lra_jax.tasks.probes import check_heeds
from lra_jax.tasks.task import Task

_COMPARED = 64  # sequences of two splits with the same labels


def check_config(config: Config, task: Task) -> None:
    """See `Task.check`."""
    if type(config.data) is not task.data:
        got = type(config.data).__name__
        raise expected("--data", f"{task.data.__name__} for --task={task.name}", got)
    config.check_types()
    if config.workdir == "":
        raise expected("--workdir", "a folder", "''")
    config.data.check()
    try:
        parse_buckets(config.data.buckets)
    except ValueError as error:
        raise renamed(error, "--data.buckets") from error
    _check_stages(config.train, task)
    if config.pretrain != PretrainConfig():
        _check_pretraining(config, task)
    if task.image_shape is None:
        _refuse_images(config)
    _refuse_unread(config, task)
    _refuse_constant(config, task)
    if task.is_causal and not config.model.is_causal:
        wanted = f"True for --task={task.name}, whose answers come next"
        raise expected("--model.is_causal", wanted, config.model.is_causal)
    _check_lengths(config, task)
    _check_devices(config, task)
    if config.data.packing:
        _check_packing(config, task)
    if task.packs_rows and not _takes_rows(config):
        wanted = f"one that takes segment_ids, for --task={task.name}"
        raise expected("--attention", wanted, f"{config.attention!r}")
    encoder_config(config, task.image_shape)


def check_data(config: Config, task: Task, dataset: SequenceDataset) -> None:
    """See `Task.check_data`; `check_config` has accepted the config."""
    data = config.data
    given = getattr(data, "path", None) is not None
    if not given or data.chosen_on_test or task.packs_rows:
        return
    if _same_examples(dataset):
        but = " (or --data.validation=test)" if hasattr(data, "validation") else ""
        wanted = f"a validation split other than the test split{but}"
        raise expected("--data.path", wanted, "the same examples in both")


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
    """See `Task.check_on_devices`; `check_config` has accepted the config."""
    # On one device: the trainer checks whether the devices divide the sequence.
    encoder = encoder_config(config.replace(train={"seq_devices": 1}), task.image_shape)
    longest = min(encoder.max_length, config.data.longest or encoder.max_length)
    length = encoder.num_positions(longest)
    try:
        check_memory(config.train, encoder, length)
    except ValueError as error:
        if str(error).partition(": ")[0] in dict(encoder.options or ()):
            raise within("--model.attention_options", error) from error
        raise
    traced = []
    packs = task.packs_rows or config.data.packing
    for index in range(encoder.num_layers):
        # Without another layer's arrays.
        one = dataclasses.replace(encoder.attention(index), own_parameters=True)
        kind = one.mechanism, one.options
        if kind not in traced:
            traced.append(kind)
            # All images are of one size, so there is no mask.
            padded = task.image_shape is None or config.model.padding == "zeros"
            _trace(config.attention, one, length, padded)
            if one.mechanism.foreign:
                check_heeds(one, length, padded, packs)


def _trace(attention: str, config: AttentionConfig, length: int, padded: bool) -> None:
    """Traces a layer and its gradient, on two sequences; ``attention`` is the run's,
    which a hybrid has in only some of its blocks."""
    of_hybrid = config.mechanism != registry.resolve(attention)
    attention = config.mechanism.name if of_hybrid else attention
    shape = (2, length, config.in_features)

    def total(inputs: jax.Array, mask: jax.Array | None) -> jax.Array:
        layer = MultiHeadAttention(config=config, rngs=nnx.Rngs(0))
        _check_variables(attention, layer)
        return layer(inputs, mask=mask).astype(jnp.float32).sum()

    inputs: Any = jax.ShapeDtypeStruct(shape, config.dtype)
    mask: Any = jax.ShapeDtypeStruct(shape[:2], bool) if padded else None
    try:
        with warnings.catch_warnings():  # The run itself will warn.
            warnings.simplefilter("ignore", UserWarning)
            jax.eval_shape(jax.grad(total), inputs, mask)
    except ValueError as error:
        argument, colon, _ = str(error).partition(": expected ")
        if not colon:
            raise _broken(attention, error) from error
        given = argument in dict(config.options or ())
        flag = "--model.hybrid" if of_hybrid else "--attention"
        flag = "--model.attention_options" if given else flag
        if argument == "attention":
            raise renamed(error, flag) from error
        raise within(flag, error) from error
    # A user's function can raise anything; this package's raise only ValueError.
    except Exception as error:
        raise _broken(attention, error) from error


def _check_variables(attention: str, layer: MultiHeadAttention) -> None:
    """Refuses state that the trainer would not keep, such as dropout's random state,
    and parameters without a gradient."""
    kinds = {
        type(variable).__name__
        for _, variable in nnx.graph.iter_graph(layer)
        if isinstance(variable, nnx.Variable)
        and not isinstance(variable, nnx.Param | Buffer)
    }
    if kinds:
        wanted = f"{attention!r} to hold nnx.Param and lra_jax.models.Buffer only"
        raise expected("attention", wanted, ", ".join(sorted(kinds)))
    for path, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        dtype = variable[...].dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            wanted = f"{attention!r} to hold nnx.Param of floating numbers"
            got = f"{dtype} for {'.'.join(map(str, path))}"
            raise expected("attention", wanted, got)


def _broken(attention: str, error: Exception) -> ValueError:
    wanted = f"{attention!r} to map query, key and value to [B, T, N, Hv] arrays"
    got = f"{type(error).__name__}: {first_line(error)}{_place(attention, error)}"
    for note in getattr(error, "__notes__", ()):  # jax adds its own note.
        got += f"; {note}" if note.startswith("called with ") else ""
    return expected("--attention", wanted, got)


def _place(attention: str, error: Exception) -> str:
    """The innermost line in the user's own files that caused an error, in words."""
    mechanism = registry.resolve(attention)
    if not mechanism.foreign:
        return ""
    named = getattr(sys.modules.get(mechanism.module), "__file__", None)
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        file = Path(frame.filename)
        if frame.filename == named or (file.is_file() and not _is_library(file)):
            here = Path.cwd()
            shown = file.relative_to(here) if file.is_relative_to(here) else file
            return f" ({shown}, line {frame.lineno})"
    return ""


def _is_library(file: Path) -> bool:
    """Whether a file is Python's, this package's or an installed one."""
    places = (lra_jax.__path__[0], sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"} & {*file.parts}
    return bool(installed) or any(file.is_relative_to(place) for place in places)


def _check_devices(config: Config, task: Task) -> None:
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
    if task.per_position:
        wanted = f"1 for --task={task.name}, which asks for single positions"
        raise expected("--train.seq_devices", wanted, config.train.seq_devices)
    for name, only in (("pooling", "mean"), ("padding", "lengths"), ("patch", 1)):
        given = getattr(config.model, name)
        if given != only:
            wanted = f"{only} with --train.seq_devices={config.train.seq_devices}"
            raise expected(f"--model.{name}", wanted, repr(given))


def _check_packing(config: Config, task: Task) -> None:
    """Refuses runs in which a row cannot hold several examples."""
    if not task.can_pack:
        wanted = f"False for --task={task.name}, whose rows hold one example each"
        raise expected("--data.packing", wanted, "True")
    mechanism = registry.resolve(config.attention)
    able = [name for name, one in registry.MECHANISMS.items() if one.packed]
    if not (mechanism.packed or (mechanism.foreign and _takes_rows(config))):
        wanted = f"one of {', '.join(able)} with --data.packing"
        raise expected("--attention", wanted, f"{config.attention!r}")
    for one in encoder_config(config).hybrid:
        name = registry.resolve(one).name
        if name != mechanism.name:
            known("--model.hybrid", name, able)
    model, train = config.model, config.train
    for flag, given, fits, wanted in (
        ("model.pooling", model.pooling, model.pooling != "cls", "another"),
        ("model.padding", model.padding, model.padding == "lengths", "lengths"),
        ("train.seq_devices", train.seq_devices, train.seq_devices == 1, "1"),
    ):
        if not fits:
            raise expected(f"--{flag}", f"{wanted} with --data.packing", f"{given!r}")


def _takes_rows(config: Config) -> bool:
    """Whether all blocks can take the documents of a packed row."""
    encoder = encoder_config(config)
    blocks = [encoder.attention(index) for index in range(encoder.num_layers)]
    # A memory covers the whole row.
    return all(one.accepts("segment_ids") and not one.carries_memory for one in blocks)


def _check_processes(config: Config) -> None:
    host, _, port = (config.coordinator or "").rpartition(":")
    if not host or not port.isdecimal():
        raise expected("--coordinator", "HOST:PORT", repr(config.coordinator))
    count, index = config.num_processes or 0, config.process_id or 0
    positive("--num_processes", count)
    if not 0 <= index < count:
        wanted = f"0..{count - 1} for --num_processes={count}"
        raise expected("--process_id", wanted, index)


def _check_stages(train: TrainConfig, task: Task) -> None:
    for kind in (LengthWarmup, Curriculum):
        given = getattr(train, kind.name)
        try:
            kind.parse(given, train.steps)
        except ValueError as error:
            raise renamed(error, f"--train.{kind.name}") from error
        whole = None if task.image_shape is None else "images, which are of one size"
        whole = "answers at single positions" if task.per_position else whole
        if given and whole is not None:
            wanted = f"nothing for {whole}"
            raise expected(f"--train.{kind.name}", wanted, repr(given))


def _check_pretraining(config: Config, task: Task) -> None:
    """Refuses what cannot be reconstructed, and parts shorter than their warm-up."""
    if task.per_position or config.model.is_causal:
        reason = f"for --task={task.name}" if task.per_position else "for a decoder"
        default = PretrainConfig()
        for field in dataclasses.fields(default):
            given, only = (getattr(x, field.name) for x in (config.pretrain, default))
            if given != only:
                wanted = f"{only} {reason}, which reconstructs nothing"
                raise expected(f"--pretrain.{field.name}", wanted, given)
    if config.model.patch > 1:
        wanted = "1 with --pretrain.steps, which masks single pixels"
        raise expected("--model.patch", wanted, config.model.patch)
    if config.train.seq_devices > 1:
        wanted = f"0 with --train.seq_devices={config.train.seq_devices}"
        raise expected("--pretrain.steps", wanted, config.pretrain.steps)
    warmup, steps = config.train.warmup, config.train.steps
    given = dataclasses.asdict(PretrainConfig())
    if not warmup < config.pretrain.steps < steps - warmup:
        wanted = (
            f"more than {warmup}, the --train.warmup, and less than {steps - warmup}, "
            f"the --train.steps={steps} less it"
        )
        if not config.pretrain.steps:
            changed = [x for x in given if getattr(config.pretrain, x) != given[x]]
            wanted += f", with --pretrain.{changed[0]}"
        raise expected("--pretrain.steps", wanted, config.pretrain.steps)


def _refuse_images(config: Config) -> None:
    settings = ("inputs", "linear"), ("positions", "learned_2d"), ("conv_grid", True)
    for name, only in settings:
        if getattr(config.model, name) == only:
            wanted = f"another value for --task={config.task}, which has no images"
            raise expected(f"--model.{name}", wanted, only)
    if config.model.patch != 1:
        wanted = f"1 for --task={config.task}, which has no images"
        raise expected("--model.patch", wanted, config.model.patch)


def _refuse_constant(config: Config, task: Task) -> None:
    """Refuses to pool vectors that do not depend on the input, or hardly do."""
    model = config.model
    if is_blind(model.is_causal, model.pooling) and not task.per_position:
        wanted = "another value with --model.is_causal, where the first token sees no"
        raise expected("--model.pooling", f"{wanted} other", f"{model.pooling!r}")
    images = task.image_shape is not None
    wrong = why_constant(model.norm, model.pooling, model.padding, images)
    if wrong and not task.per_position:
        wanted = f"another value with --model.norm=instance, {wrong}"
        raise expected("--model.pooling", wanted, f"{model.pooling!r}")


def _refuse_unread(config: Config, task: Task) -> None:
    """Refuses settings of a head that the task's model does not have."""
    unread, reason = {}, "which has no pairs"
    if task.per_position:
        unread = {"pooling": "mean", "padding": "lengths", "interaction": "nli"}
        reason = "which asks for single positions"
    elif not task.pairs:
        unread = {"interaction": "nli"}
    for name, only in unread.items():
        given = getattr(config.model, name)
        if given != only:
            wanted = f"{only} for --task={task.name}, {reason}"
            raise expected(f"--model.{name}", wanted, f"{given!r}")


def _check_lengths(config: Config, task: Task) -> None:
    """Refuses a model whose maximum length does not fit the data's."""
    given, longest = config.model.max_length, config.data.longest
    if task.image_shape is not None:
        rows, columns = task.image_shape
        if given != rows * columns:
            wanted = (
                f"{rows * columns} for the {rows} x {columns} of --task={task.name}"
            )
            raise expected("--model.max_length", wanted, given)
    elif longest is not None and longest > given:
        name = max(config.data.of_length, key=lambda n: getattr(config.data, n, 0))
        wanted = f"at most --model.max_length={given}"
        raise expected(f"--data.{name}", wanted, longest)
