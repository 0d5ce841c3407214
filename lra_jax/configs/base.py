"""The configuration of a run: frozen dataclasses, which are also the flags and the API.

``python -m lra_jax.train --train.steps=100`` sets ``Config.train.steps``; the resolved
``Config`` is written to the run directory as ``config.json``, and
``lra_jax.train.run(config)`` takes the same object. The docstring of a field is its
help text. A task's own data settings are a subclass of `DataConfig`, defined with its
presets. Nothing here imports jax, because ``--help`` must be quick.
"""

import dataclasses
import fnmatch
import hashlib
import json
import os
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from lra_jax.attention.outside import locate
from lra_jax.attention.registry import spell
from lra_jax.configs import mechanisms
from lra_jax.configs.registry import find_task
from lra_jax.errors import (
    Count,
    Name,
    Names,
    NotNegative,
    Positive,
    Range,
    Rate,
    Size,
    check_types,
    drop_removed,
    expected,
    known,
    reason,
)
from lra_jax.models.config import ModelConfig

# At most more than any machine has cores, so that a typo does not start a million.
Processes = Annotated[int, Range("1 to 4096, or None", 1, 4096)]
Schedule = Literal["cosine", "lra", "lra_cosine", "linear", "constant", "trapezoid"]
Dtype = Literal["float32", "bfloat16"]
Optimizer = Annotated[
    str, Names(("adamw", "radam", "adafactor", "lion", "muon", "sgd"))
]
BestBy = Literal["accuracy", "loss"]
Part = Literal["pretrain", "train"]

LEAST_STEPS_OF_BUCKETS = 400
"""With fewer steps, one length: 50 steps for each of eight lengths, which cost about as
much on a CPU as compiling the two programs of a length."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation, evaluation and logging."""

    steps: Size = 5000
    """Training steps, one batch each."""
    batch_size: Size = 32
    """Examples in a batch, across all devices."""
    learning_rate: Positive = 1e-3
    """Peak of the schedule; for `lra` and `lra_cosine`, the base factor."""
    schedule: Schedule = "cosine"
    """cosine: warm-up, then a cosine to 0. linear: warm-up, then linear to 0.
    trapezoid: warm-up, constant, then linear to 0 over the last fifth. constant:
    warm-up, then constant. lra: base * min(1, step / warmup) / sqrt(max(step, warmup)).
    lra_cosine: that of LRA's image tasks."""
    warmup: Count = 500
    """Warm-up steps."""
    length_warmup: str = ""
    """Sequence-length warm-up: `128:0.3,512:0.4` shows the first 128 tokens of every
    training sequence up to 30 % of the steps, the first 512 up to 40 %, and then all.
    Not for images."""
    curriculum: str = ""
    """Short examples first: `700:0.6` trains on whole examples of at most 700 tokens
    for 60 % of the steps, then on all. Not for images."""
    optimizer: Optimizer = "adamw"
    """adamw: Adam with decoupled weight decay. radam: the same with rectified first
    steps (Liu et al. 2020, arXiv:1908.03265). adafactor, lion, muon, sgd: Optax's; muon
    leaves embeddings, output layers and vectors to Adam. Or package.module:function,
    one of Optax's or your own, see docs/own_parts.md."""
    optimizer_options: str = ""
    """Options of the optimizer, as in `momentum=0.9` for sgd or `b2=0.98` for lion."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    decay_vectors: bool = True
    """Also apply weight decay to biases, the scales of norms, and all other arrays with
    one axis."""
    adam_b1: Rate = 0.9
    """Decay of the first moment of adamw and radam."""
    adam_b2: Rate = 0.999
    """Decay of their second moment."""
    adam_eps: Positive = 1e-8
    """Term added to their denominator."""
    clip_norm: NotNegative = 1.0
    """Global norm to which gradients are clipped; 0 = no clipping."""
    label_smoothing: Rate = 0.0
    """Share of each label that training spreads over all classes; the training loss
    shown is for the smoothed labels."""
    ema: Rate = 0.0
    """Decay of an average of the parameters over the steps, without a bias to the first
    ones. Validation, the best checkpoint and the test use it; 0 = no average."""
    mixup: NotNegative = 0.0
    """Image tasks: show mixtures of two images, with the labels of both; the parameter
    of the Beta distribution of their shares. 0 = none."""
    cutmix: NotNegative = 0.0
    """Image tasks: the same, with a rectangle of the other image; with mixup, each is
    used in half of the steps. 0 = none."""
    dtype: Dtype = "float32"
    """Compute dtype of activations; parameters are always float32."""
    remat: bool = False
    """Keep only each block's input for the backward pass: less memory, more time."""
    seq_devices: Size = 1
    """Devices over which each sequence is split (linear, cosformer, flow); the batch is
    split over groups of this many devices."""
    eval_every: Size = 500
    """Steps between evaluations on the validation split (and checkpoints)."""
    eval_batch_size: Size = 32
    """Examples in an evaluation batch."""
    best_by: BestBy = "accuracy"
    """The validation metric that selects the best checkpoint; ties: the earliest."""
    log_every: Size = 50
    """Steps between log lines of training metrics."""

    def __post_init__(self) -> None:
        if callable(self.optimizer):  # A function becomes the text that locates it.
            path = locate(self.optimizer, "--train.optimizer")
            object.__setattr__(self, "optimizer", path)

    @property
    def falls(self) -> int:
        """The step before which a warm-up must end: the last, or trapezoid's decay."""
        return self.steps - self.steps // 5 * (self.schedule == "trapezoid")

    @property
    def too_warm(self) -> bool:
        """Whether the warm-up is too long for a schedule that ends with the run."""
        ends = self.schedule in ("cosine", "linear", "trapezoid")
        return ends and self.warmup >= self.falls

    @property
    def bound_to_steps(self) -> list[str]:
        """The settings that make each step depend on the total number of steps.

        Without any, a longer run starts exactly like a shorter one.
        """
        ends = ["schedule"] * (self.schedule not in ("constant", "lra"))
        shares = ("length_warmup", "curriculum")
        return ends + [name for name in shares if getattr(self, name)]


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Pretraining on the task's own training inputs, in the first steps of a run.

    Source for masked tokens: Amos et al. 2023, arXiv:2310.02980.
    """

    steps: Count = 0
    """Number of the run's steps that reconstruct masked tokens, without labels, before
    the remaining steps train on the labels; each part has its own schedule."""
    mask_rate: Annotated[float, Range("a number between 0 and 1", above=0, below=1)] = (
        0.5
    )
    """Share of the tokens that are masked; the authors of the method use half for
    Image."""
    learning_rate: Positive | None = None
    """Peak of the schedule of pretraining; None = that of the other steps."""

    def part(self, step: int) -> Part:
        """The part of the run that the step after ``step`` steps belongs to."""
        return "pretrain" if step < self.steps else "train"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """How data are batched; tasks add the settings of their data."""

    buckets: str = "auto"
    """Lengths to which batches are padded: auto (up to eight, or one in a run of less
    than 400 steps, which takes less time than compiling eight), one (the longest
    example), none (always max_length), or a list as in `768,1024,2000`."""

    packing: bool = False
    """Pack the examples of each training batch into rows of the longest bucket; each
    example has the same loss as in its own row."""

    def __post_init__(self) -> None:
        _spell_paths(self)

    batch_fields: ClassVar[tuple[str, ...]] = ("buckets", "packing")
    """The settings that do not change the set of examples."""

    start_fields: ClassVar[tuple[str, ...]] = ()
    """The settings that change training, but not the examples."""

    @property
    def reader_arguments(self) -> dict[str, Any]:
        """The settings of the task's reader, which decide on the examples."""
        names = {field.name for field in dataclasses.fields(self)}
        return {name: getattr(self, name) for name in names - set(self.batch_fields)}

    length_fields: ClassVar[tuple[str, ...]] = ("max_length",)
    """The task's settings that limit the lengths of sequences."""

    def check(self) -> None:
        """Refuses invalid settings; here, those of another type.

        Raises:
          ValueError: with the flag, the expected value and that of the setting.
        """
        check_types(self, "--data.")

    @property
    def longest(self) -> int | None:
        """The longest possible sequence; None for a task without such a setting."""
        lengths = (getattr(self, name, None) for name in self.length_fields)
        return max((length for length in lengths if length is not None), default=None)

    @property
    def image_shape(self) -> tuple[int, int] | None:
        """Rows and columns of images, where these settings decide on them."""
        return None

    @property
    def augments(self) -> bool:
        """Whether training examples are changed each time they are shown."""
        return False

    @property
    def groups(self) -> tuple[float, ...]:
        """Where training shows one group of examples after another: the share of the
        steps after which the next begins. The groups are equal parts of the training
        split, in its order."""
        return ()

    @property
    def shown(self) -> tuple[str, ...]:
        """In words, how training shows its examples, if not as they are."""
        return ()

    @property
    def chosen_on_test(self) -> bool:
        """Whether the best checkpoint is chosen on the test split itself."""
        return getattr(self, "validation", None) == "test"

    source: ClassVar[str] = "the task's own"
    """Where the examples come from without a path, as in ``drawn, seed {seed}``."""

    is_generated: ClassVar[bool] = False
    """Whether examples without a path are made by a rule, and so are always the same
    for the same settings; files may change."""

    @property
    def origin(self) -> str:
        """Where the examples come from, in words."""
        return self.source.format_map(vars(self)) if self.is_own else "original files"

    @property
    def from_files(self) -> bool:
        """Whether the examples are read from files."""
        return not (self.is_generated and self.is_own)

    @property
    def is_own(self) -> bool:
        """Whether the examples are those of the task, and not of the user's files."""
        return getattr(self, "path", None) is None


@dataclasses.dataclass(frozen=True)
class StoredData(DataConfig):
    """Where data come from and how they are batched."""

    dir: Name | None = None
    """Folder of prepared data; by default that of tensorflow-datasets."""
    path: Name | None = None
    """Original files: an archive or a folder, see docs/tasks.md. By default the archive
    is downloaded."""

    batch_fields: ClassVar[tuple[str, ...]] = ("dir", *DataConfig.batch_fields)
    source: ClassVar[str] = "original archive"


@dataclasses.dataclass(frozen=True)
class BytesData(StoredData):
    """Where texts come from, which are read byte by byte, and how they are batched."""

    max_length: Size = 4_000
    """Texts are truncated to this many bytes."""


@dataclasses.dataclass(frozen=True)
class GeneratedData(StoredData):
    """Where data come from, how many are generated and how they are batched."""

    path: Name | None = None
    """Original files, see docs/tasks.md. By default the data are generated."""
    seed: Count = 0
    """Seed of the generated data."""
    processes: Processes | None = None
    """Processes that generate data; by default one per core."""
    num_train: Size = 96_000
    """Generated training examples."""
    num_valid: Size = 2_000
    """Generated validation examples."""
    num_test: Size = 2_000
    """Generated test examples."""

    generator_fields: ClassVar[tuple[str, ...]] = ("num_train", "num_valid", "num_test")
    """The settings that files, which are read as they are, do not follow."""
    source: ClassVar[str] = "generated, seed {seed}"
    is_generated: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        for name in () if self.is_own else self.generator_fields:
            value = getattr(self, name)
            if value != getattr(type(self), name):
                reason = "with --data.path, whose examples are read as they are"
                raise expected(f"--data.{name}", f"no value {reason}", value)


@dataclasses.dataclass(frozen=True)
class Config:
    """One run: task, mechanism, preset, and everything that they resolve to.

    Parts that are not given come from the preset: ``Config()`` is `get_preset()`.
    """

    task: str = "listops"
    """Task to train on: a name, or package.module:TASK for your own."""
    attention: str = "cosformer"
    """Attention mechanism: a name, or package.module:function for your own function or
    nnx.Module class."""
    preset: str = None  # pyright: ignore[reportAssignmentType]  # the task's first
    """Named set of defaults for the task; by default its first."""
    seed: Count = 0
    """Seed for initialisation, the order of examples and dropout."""
    workdir: Name | None = None
    """Run directory; by default under runs/, named after the settings."""
    distributed: bool = False
    """Run as one of several processes, which are detected on a TPU pod, under SLURM or
    Open MPI, and given by the next three flags elsewhere."""
    coordinator: str | None = None
    """HOST:PORT of process 0, reachable from all processes."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Index of this process, from 0."""
    profile: bool = False
    """Write a trace of ten steps to profile/ in the run directory, for TensorBoard or
    Perfetto."""
    wandb: str | None = None
    """Weights & Biases project to report to, which needs `pip install wandb`;
    WANDB_MODE=offline in the environment keeps the reports on this machine."""
    train: TrainConfig = None  # pyright: ignore[reportAssignmentType]
    """Optimisation, evaluation and checkpoints."""
    pretrain: PretrainConfig = PretrainConfig()
    model: ModelConfig = None  # pyright: ignore[reportAssignmentType]
    """Sizes and parts of the model."""
    data: DataConfig = None  # pyright: ignore[reportAssignmentType]
    """The task's own data settings."""

    def __post_init__(self) -> None:
        # A user's function, module or class becomes the string that locates it.
        object.__setattr__(self, "attention", spell(self.attention))
        _spell_paths(self)
        if self.preset is None:
            object.__setattr__(self, "preset", next(iter(find_task(self.task).presets)))
        missing = [part for part in _PARTS if getattr(self, part) is None]
        if missing:
            preset = get_preset(self.task, self.preset, self.attention)
            for part in missing:
                object.__setattr__(self, part, getattr(preset, part))

    def replace(self, **changes: Any) -> Self:
        """Copy with fields replaced; a dict replaces fields of one of its parts.

        >>> Config().replace(seed=1, train={"steps": 10}).train.steps
        10

        Raises:
          TypeError: there is no such field.
        """
        for name in _PARTS:
            if isinstance(changes.get(name), dict):
                part = getattr(self, name)
                changes[name] = dataclasses.replace(part, **changes[name])
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dict, as written to ``config.json``."""
        values = dataclasses.asdict(self)
        for field in dataclasses.fields(ModelConfig):
            if field.metadata:  # Without a flag: other parts of the config decide it.
                del values["model"][field.name]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any], allow_code: bool = False) -> Self:
        """Inverse of :meth:`to_dict`; the task determines the type of ``data``.

        Ignores the entries of ``config.json`` that are not part of the config.

        Args:
          values: the dict.
          allow_code: import a user's own task, see `find_task`.

        Raises:
          ValueError: a field unknown to this version, or to the task, or a value of the
            wrong type.
        """
        needed = "the fields of this version's Config"
        try:
            data = find_task(values["task"], allow_code).data
            parts = {"train": TrainConfig, "pretrain": PretrainConfig}
            parts |= {"model": ModelConfig, "data": data}
            nested = {
                name: kind(**drop_removed(name, values[name], "config"))
                for name, kind in parts.items()
            }
            ignored = {*_OF_A_RUN, *_WITHOUT_SUCCESSOR}
            fields = {n: v for n, v in values.items() if n not in ignored}
            config = cls(**{**fields, **nested})
        except (KeyError, TypeError) as error:
            raise expected("config", needed, reason(error)) from error
        config.check_types()
        return config

    def check_types(self) -> None:
        """Refuses values that no command line would accept.

        Raises:
          ValueError: a value does not have its field's type; names the flag.
        """
        check_types(self, "--")
        for part in _PARTS:
            check_types(getattr(self, part), f"--{part}.")
        for name in ("hybrid", "attention_options", "mlp_options", "cutoffs", "stages"):
            value = getattr(self.model, name)
            if not isinstance(value, str):
                raise expected(f"--model.{name}", "text", f"{value!r}")

    @property
    def max_length(self) -> int:
        """The longest sequence of the model: that of `model`, or the pixels of images
        whose size `data` decides on."""
        shape = self.data.image_shape
        return self.model.max_length if shape is None else shape[0] * shape[1]

    @property
    def mixers(self) -> str:
        """The mechanisms of the blocks: `attention`, or all of a hybrid."""
        return " / ".join(self.model.hybrid_names) or self.attention

    @property
    def buckets(self) -> str:
        """`data.buckets`, with `one` in place of `auto` in a run of few steps."""
        auto, steps = self.data.buckets == "auto", self.train.steps
        return "one" if auto and steps < LEAST_STEPS_OF_BUCKETS else self.data.buckets

    @property
    def own_parts(self) -> dict[str, str]:
        """The user's own code that this config names, by flag; Optax's functions do not
        count."""
        named = {
            "--attention": self.attention,
            "--task": self.task,
            "--train.optimizer": self.train.optimizer,
        }
        named |= {f"--model.{x}": y for x, y in self.model.own_parts.items()}
        optax = re.compile(r"optax(\.contrib)?:\w+")
        return {x: y for x, y in named.items() if ":" in y and not optax.fullmatch(y)}

    def flag(self, name: str) -> str:
        """The flag of a setting, by its name in Python; other names are unchanged."""
        if name == "mechanism":
            return "--attention"
        for part in ("model", "train", "data"):
            fields = dataclasses.fields(getattr(self, part))
            if name in [field.name for field in fields if not field.metadata]:
                return f"--{part}.{name}"
        return name

    def identity(self) -> dict[str, Any]:
        """Flat ``{"train.steps": ...}`` of the fields on which results depend."""
        return with_effect(self.to_dict())

    def protocol(self) -> dict[str, Any]:
        """The same for training and model: all but the data, the seed and names."""
        parts = ("train.", "pretrain.", "model.")
        return {n: v for n, v in self.identity().items() if n.startswith(parts)}

    def run_name(self, preset: "Config") -> str:
        """Folder name of a run: the same for equal settings, different otherwise.

        Args:
          preset: the preset from which this config started; settings that differ from
            it add a short hash to the name.
        """
        parts = f"{self.task}-{self.attention}".replace(":", ".").replace("/", ".")
        name = f"{parts}-{self.preset}-seed{self.seed}"
        base = preset.replace(attention=self.attention, seed=self.seed).identity()
        mine = self.identity()
        changed = {key: value for key, value in mine.items() if value != base[key]}
        if not changed:
            return name
        digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode())
        return f"{name}-{digest.hexdigest()[:8]}"


def _spell_paths(settings: Any) -> None:
    """Makes text of a frozen dataclass' paths, as flags and JSON have them."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, os.PathLike):
            object.__setattr__(settings, field.name, os.fspath(value))


def get_preset(
    task: str = "listops", preset: str | None = None, attention: Any = "cosformer"
) -> Config:
    """The config of a named preset, including the mechanism's own settings.

    Args:
      task: its name.
      preset: None = the task's default, its first.
      attention: the mechanism: a name, your own function or ``nnx.Module`` class, or
        anything else that `lra_jax.attention.resolve` accepts.

    Raises:
      ValueError: unknown task or preset; the error suggests the nearest name.

    Examples:
      >>> config = get_preset("listops", "compact", "linformer")
      >>> config.train.batch_size, config.model.num_layers
      (32, 2)
    """
    attention = spell(attention)
    presets = find_task(task).presets
    preset = next(iter(presets)) if preset is None else preset
    config = presets[known("--preset", preset, presets)](attention)
    # A user's own task need not repeat its name, nor those of its presets.
    config = config.replace(task=task, preset=preset)
    return config.replace(**_own_settings(task, preset, attention))


def _own_settings(task: str, preset: str, attention: str) -> dict[str, Any]:
    """The settings in `mechanisms.PRESETS`, as taken by `Config.replace`."""
    parts: dict[str, Any] = {}
    of_lra = find_task(task).suite is None  # A lone * means all of LRA's tasks.
    for names, tasks in mechanisms.PRESETS.get(attention, {}).items():
        fitting = tasks.items() if fnmatch.fnmatchcase(preset, names) else ()
        for pattern, flags in fitting:
            if (of_lra or pattern != "*") and fnmatch.fnmatchcase(task, pattern):
                for flag, value in flags.items():
                    part, _, name = flag.partition(".")
                    parts.setdefault(part, {})[name] = value
    return parts


_PARTS = ("train", "pretrain", "model", "data")
_OF_A_RUN = ("data_fingerprint", "first_steps", "first_path", "started_from")
# Fields of earlier versions on which no result depended.
_WITHOUT_SUCCESSOR = ("debug_nans",)

# Paths, reports, and the hardware and memory used change no result of a run beyond
# rounding.
_WITHOUT_EFFECT = frozenset(
    {"workdir", "data.dir", "data.processes", "train.seq_devices"}
    | {"train.remat"}
    | {"distributed", "coordinator", "num_processes", "process_id"}
    | {"profile", "wandb", *_WITHOUT_SUCCESSOR}
)


def with_effect(nested: dict[str, Any]) -> dict[str, Any]:
    """Flat ``{"train.steps": ...}`` of a config's values that affect results."""
    flat = flatten(nested)
    return {name: v for name, v in flat.items() if name not in _WITHOUT_EFFECT}


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turns ``{"train": {"steps": 1}}`` into ``{"train.steps": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
