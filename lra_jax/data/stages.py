"""Stages of a run, each with a maximum sequence length."""

import dataclasses
from typing import ClassVar, Self

import numpy as np

from lra_jax.errors import expected


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
    total, begun = 0.0, 0
    ends = {end for _, end in (*cut.stages, *whole.stages)}
    for end in sorted({min(end, step) for end in ends} | {step}):
        kept, limit = whole.limit(begun), cut.limit(begun)
        shown = lengths if kept is None else lengths[lengths <= kept]
        shown = shown if limit is None else np.minimum(shown, limit)
        total += (end - begun) * float(shown.mean())
        begun = end
    return total


def _numbers(text: str) -> list[tuple[int, float]]:
    """The pairs in the text; none if it is empty or not of that form."""
    try:
        parts = [part.split(":") for part in text.split(",")]
        return [(int(length), float(fraction)) for length, fraction in parts]
    except ValueError:
        return []
