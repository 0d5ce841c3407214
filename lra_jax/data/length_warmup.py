"""How much of each training sequence the first steps of a run see.

An attention that must find one token among T starts from weights of 1 / T, and the
gradient that would raise the right one is as small. On the beginnings of sequences it
is found sooner, each step costs less, and what was learned there carries over.

Source: sequence length warm-up, Li, Zhang and He, "The Stability-Efficiency Dilemma"
(arXiv:2108.06084), for language models, where the length grows by a few tokens each
step. Here it grows in stages, each of which is one shape to compile.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from lra_jax.errors import expected


@dataclasses.dataclass(frozen=True)
class LengthWarmup:
    """Sequence-length warm-up: the first batches hold the beginnings of sequences.

    Attributes:
      stages: pairs `(length, step)`, both increasing: up to that step, batches hold at
        most that many tokens of a sequence. After the last they hold everything.
    """

    stages: tuple[tuple[int, int], ...] = ()

    def limit(self, step: int) -> int | None:
        """Most tokens of a sequence in the batch of a step; None for all of them."""
        return next((length for length, end in self.stages if step < end), None)

    def widths(self, buckets: Sequence[int]) -> set[int]:
        """The lengths that the batches of a run can have."""
        limits = (buckets[-1], *(length for length, _ in self.stages))
        return {min(bucket, limit) for bucket in buckets for limit in limits}

    def work(self, lengths: np.ndarray, step: int) -> float:
        """Tokens of an average example in all steps before one.

        ``lengths`` are those of the training examples.
        """
        total, begun = 0.0, 0
        for length, end in (*self.stages, (lengths.max(), step)):
            steps = max(min(end, step) - begun, 0)
            total += steps * float(np.minimum(lengths, length).mean())
            begun += steps
        return total

    @classmethod
    def parse(cls, text: str, num_steps: int) -> Self:
        """From `"128:0.3,512:0.4"`: 128 tokens for 30 % of the steps, 512 until 40 %.

        Args:
          text: `LENGTH:FRACTION,...`; empty for no warm-up.
          num_steps: the steps of the run.

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
                "length_warmup",
                "LENGTH:FRACTION,... with lengths and fractions of the steps that "
                "increase, from above 0 to at most 1, as in 128:0.3,512:0.4",
                f"{text!r}",
            )
        return cls(tuple((n, round(part * num_steps)) for n, part in stages))


def _numbers(text: str) -> list[tuple[int, float]]:
    """The pairs of the text; none if there are none or it is not of that form."""
    try:
        parts = [part.split(":") for part in text.split(",")]
        return [(int(length), float(fraction)) for length, fraction in parts]
    except ValueError:
        return []
