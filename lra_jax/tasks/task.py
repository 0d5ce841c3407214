"""The entry of a task."""

import dataclasses
import functools
import inspect
import pkgutil
import statistics
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lra_jax.configs import Config, DataConfig, StoredData, TrainConfig, get_preset
from lra_jax.errors import InputError, expected, rename
from lra_jax.tasks.published import Published

if TYPE_CHECKING:
    import numpy as np

    from lra_jax.data.dataset import SequenceDataset


Named = str | Callable[..., Any]
"""A function, or ``"package.module:function"``, which is imported on first use."""


def _find(function: Named) -> Any:
    return pkgutil.resolve_name(function) if isinstance(function, str) else function


def decode_bytes(tokens: "np.ndarray") -> str:
    """Bytes as text; cut or invalid UTF-8 shows as a replacement character."""
    return tokens.tobytes().decode("utf-8", errors="replace")


def has_sizes(dataset: "SequenceDataset", train: int, valid: int, test: int) -> bool:
    """Whether the splits have these sizes, those of the Long-Range Arena."""
    sizes = {split: dataset.num_examples(split) for split in dataset.splits}
    return sizes == {"train": train, "valid": valid, "test": test}


def rate_sweeps(
    rates: Mapping[str, tuple[float, ...]],
) -> dict[str, dict[str, tuple[float, ...]]]:
    """The `Task.sweeps` of a protocol that tunes the learning rate, by preset."""
    return {preset: {"train.learning_rate": tried} for preset, tried in rates.items()}


@dataclasses.dataclass(frozen=True)
class Task:
    """Everything about a task.

    Functions that need jax or the data readers may be named as
    ``"package.module:function"`` and are then imported on first use. Those of this
    package are: command lines read entries, and have to be quick.

    Attributes:
      name: as in ``--task``.
      data: the dataclass of its ``--data.*`` settings.
      presets: ``(attention) -> Config``, with train, model and data, by name.
      reader: names ``(data_dir, **settings) -> SequenceDataset``, which makes or finds
        the data; the settings are the `reader_arguments` of `data`. There is no
        ``data_dir`` unless `data` is a `StoredData`.
      reader_settings: further settings of the reader, which are not flags.
      model: names ``(config, dataset, rngs) -> nnx.Module``.
      objective: names ``(model, batch, rngs) -> sums``: the weighted sums "loss" and
        "correct" and the weight "count" over a batch, as float32 scalars. One that
        also takes ``label_smoothing`` gets that of the run, in training.
      can_pack: model and objective also take rows of several packed examples, as
        `lra_jax.data.packing` makes them.
      pairs: an example is two sequences, which the model compares.
      scores: names ``(dataset, split, loss, model) -> {name: number}``: a split's mean
        loss in units of the task, and its other scores, reported with the accuracy.
        The dataset's ``metric`` may name one to take the accuracy's place.
      image_shape: rows and columns where a sequence is an image; None for others, and
        where the data settings decide on them.
      per_position: labels belong to single positions, not to whole sequences.
      packs_rows: rows hold several documents, so an attention has to take
        ``segment_ids``.
      is_causal: requires a decoder, because the tokens after a position reveal its
        answer.
      suite: the set of tests to which it belongs, for ``lra_jax.sweep --suite``.
      sweeps: by preset, the flags that its protocol tunes, and the values to try. With
        a preset that is not here, the suite leaves this task out unless it is named.
      variants: by mechanism, the options with which the suite runs it a second time.
      chance: accuracy of guessing in percent, from the data settings; None = unknown.
      is_scaled: reports show the accuracy above chance, from 0 to 1.
      by_parts: reports show the mean accuracy over the parts that are tested
        separately instead of that on the test split.
      is_official: whether the data settings, and the number of examples in every split,
        are those of the Long-Range Arena, to which baselines and published rows apply.
      floors: ``(name, percent)`` of trivial baselines, such as chance.
      published: published test accuracies, each with its protocol.
      decoder: names ``(tokens, uint8 [length]) -> str``, for display; images have none.
      words: names a mapping that tells `lra_jax.models.raw` how to read words, if used.
      augmentation: names ``(tokens, generator) -> tokens``, applied to each training
        example if the data settings say so.
      tree_drawer: names ``(tokens) -> lra_jax.data.listops_language.Tree``, if
        sequences are nested expressions.
    """

    name: str
    data: type[DataConfig]
    presets: Mapping[str, Callable[[str], Config]]
    reader: Named
    reader_settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Named = "lra_jax.tasks.base:make_classifier"
    objective: Named = "lra_jax.tasks.base:classification_loss"
    can_pack: bool = False
    pairs: bool = False
    scores: Named | None = None
    image_shape: tuple[int, int] | None = None
    per_position: bool = False
    packs_rows: bool = False
    is_causal: bool = False
    suite: str | None = None
    sweeps: Mapping[str, Mapping[str, tuple[Any, ...]]] = dataclasses.field(
        default_factory=dict
    )
    variants: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    chance: Callable[[Any], float] | None = None
    is_scaled: bool = False
    by_parts: bool = False
    is_official: Callable[[Any, "SequenceDataset"], bool] = lambda data, dataset: False
    floors: tuple[tuple[str, float], ...] = ()
    published: tuple[Published, ...] = ()
    decoder: Named = "lra_jax.tasks.task:decode_bytes"
    words: str | None = None
    augmentation: Named | None = None
    tree_drawer: Named | None = None

    def accuracy_of(self, result: Mapping[str, Any]) -> float:
        """The test accuracy of a ``result.json``, for the best checkpoint, in percent;
        for a task `by_parts` it is the mean over its parts."""
        parts = result.get("test_accuracy_by_length")
        if self.by_parts and parts:
            return statistics.fmean(parts.values())
        return result["test_accuracy_best"]

    def rescale(self, data: DataConfig, accuracy: float) -> float | None:
        """An accuracy rescaled from chance (0) to 100 % (1); both are in percent."""
        if self.chance is None:
            return None
        chance = self.chance(data)
        return (accuracy - chance) / (100 - chance)

    def prepare(self, data: DataConfig) -> "SequenceDataset":
        """Generates or finds the data that the settings describe.

        Raises:
          ValueError: a setting is invalid, or a file is missing or malformed.
          OSError: the folder cannot be written, or its disk is full.
        """
        settings = data.reader_arguments
        read = _find(self.reader)
        place = {"data_dir": data.dir} if isinstance(data, StoredData) else {}
        try:
            return read(**place, **self.reader_settings, **settings)
        except InputError as error:
            if error.name not in settings:
                raise
            raise rename(error, f"--data.{error.name}") from error

    def check(self, config: Config) -> None:
        """See `lra_jax.tasks.checks.check_config`; errors name flags."""
        try:
            pkgutil.resolve_name("lra_jax.tasks.checks:check_config")(config, self)
        except InputError as error:
            raise rename(error, config.flag(error.name)) from error

    def check_on_devices(self, config: Config) -> None:
        """See `lra_jax.tasks.checks.check_on_devices`."""
        pkgutil.resolve_name("lra_jax.tasks.checks:check_on_devices")(config, self)

    def check_data(self, config: Config, dataset: "SequenceDataset") -> None:
        """See `lra_jax.tasks.checks.check_data`."""
        pkgutil.resolve_name("lra_jax.tasks.checks:check_data")(config, self, dataset)

    @property
    def make_model(self) -> Callable[..., Any]:
        """``(config, dataset, rngs) -> nnx.Module``."""
        return _find(self.model)

    @property
    def loss(self) -> Callable[..., dict[str, Any]]:
        """``(model, batch, rngs) -> sums``."""
        return _find(self.objective)

    def training_loss(self, train: TrainConfig) -> Callable[..., dict[str, Any]]:
        """The same, for training: with its label smoothing.

        Raises:
          ValueError: the objective has no parameter ``label_smoothing``.
        """
        loss, smoothing = self.loss, train.label_smoothing
        if not smoothing:
            return loss
        if "label_smoothing" not in inspect.signature(loss).parameters:
            needed = f"0 for --task={self.name}, whose objective has no such parameter"
            raise expected("--train.label_smoothing", needed, smoothing)
        return functools.partial(loss, label_smoothing=smoothing)

    def score(
        self, dataset: "SequenceDataset", split: str, loss: float, model: Any
    ) -> dict[str, float]:
        """The task's own scores of a model on a split, where its mean loss is ``loss``;
        most tasks have none."""
        if self.scores is None:
            return {}
        return _find(self.scores)(dataset, split, loss, model)

    @property
    def decode(self) -> Callable[["np.ndarray"], str]:
        """``(tokens) -> str``."""
        return _find(self.decoder)

    def raw(self, max_length: int) -> dict[str, Any]:
        """How a raw example becomes tokens, for `lra_jax.models.save`.

        Args:
          max_length: texts are truncated to this many bytes.
        """
        if self.image_shape is not None:
            return {"kind": "pixels", "shape": list(self.image_shape)}
        if self.words is not None:
            return {"kind": "words", **pkgutil.resolve_name(self.words)}
        if self.decode is decode_bytes and not self.packs_rows:
            return {"kind": "bytes", "max_length": max_length}
        return {"kind": "ids"}

    def shape_of(self, data: DataConfig) -> tuple[int, int] | None:
        """Rows and columns of the images, if the settings or the task say them."""
        return data.image_shape or self.image_shape

    def augment(self, data: DataConfig) -> Callable[..., "np.ndarray"] | None:
        """The augmentation of each training example; None = no augmentation."""
        if self.augmentation is None or not data.augments:
            return None
        return _find(self.augmentation)

    @property
    def tree(self) -> Callable[["np.ndarray"], Any] | None:
        """``(tokens) -> Tree``; None if sequences are not nested."""
        drawer = self.tree_drawer
        return None if drawer is None else _find(drawer)

    def published_beside(self, config: Config) -> tuple[Published, ...]:
        """The published rows of a run's mechanism, if it follows their protocol."""
        rows = [row for row in self.published if row.official == config.attention]
        return tuple(rows) if rows and self.follows_protocol(config) else ()

    def follows_protocol(self, config: Config) -> bool:
        """Whether a run has all ``train``, ``pretrain`` and ``model`` settings of the
        preset official, and shows examples of the same length, in the same way.

        Whether they are the published examples is for ``is_official`` to say.
        """
        if config.preset != "official" or "official" not in self.presets:
            return False
        official = get_preset(self.name, "official", config.attention)

        def settings(one: Config) -> tuple[Any, ...]:
            data: Any = one.data
            lengths = [getattr(data, name, None) for name in data.length_fields]
            return one.protocol(), lengths, data.shown

        return settings(config) == settings(official)


def synthetic(name: str, **entry: Any) -> Task:
    """A task whose labels belong to single positions of sequences drawn in memory, as
    in the tests of recall, copying and state tracking.
    """
    family: dict[str, Any] = {
        "model": "lra_jax.tasks.base:make_token_classifier",
        "decoder": "lra_jax.data.memory:decode",
        "per_position": True,
    }
    return Task(name=name, **{**family, **entry})
