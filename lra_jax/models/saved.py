"""Models in files: weights, settings, and how raw examples become tokens.

    saved = load("runs/listops-cosformer-compact-seed0")   # or a file of `save`
    saved.predict(["[MAX 2 9 [MIN 4 7 ] 0 ]"]).labels

``NAME.safetensors`` holds the arrays of a model, named by their path in it, and
``NAME.json`` next to it holds everything else. So a file can be loaded without the
trainer, the task and the data.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lra_jax import files, own_code, seals
from lra_jax.attention.inputs import check_size
from lra_jax.attention.registry import resolve, spell
from lra_jax.errors import a_thing, drop_removed, expected, known, reason
from lra_jax.files import expand_home, read_json
from lra_jax.models import arrays
from lra_jax.models.attention import Buffer
from lra_jax.models.classifier import SequenceClassifier
from lra_jax.models.config import ModelConfig, parse_options
from lra_jax.models.decision import DecisionTransformer
from lra_jax.models.language import CausalLM, LanguageModel, MaskedLM
from lra_jax.models.matching import MatchingClassifier
from lra_jax.models.raw import IDS, Raw, Read, check_raw, reader
from lra_jax.models.tokens import AutoEncoder, TokenClassifier

FILE = "model.safetensors"
"""The name of a model's file in a run directory."""

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        SequenceClassifier,
        MatchingClassifier,
        CausalLM,
        MaskedLM,
        TokenClassifier,
        AutoEncoder,
        DecisionTransformer,
    )
}
# Settings of an encoder that earlier versions saved under another name.
_FORMER = {"options": "attention_options", "qkv_features": "qkv_dim"}


class Prediction(NamedTuple):
    """Classes of B examples; for a model of single positions, at each of them.

    Attributes:
      labels: `[B]`, or `[B, T]` with -1 beyond an example's end; of a regression, the
        predicted numbers; 0 and 1 `[B, C]` where an example has any of the classes.
      probabilities: float32 `[B, C]`, or `[B, T, C]`; none for numbers, C = 0.
    """

    labels: np.ndarray
    probabilities: np.ndarray


def decide(
    scores: np.ndarray, scale: Sequence[float] | None = None, several: bool = False
) -> Prediction:
    """The prediction of logits `[B, C]` or `[B, T, C]`; ``scale`` has the mean and the
    deviation of numbers, and with ``several`` an example may have any of the classes.
    """
    if scale is not None:
        mean, deviation = scale
        numbers = scores[:, 0].astype(np.float64) * deviation + mean
        return Prediction(numbers, np.empty((len(scores), 0), np.float32))
    if several:
        labels = (scores > 0).astype(np.int32)
        return Prediction(labels, np.asarray(jax.nn.sigmoid(scores)))
    return Prediction(scores.argmax(-1), np.asarray(jax.nn.softmax(scores, -1)))


@dataclasses.dataclass(frozen=True)
class Saved:
    """A model loaded from a file.

    Attributes:
      model: the module, with its weights.
      config: the settings of its encoder.
      raw: how raw examples become tokens (`lra_jax.models.raw`).
      about: anything else in the file, such as the task and the settings of its run.
    """

    model: Any
    config: ModelConfig
    raw: Raw = dataclasses.field(default_factory=lambda: IDS)
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def predict(self, examples: Sequence[Any], batch_size: int = 32) -> Prediction:
        """The most probable class of each example, and all probabilities.

        Args:
          examples: a list of raw examples: ListOps expressions, texts, images
            `uint8 [rows, columns]`, in colour `[rows, columns, 3]`, or integers `[T]`,
            depending on the model's task;
            for a model of pairs, a list of pairs of these.
          batch_size: examples computed at once.

        Raises:
          ValueError: the model cannot read them, or its vocabulary lacks some ids.
        """
        if isinstance(self.model, DecisionTransformer):
            needed = "one of a classifier or a language model"
            raise expected("model", needed, "a DecisionTransformer, which acts by step")
        several = isinstance(examples, Sequence | np.ndarray)
        if not several or isinstance(examples, str | bytes) or not len(examples):
            needed = "a list of at least one example"
            raise expected("examples", needed, f"{examples!r}"[:60])
        check_size("batch_size", batch_size)
        rows = [self._tokens(index, example) for index, example in enumerate(examples)]
        scores = self._scores(rows, batch_size)
        prediction = decide(
            scores, self.raw.get("scale"), self.raw.get("several", False)
        )
        if scores.ndim == 3:
            lengths = np.array([len(row[0]) for row in rows])
            beyond = np.arange(scores.shape[1])[None] >= lengths[:, None]
            prediction.labels[beyond] = -1
        return prediction

    def _scores(self, rows: list[list[np.ndarray]], batch_size: int) -> np.ndarray:
        """The logits of all examples, computed batch by batch."""
        widths = self._widths([max(map(len, row)) for row in rows])
        scores = [np.empty(0)] * len(rows)
        for width in sorted(set(widths)):
            chosen = [index for index, padded in enumerate(widths) if padded == width]
            size = min(batch_size, len(chosen))
            for first in range(0, len(chosen), size):
                part = chosen[first : first + size]
                filled = part + part[:1] * (size - len(part))
                batch = _batch([rows[index] for index in filled], width)
                scored = np.asarray(self._logits(batch))
                for index, row in zip(part, scored, strict=False):
                    scores[index] = row
        return np.stack(scores)

    def _widths(self, lengths: Sequence[int]) -> list[int]:
        """The length to which each example is padded, its own or more."""
        longest = max(lengths)
        if self.config.grid is not None:
            return [longest] * len(lengths)  # Images have one size.
        # The mean over all positions depends on the padding, as it did in training.
        if getattr(self.model, "padding", "lengths") == "zeros":
            buckets = [*self.raw.get("buckets", ()), self._max_length]
            return [next(w for w in buckets if w >= length) for length in lengths]
        # Few widths, because each is compiled once.
        width = min(self.config.max_length, 2 ** (longest - 1).bit_length())
        return [width] * len(lengths)

    @property
    def _max_length(self) -> int:
        return self.raw.get("max_length", self.config.max_length)

    def _tokens(self, index: int, example: Any) -> list[np.ndarray]:
        """The sequences of an example: one, or two for a pair."""
        name = f"example {index}"
        parts = [example]
        if isinstance(self.model, MatchingClassifier):
            several = isinstance(example, Sequence | np.ndarray)
            if not several or isinstance(example, str | bytes) or len(example) != 2:
                raise expected(name, "a pair", f"{example!r}"[:60])
            parts = example
        size = self.model.encoder.vocab_size
        sequences = [self._read(name, part) for part in parts]
        for tokens in sequences:
            if tokens.dtype.kind == "f":
                continue
            if tokens.min() < 0 or tokens.max() >= size:
                needed = f"ids of the vocabulary, from 0 to {size - 1}"
                raise expected(name, needed, f"{tokens.min()} to {tokens.max()}")
        return sequences

    @functools.cached_property
    def _read(self) -> Read:
        return reader(self.raw, self._max_length)

    @functools.cached_property
    def _logits(self) -> Callable[[list[Any]], jax.Array]:
        graphdef, state = nnx.split(self.model)

        @jax.jit
        def call(state: nnx.State, batch: list[Any]) -> jax.Array:
            model: Any = nnx.merge(graphdef, state)
            return model(*batch)

        return functools.partial(call, state)


def save(
    file: str | os.PathLike[str],
    model: nnx.Module,
    *,
    raw: Raw = IDS,
    about: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> None:
    """Writes a model: its arrays to ``file``, everything else as JSON next to it.

    Args:
      file: ``NAME.safetensors``.
      model: one of this package's classifiers or language models, or a
        `DecisionTransformer`.
      raw: how raw examples become tokens, for `Saved.predict`.
      about: further JSON values, available as `Saved.about`.
      replace: write ``NAME.json`` over any other file as well.

    Raises:
      ValueError: another kind of model, one whose attention cannot be found by name or
        has arrays that are neither ``nnx.Param`` nor `Buffer`, an option or another
        value that JSON cannot hold, a ``raw`` that is not such a description or
        exceeds the model's length, or another file at ``NAME.json``. Nothing is written
        then.

    Examples:
      >>> import tempfile
      >>> from lra_jax.models import SequenceClassifier
      >>> model = SequenceClassifier(
      ...     256, 2, mechanism="linear", num_layers=1, embed_dim=32, num_heads=2,
      ...     mlp_dim=64, max_length=128, rngs=nnx.Rngs(0),
      ... )
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(f"{folder}/model.safetensors", model)
      ...     again = load(f"{folder}/model.safetensors")
      >>> again.predict([[1, 2, 3], [4, 5]]).labels.shape
      (2,)
    """
    path = _path(file)
    if not replace:
        check_free(path)
    check_raw(raw)
    kind = describe(model)
    longest = kind["encoder"]["max_length"]
    if raw.get("max_length", longest) > longest:
        needed = f"no max_length above the model's, {longest}"
        raise expected("raw", needed, raw["max_length"])
    _check_variables(model)
    described: dict[str, Any] = {
        "model": kind,
        "raw": _json("raw", dict(raw)),
        "about": _json("about", dict(about or {})),
    }
    arrays.save_arrays(path, nnx.to_pure_dict(nnx.state(model, (nnx.Param, Buffer))))
    described["arrays"] = seals.sha256(path)
    described["seal"] = seals.digest(described)
    files.write_json(path.with_suffix(".json"), described)


def check_free(file: str | os.PathLike[str]) -> None:
    """Refuses a file whose description would replace another file.

    Raises:
      ValueError: ``NAME.json`` exists, and `save` did not write it; or another suffix.
    """
    path = _path(file)
    described = path.with_suffix(".json")
    if not described.exists():
        return
    try:
        values = read_json(described)
    except (OSError, ValueError):
        values = None
    if not isinstance(values, dict) or not {"model", "raw", "about"} <= values.keys():
        needed = "NAME.safetensors, where NAME.json is free for the model's settings"
        got = f"{path} next to {described.name}, which `save` did not write"
        raise expected("file", needed, got)


def load(run_or_file: str | os.PathLike[str], *, allow_code: bool = False) -> Saved:
    """Reads a model written by `save`, or by a finished run.

    Args:
      run_or_file: a run directory, or ``NAME.safetensors``.
      allow_code: import and call an attention, or another part of the model, that the
        file names as ``package.module:thing``. Whoever wrote that file chose it. For a
        run directory, the copy in its ``code/`` is imported, unless the module is
        loaded already.

    Raises:
      ValueError: there is no such file, or it does not fit this version of the package.
    """
    file = read_description(run_or_file)
    is_run = expand_home(run_or_file, "run").is_dir()
    code = own_code.prefer_copies(file.arrays.parent) if allow_code and is_run else None
    with code or contextlib.nullcontext():
        with _refuse_damaged(file.arrays):
            make = maker(file.model, allow_code)
        graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    like = nnx.to_pure_dict(nnx.filter_state(state, (nnx.Param, Buffer)))
    nnx.replace_by_pure_dict(state, arrays.load_arrays(file.arrays, like))
    model = nnx.merge(graphdef, state)
    return Saved(model, model.encoder.config, file.raw, file.about)


class Description(NamedTuple):
    """A saved model, without its arrays.

    Attributes:
      arrays: their file, which `load` reads without a run's own code.
      kind: the name of the model's class.
      model: its class, sizes and settings, as in `describe`.
      raw, about: see `Saved`.
    """

    arrays: Path
    kind: str
    model: dict[str, Any]
    raw: Raw
    about: Mapping[str, Any]


def read_description(run_or_file: str | os.PathLike[str]) -> Description:
    """Reads what is next to the arrays of a model; errors are those of `load`."""
    path = expand_home(run_or_file, "run")
    if not path.exists():
        needed = f"a run directory with {FILE}, or NAME.safetensors"
        raise expected("run", needed, f"{path}, which does not exist")
    if path.is_dir():
        path = path / FILE
        if not path.exists():
            needed = (
                f"a run directory with {FILE}, written at the end of a run or by "
                "`python -m lra_jax.evaluate --workdir=... --save=FILE`"
            )
            raise expected("run", needed, path.parent)
    path = _path(path)
    notes = path.with_suffix(".json")
    with _refuse_damaged(path):
        described = read_json(notes, "the description of a model")
        if not isinstance(described, dict):
            raise TypeError(a_thing(described))
        seal = described.pop("seal", None)
        # Without a seal, the files may be changed after `save` wrote them.
        if seal not in (None, seals.digest(described)):
            raise expected(str(notes), "the description that was written", "another")
        if seal is not None and not (
            path.exists() and described["arrays"] == seals.sha256(path)
        ):
            raise expected(str(path), "the arrays that were written", "others")
        model, raw, about = (described[x] for x in ("model", "raw", "about"))
        check_raw(raw)
        return Description(path, model["kind"], model, raw, about)


@contextlib.contextmanager
def _refuse_damaged(path: Path) -> Iterator[None]:
    """Context that reads a model's description; a damaged one is a `ValueError`."""
    try:
        yield
    except (OSError, KeyError, TypeError, AttributeError) as error:
        notes, needed = path.with_suffix(".json"), "the description of a model"
        raise expected(str(notes), needed, reason(error)) from error


def is_known(model: nnx.Module) -> bool:
    """Whether `save` takes models of this kind."""
    return type(model) in _KINDS.values()


def describe(model: Any) -> dict[str, Any]:
    """Everything about a model but its arrays, as JSON; errors are those of `save`."""
    sizes, config = own_sizes(model), model.encoder.config
    settings = {x.name: getattr(config, x.name) for x in dataclasses.fields(config)}
    settings["mechanism"] = _spell(config.mechanism)
    settings["hybrid"] = [_spell(one) for one in config.hybrid_names]
    dtype = settings["dtype"]  # A dtype, or a scalar type such as jnp.bfloat16.
    settings["dtype"] = None if dtype is None else str(jnp.dtype(dtype))
    for name in ("attention_options", "mlp_options"):
        settings[name] = parse_options(settings[name])
        for option, value in settings[name].items():  # `load` makes tuples of lists.
            if _tuples(_json(name, value)) != value:
                needed = "numbers, text, and tuples of them, which a file can hold"
                raise expected(name, needed, f"{option}={value!r}")
    described = {"kind": type(model).__name__, **sizes, "encoder": settings}
    return _json("model", described)


def _spell(spec: Any) -> str:
    """A mechanism as text that `resolve` accepts."""
    mechanism = resolve(spec)
    if not mechanism.foreign:
        return mechanism.name
    try:
        return spell(spec)
    except ValueError as error:
        needed = "an attention given by name or as 'package.module:function'"
        got = f"the function {mechanism.name!r}"
        raise expected("model", needed, got) from error


def own_sizes(model: Any) -> dict[str, int]:
    """The sizes of a model that its config does not have, such as the vocabulary's.

    Raises:
      ValueError: it is not one of this package's models.
    """
    if not is_known(model):
        raise expected("model", f"one of {', '.join(_KINDS)}", a_thing(model))
    if isinstance(model, DecisionTransformer):
        widths = {"state_dim": model.states, "action_dim": model.actions}
        sizes = {name: layer.in_features for name, layer in widths.items()}
        return sizes | {"horizon": len(model.times[...])}
    sizes = {"vocab_size": model.encoder.vocab_size}
    if not isinstance(model, LanguageModel):  # Its classes are its vocabulary.
        sizes["num_classes"] = model.num_classes
    return sizes


def _check_variables(model: nnx.Module) -> None:
    """Refuses arrays that would not be written, such as an ``nnx.BatchStat``."""
    kept = nnx.Param | Buffer | nnx.Intermediate
    kinds = {type(variable) for _, variable in nnx.to_flat_state(nnx.state(model))}
    others = sorted(kind.__name__ for kind in kinds if not issubclass(kind, kept))
    if others:
        needed = "one whose arrays are each an nnx.Param or a lra_jax.models.Buffer"
        raise expected("model", needed, ", ".join(others))


def _json(name: str, values: Any) -> Any:
    """The values as a file of JSON returns them; numbers of numpy are numbers."""
    try:
        return json.loads(json.dumps(values, default=_number))
    except (TypeError, ValueError) as error:
        raise expected(name, "JSON values", error) from error


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r}"[:60])


def maker(
    described: Mapping[str, Any], allow_code: bool = False
) -> Callable[[nnx.Rngs], Any]:
    """Returns a function that makes new models from a description.

    Raises:
      ValueError: it is not a description, or names code that is not allowed.
    """
    rest = dict(described)
    kind = _KINDS[known("kind", rest.pop("kind"), _KINDS)]
    stored = drop_removed("model", rest.pop("encoder"), "model")
    settings = {_FORMER.get(name, name): _tuples(x) for name, x in stored.items()}
    settings.pop("cls_token", None)  # Earlier versions kept pooling apart.
    for name in {"pooling", "padding", "interaction"} & rest.keys():
        settings[name] = rest.pop(name)
    dtype = settings["dtype"]
    settings["dtype"] = None if dtype is None else jnp.dtype(dtype)
    config = ModelConfig(**settings)
    named = (settings["mechanism"], *settings["hybrid"], *config.own_parts.values())
    for name in named:
        if not allow_code and ":" in name:
            raise expected("allow_code", f"True to import {name!r}", False)
    return lambda rngs: kind(**rest, config=config, rngs=rngs)


def _tuples(value: Any) -> Any:
    """JSON lists turned back into tuples, also in a dict of options."""
    if isinstance(value, dict):
        return {name: _tuples(one) for name, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _path(file: str | os.PathLike[str]) -> Path:
    path = expand_home(file, "file")
    if path.suffix != ".safetensors":
        raise expected("file", "NAME.safetensors", path)
    return path


def _batch(rows: list[list[np.ndarray]], width: int) -> list[np.ndarray]:
    """Tokens `[B, width]` and lengths `[B]` of each of the sequences."""
    batch = []
    for sequences in zip(*rows, strict=True):
        dtype = np.float32 if sequences[0].dtype.kind == "f" else np.int32
        tokens = np.zeros((len(rows), width, *sequences[0].shape[1:]), dtype)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        lengths = np.array([len(sequence) for sequence in sequences], np.int32)
        batch += [tokens, lengths]
    return batch
