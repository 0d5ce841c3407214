"""How much of each training sequence the first steps of a run see.

An attention that must find one token among T starts from weights of 1 / T, and the
gradient that would increase the right one is just as small. On the beginnings of
sequences it is found sooner, each step is cheaper, and what is learned carries over.

Source: sequence length warm-up, Li, Zhang and He, "The Stability-Efficiency Dilemma"
(arXiv:2108.06084), for language models, where the length grows by a few tokens each
step. Here it grows in stages, each of which adds one shape to compile.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lra_jax.data.stages import Stages


@dataclasses.dataclass(frozen=True)
class LengthWarmup(Stages):
    """Sequence-length warm-up: the first batches hold the beginnings of sequences.

    In a stage, batches hold at most that many tokens of a sequence; after the last
    stage they hold whole sequences.
    """

    name: ClassVar[str] = "length_warmup"

    def widths(self, buckets: Sequence[int]) -> set[int]:
        """The lengths that the batches of a run can have."""
        limits = (buckets[-1], *(length for length, _ in self.stages))
        return {min(bucket, limit) for bucket in buckets for limit in limits}
