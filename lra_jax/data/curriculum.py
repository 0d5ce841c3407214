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
from typing import ClassVar

import numpy as np

from lra_jax.data.batches import Batch, BatchPlan, plan_batches
from lra_jax.data.checks import check_integer
from lra_jax.data.stages import Stages
from lra_jax.errors import expected


@dataclasses.dataclass(frozen=True)
class Curriculum(Stages):
    """In a stage, batches hold examples of at most its length; then all examples."""

    name: ClassVar[str] = "curriculum"

    def plan(
        self,
        lengths: np.ndarray,
        *,
        buckets: Sequence[int],
        batch_size: int,
        seed: int,
        num_steps: int,
    ) -> "StagedPlan":
        """Plans the batches of a run; arguments as in `plan_batches`.

        Each stage starts its own pass over its examples.

        Raises:
          ValueError: a stage has fewer examples than a batch, or an argument is out of
            range.
        """
        check_integer("num_steps", num_steps, 1)
        limits = [length for length, _ in self.stages]
        ends = [end for _, end in self.stages]
        if not ends or ends[-1] < num_steps:
            limits.append(int(lengths.max()))
            ends.append(num_steps)
        chosen = [np.flatnonzero(lengths <= limit) for limit in limits]
        for limit, ids in zip(limits[: len(self.stages)], chosen, strict=False):
            if len(ids) < batch_size:
                wanted = f"lengths that cover at least a batch, {batch_size} examples"
                got = f"{limit}, which covers {len(ids)}"
                raise expected(f"--train.{self.name}", wanted, got)
        return _staged(
            chosen, ends, lengths, buckets=buckets, batch_size=batch_size, seed=seed
        )


def plan_groups(
    groups: Sequence[float],
    lengths: np.ndarray,
    *,
    buckets: Sequence[int],
    batch_size: int,
    seed: int,
    num_steps: int,
) -> "StagedPlan":
    """Plans the batches of a run that shows one group of examples after another.

    The groups are equal parts of the examples, in order.

    Args:
      groups: the share of the steps after which the next group begins, increasing.
      lengths, buckets, batch_size, seed, num_steps: as in `plan_batches`.

    Raises:
      ValueError: an argument is out of range.
    """
    check_integer("num_steps", num_steps, 1)
    ends = [*(round(share * num_steps) for share in groups), num_steps]
    chosen = np.split(np.arange(len(lengths)), len(ends))
    return _staged(
        chosen, ends, lengths, buckets=buckets, batch_size=batch_size, seed=seed
    )


def _staged(
    chosen: Sequence[np.ndarray],
    ends: Sequence[int],
    lengths: np.ndarray,
    *,
    buckets: Sequence[int],
    batch_size: int,
    seed: int,
) -> "StagedPlan":
    """Each stage starts its own pass over the ids chosen for it, and ends at a step."""
    parts = []
    for number, (ids, start, end) in enumerate(
        zip(chosen, [0, *ends[:-1]], ends, strict=True)
    ):
        if end > start:
            # A run without stages keeps the order of examples of earlier versions.
            last = number == len(ends) - 1
            plan = plan_batches(
                lengths[ids],
                buckets=buckets,
                batch_size=batch_size,
                seed=seed if last else seed + 1 + number,
                num_steps=end - start,
            )
            parts.append(_Part(start, end, ids.astype(np.int32), plan))
    return StagedPlan(tuple(parts))


@dataclasses.dataclass(frozen=True)
class _Part:
    start: int
    end: int
    ids: np.ndarray
    plan: BatchPlan


@dataclasses.dataclass(frozen=True)
class StagedPlan:
    """The batches of a run in stages; element i is the batch of step i."""

    parts: tuple[_Part, ...]

    def __len__(self) -> int:
        return self.parts[-1].end

    def __getitem__(self, step: int) -> Batch:
        for part in self.parts:
            if part.start <= step < part.end:
                length, chosen = part.plan[step - part.start]
                return Batch(length, part.ids[chosen])
        raise IndexError(str(expected("step", f"0..{len(self) - 1}", step)))
