"""The result of a run: one dataclass, which ``result.json`` holds with a seal."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from lra_jax import seals
from lra_jax.errors import (
    Amount,
    Count,
    Finite,
    Percent,
    Size,
    check_type,
    check_types,
    expected,
    within,
)
from lra_jax.files import read_json, write_json
from lra_jax.training.workdir import identify

FILE = "result.json"
"""The name of the file in a run directory."""

_ACCURACIES = ("test_accuracy_best", "test_accuracy_last", "valid_accuracy_best")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The scores of a finished run, and its cost.

    Accuracies are in percent, losses in nats; "best" is the checkpoint that was best on
    validation. Fields with a default may be missing in files of earlier versions.

    Attributes:
      task, attention, mixers, preset, seed: of the config.
      metric: the score that takes the accuracy's place, which is then 100 times it.
      scores: a task's own scores by name, such as ``bits_per_byte_best``; in the file
        each is called ``test_NAME``.
      test_accuracy_by_length: of the best checkpoint, by part of the test split.
      chance: the accuracy of guessing.
      test_scaled_accuracy: 0 is chance, 1 all correct.
      state_size: numbers in the state from which a causal model decodes.
      best_by: the validation metric that chose the best checkpoint.
      validation: "test" if the test split itself served as validation split.
      steps_per_second: the median of the reports; ``steps_per_second_kind`` is "cold"
        if it includes compilation, else "warm".
      shown_before: examples on which the model of ``--data.checkpoint`` was trained.
      data_wait: the share of the training time spent waiting for a batch.
      seconds: of all sessions, evaluations and saves included.
      device, commit: of a run resumed elsewhere all of them, joined by "; ".
    """

    task: str = ""
    attention: str = ""
    mixers: str = ""
    preset: str = ""
    seed: int = 0
    metric: str = "accuracy"
    test_accuracy_best: Finite
    test_accuracy_last: Finite
    test_loss_best: Finite | None = None
    test_loss_last: Finite | None = None
    scores: Mapping[str, Finite] = dataclasses.field(default_factory=dict)
    test_examples: Size
    test_accuracy_by_length: Mapping[str, Percent] = dataclasses.field(
        default_factory=dict
    )
    chance: Percent | None = None
    test_scaled_accuracy: Finite | None = None
    state_size: Amount | None = None
    valid_accuracy_best: Finite
    valid_loss_best: Finite
    best_step: Count
    best_by: str = "accuracy"
    validation: str = "holdout"
    steps: Count
    shown_before: Amount | None = None
    steps_per_second: Amount
    steps_per_second_kind: str = "warm"
    data_wait: Amount | None = None
    seconds: Amount
    parameters: Amount
    peak_memory_bytes: Amount
    peak_memory_kind: str = ""
    data: str = ""
    data_fingerprint: str = ""
    official_data: bool = False
    device: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    command: str | None = None

    def __post_init__(self) -> None:
        """Refuses values that tables cannot show, or would show as invalid numbers."""
        check_types(self)
        if self.metric == "accuracy":
            for name in _ACCURACIES:
                check_type(name, Percent, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """The contents of the file; what the task does not have is left out."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "scores":
                values |= {f"test_{name}": score for name, score in value.items()}
            elif value is not None and value != {}:
                values[field.name] = value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The result that a file holds, if no value is missing or out of its range."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        settings: dict[str, Any] = {x: values[x] for x in known if x in values}
        for name, field in known.items():
            if dataclasses.MISSING is field.default is field.default_factory:
                settings.setdefault(name, None)
        scores = {
            name.removeprefix("test_"): value
            for name, value in values.items()
            if name.startswith("test_") and name not in known
        }
        return cls(**settings, scores=scores)


def write_result(workdir: Path, result: Result) -> None:
    """Writes the result of a run, sealed together with the run's settings."""
    values = result.to_dict()
    write_json(workdir / FILE, values | {"seal": _seal(workdir, values)})


def read_result(workdir: Path) -> Result | None:
    """The result of a run; None if it is not finished. Refuses one of another run."""
    path = workdir / FILE
    if not path.exists():
        return None
    values = read_json(path, "the result of a run")
    if not isinstance(values, dict):
        raise expected(str(path), "the result of a run", f"{values!r}"[:60])
    try:
        result = Result.from_dict(values)
    except ValueError as error:
        raise within(str(path), error) from None
    seal = values.pop("seal", None)
    if seal is not None and seal != _seal(workdir, values):
        needed = "the result of this run, as it was written"
        raise expected(str(path), needed, "other values")
    return result


def _seal(workdir: Path, values: dict[str, Any]) -> str:
    return seals.digest([values, identify(workdir)])


def shared_scores(results: Sequence[Result]) -> list[str]:
    """The task's own scores of the best checkpoint that all results have."""
    return [
        name
        for name in results[0].scores
        if name.endswith("_best") and all(name in result.scores for result in results)
    ]


def standard_error(accuracy: float, examples: int) -> float:
    """Half of Wilson's 68 % interval, in percent, of an accuracy in percent.

    It is close to ``sqrt(p (1 - p) / n)`` with p = ``accuracy / 100``, and above 0 even
    if all examples were right, or none (Wilson 1927, "Probable Inference, the Law of
    Succession, and Statistical Inference", with z = 1).
    """
    p, n = accuracy / 100, examples
    return 100 * (p * (1 - p) / n + 1 / (4 * n * n)) ** 0.5 / (1 + 1 / n)
