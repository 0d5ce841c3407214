"""Everything about a run except running it: config, data, model, step cost, time."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from lra_jax.configs.base import flatten
from lra_jax.training import sharding
from lra_jax.training.console import format_seconds
from lra_jax.training.loop import shapes, size_in_words
from lra_jax.training.trainer import Trainer

_STEPS = 12
_SECONDS = 60  # No more steps are timed after this.


def estimate(
    trainer: Trainer,
    work: Callable[[int], float],
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, str]:
    """Times the first steps, and estimates what the run will cost, in words.

    The first step of each batch shape compiles; it is done twice. Pretraining steps
    count as steps of the task. The first steps of a run may have shorter sequences than
    the others, so time is scaled by the number of tokens. The trainer cannot be used
    afterwards, because its state and data have advanced.

    Args:
      trainer: freshly built.
      work: tokens, in average examples, of all steps before a given one.
      say: called with a line before each compilation and after each step.
    """
    train = trainer.config.train
    cold, warm, seen = 0.0, [], set()
    begun = time.perf_counter()
    longest: Any = None
    steps = min(_STEPS, train.steps)
    for host_batch in itertools.islice(trainer.data, steps):
        for name in ("targets", "notes"):  # Only pretraining reads them.
            host_batch.pop(name, None)
        batch = sharding.shard_batch(trainer.mesh, host_batch)
        longest = _longer(longest, batch)
        if shapes(batch) not in seen:
            say(f"compiling for batches of {size_in_words(batch)} ...")
            cold += _timed(trainer, batch)
            seen.add(shapes(batch))
        warm.append(_timed(trainer, batch))
        say(f"timed step {len(warm)} of {steps}: {warm[-1]:.3g} s")
        if time.perf_counter() - begun > _SECONDS:
            break
    token = sum(warm) / work(len(warm))
    flops = _flops(trainer, longest)
    # Only the forward pass: a third of a step's arithmetic.
    batches = trainer.dataset.num_examples("valid") / train.batch_size
    evaluation = token / 3 * batches * float(trainer.dataset.lengths("valid").mean())
    total = cold + token * work(train.steps)
    total += math.ceil(train.steps / train.eval_every) * evaluation
    plural = "shape" if len(seen) == 1 else "shapes"
    first, mean = sum(warm) / len(warm), token * work(train.steps) / train.steps
    return {
        "a step": (
            f"{first:.3g} s on average over the first {len(warm)}, about "
            f"{mean:.3g} s on average over all"
        ),
        "arithmetic": flops,
        "compiling": f"{cold:.1f} s ({len(seen)} batch {plural})",
        "total": f"about {format_seconds(total)}, evaluations included",
    }


def settings(config: Any) -> dict[str, str]:
    """Every flag and its value."""
    values = flatten(config.to_dict())
    return {f"--{n}": "" if v is None else str(v) for n, v in values.items()}


def _timed(trainer: Trainer, batch: Any) -> float:
    begun = time.perf_counter()
    trainer.advance(trainer.config.train.steps - 1, batch)
    jax.block_until_ready(trainer.state.step)
    return time.perf_counter() - begun


def _longer(one: Any, other: Any) -> Any:
    if one is None or jax.tree.leaves(other)[0].size > jax.tree.leaves(one)[0].size:
        return other
    return one


def _flops(trainer: Trainer, batch: Any) -> str:
    """The arithmetic of a step as counted by XLA, which leaves out custom kernels."""
    function = trainer.step_function(trainer.config.train.steps - 1)
    lowered = jax.jit(function).lower(trainer.state, batch)
    cost = lowered.cost_analysis() or {}
    flops = cost.get("flops", 0)
    return f"{flops / 1e9:.3g} GFLOP a step of the longest batch seen, by XLA's count"
