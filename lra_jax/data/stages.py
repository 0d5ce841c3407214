"""Which part of the training data the first steps of a run see.

Sequence-length warm-up shows the beginnings of sequences. An attention that must find
one token among T starts from weights of 1 / T, and the gradient that would increase the
right one is just as small. On beginnings it is found sooner, each step is cheaper, and
what is learned carries over. Source: Li, Zhang and He, "The Stability-Efficiency
Dilemma" (arXiv:2108.06084), for language models, where the length grows by a few tokens
each step. Here it grows in stages, each of which adds one shape to compile.

A curriculum shows short examples whole, which have their own label. Where all examples
have one length, the data may come in groups, from easy to hard. Source: Bengio et al.
2009 (ICML); by the length of the input, Zaremba and Sutskever 2014 ("Learning to
Execute", arXiv:1410.4615).
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

import numpy as np

from lra_jax.data.batches import Batch, BatchPlan
from lra_jax.errors import expected


class Stage(NamedTuple):
    """Attributes: `ids`, the examples that batches hold; `end`, up to which step."""

    ids: np.ndarray
    end: int


@dataclasses.dataclass(frozen=True)
class Stages:
    """Maximum lengths for the first steps of a run.

    Attributes:
      stages: pairs `(length, step)`, both increasing: the length applies up to that
        step; after the last there is no limit.
    """

    stages: tuple[tuple[int, int], ...] = ()

    name: ClassVar[str]
    """The setting to which they belong, for messages."""

    def limit(self, step: int) -> int | None:
        """The maximum length at a step; None for no limit."""
        return next((length for length, end in self.stages if step < end), None)

    @classmethod
    def parse(cls, text: str, num_steps: int) -> Self:
        """From `"128:0.3,512:0.4"`: 128 for 30 % of the steps, 512 up to 40 %.

        Raises:
          ValueError: it is not of that form, lengths or fractions do not increase, or a
            fraction is not within 0..1.
        """
        stages = _numbers(text)
        below = [(0, 0.0), *stages]
        pairs = zip(below, stages, strict=False)
        rising = all(a < c and b < d <= 1 for (a, b), (c, d) in pairs)
        if (text and not stages) or not rising:
            raise expected(
                cls.name,
                "LENGTH:FRACTION,... with increasing lengths and increasing fractions "
                "of the steps, above 0 and at most 1, as in 128:0.3,512:0.4",
                f"{text!r}",
            )
        return cls(tuple((n, round(part * num_steps)) for n, part in stages))


@dataclasses.dataclass(frozen=True)
class LengthWarmup(Stages):
    """In a stage, batches hold at most that many tokens of a sequence."""

    name: ClassVar[str] = "length_warmup"

    def widths(self, buckets: Sequence[int]) -> set[int]:
        """The lengths that the batches of a run can have."""
        limits = (buckets[-1], *(length for length, _ in self.stages))
        return {min(bucket, limit) for bucket in buckets for limit in limits}


@dataclasses.dataclass(frozen=True)
class Curriculum(Stages):
    """In a stage, batches hold the examples of at most its length."""

    name: ClassVar[str] = "curriculum"

    def choose(
        self, lengths: np.ndarray, batch_size: int, num_steps: int
    ) -> list[Stage]:
        """The stages of a run, for examples of these lengths `[n]`.

        Raises:
          ValueError: a stage has fewer examples than a batch.
        """
        stages = []
        for limit, end in self.stages:
            ids = np.flatnonzero(lengths <= limit)
            if len(ids) < batch_size:
                needed = f"lengths that cover at least a batch, {batch_size} examples"
                got = f"{limit}, which covers {len(ids)}"
                raise expected(f"--train.{self.name}", needed, got)
            stages.append(Stage(ids, end))
        if not stages or stages[-1].end < num_steps:
            stages.append(Stage(np.arange(len(lengths)), num_steps))
        return stages


def choose_groups(groups: Sequence[float], count: int, num_steps: int) -> list[Stage]:
    """The stages of a run that shows one group of examples after another.

    The groups are equal parts of the examples, in order.

    Args:
      groups: the share of the steps after which the next group begins, increasing.
      count: number of examples.
      num_steps: batches in the run.
    """
    ends = [*(round(share * num_steps) for share in groups), num_steps]
    return list(map(Stage, np.split(np.arange(count), len(ends)), ends))


class StagedPlan:
    """The batches of a run in stages; element i is the batch of step i.

    Each stage starts its own pass over its examples.

    Args:
      stages: see `Curriculum.choose`.
      lengths, buckets, batch_size, seed: as in `BatchPlan`.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        lengths: np.ndarray,
        *,
        buckets: Sequence[int],
        batch_size: int,
        seed: int,
    ):
        self._parts: list[tuple[range, np.ndarray, BatchPlan]] = []
        start = 0
        for number, (ids, end) in enumerate(stages):
            if end > start:
                # The last stage, of all examples, has the order of a run without them.
                last = number == len(stages) - 1
                plan = BatchPlan(
                    lengths[ids],
                    buckets=buckets,
                    batch_size=batch_size,
                    seed=seed if last else seed + 1 + number,
                    num_steps=end - start,
                )
                self._parts.append((range(start, end), ids.astype(np.int32), plan))
            start = end
        self._num_steps = start

    def __len__(self) -> int:
        return self._num_steps

    def __getitem__(self, step: int) -> Batch:
        for steps, ids, plan in self._parts:
            if step in steps:
                length, chosen = plan[step - steps.start]
                return Batch(length, ids[chosen])
        raise IndexError(step)


def tokens_before(
    lengths: np.ndarray, step: int, *, cut: Stages, whole: Stages
) -> float:
    """Tokens, in average examples, of all steps before a given one.

    Args:
      lengths: lengths of the training examples.
      step: the step.
      cut: stages in which sequences are cut.
      whole: stages in which longer sequences are left out.
    """
    total, start = 0.0, 0
    ends = {end for _, end in (*cut.stages, *whole.stages)}
    for end in sorted({min(end, step) for end in ends} | {step}):
        kept, limit = whole.limit(start), cut.limit(start)
        shown = lengths if kept is None else lengths[lengths <= kept]
        shown = shown if limit is None else np.minimum(shown, limit)
        total += (end - start) * float(shown.mean())
        start = end
    return total


def _numbers(text: str) -> list[tuple[int, float]]:
    """The pairs in the text; none if it is empty or not of that form."""
    try:
        parts = [part.split(":") for part in text.split(",")]
        return [(int(length), float(fraction)) for length, fraction in parts]
    except ValueError:
        return []
