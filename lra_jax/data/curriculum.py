"""Which training examples the first steps of a run see.

Short examples, shown whole, pose the same task as long ones, but the answer is closer
to each token that determines it. Unlike the beginning of a long example
(`lra_jax.data.length_warmup`), a short one has its own label. Where all examples have
one length, the data may come in groups, from easy to hard.

Source: curriculum learning, Bengio et al. 2009 (ICML); by the length of the input,
Zaremba and Sutskever 2014 ("Learning to Execute", arXiv:1410.4615).
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from lra_jax.data.batches import Batch, BatchPlan
from lra_jax.data.stages import Stages
from lra_jax.errors import expected


class Stage(NamedTuple):
    """Attributes: `ids`, the examples that batches hold; `end`, up to which step."""

    ids: np.ndarray
    end: int


@dataclasses.dataclass(frozen=True)
class Curriculum(Stages):
    """In a stage, batches hold examples of at most its length; then all examples."""

    name: ClassVar[str] = "curriculum"

    def choose(
        self, lengths: np.ndarray, batch_size: int, num_steps: int
    ) -> list[Stage]:
        """The stages of a run, for examples of these lengths `[n]`.

        Raises:
          ValueError: a stage has fewer examples than a batch.
        """
        found = []
        for limit, end in self.stages:
            ids = np.flatnonzero(lengths <= limit)
            if len(ids) < batch_size:
                wanted = f"lengths that cover at least a batch, {batch_size} examples"
                got = f"{limit}, which covers {len(ids)}"
                raise expected(f"--train.{self.name}", wanted, got)
            found.append(Stage(ids, end))
        if not found or found[-1].end < num_steps:
            found.append(Stage(np.arange(len(lengths)), num_steps))
        return found


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
      lengths, buckets, batch_size, seed: as of a `BatchPlan`.

    Raises:
      ValueError: an argument is out of range.
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
        raise IndexError(str(expected("step", f"0..{len(self) - 1}", step)))
