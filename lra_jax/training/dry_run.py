"""Everything about a run except running it: config, data, model, step cost, time."""

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from lra_jax.configs import Config
from lra_jax.configs.base import flatten
from lra_jax.training import sharding
from lra_jax.training.console import format_seconds
from lra_jax.training.loop import shapes, size_in_words
from lra_jax.training.machine import peak_memory
from lra_jax.training.trainer import Trainer

_STEPS = 12
_SECONDS = 60  # No more steps are timed after this, in all parts together.
_OF = {"pretrain": " of pretraining", "train": " of training"}


class _Cost(NamedTuple):
    """Seconds of the steps of one part of a run."""

    cold: float  # the first steps of each batch shape, which compile
    warm: list[float]
    token: float  # a warm step's time for the tokens of an average example
    programs: int


def estimate(
    trainer: Trainer, say: Callable[[str], None] = lambda line: None
) -> dict[str, str]:
    """Times some steps of each part of a run, and estimates in words what all cost.

    The parts are pretraining and training. The first step of each batch shape compiles;
    it is done twice. The first steps of a run may have shorter sequences than the
    others, so time is scaled by the number of tokens. The trainer cannot be used
    afterwards, because its state and data have advanced.

    Args:
      trainer: freshly built.
      say: called with a line before each compilation and after each step.
    """
    train, work = trainer.config.train, trainer.tokens_before
    first = itertools.islice(trainer.data, min(_STEPS, train.steps))
    batches = [sharding.shard_batch(trainer.mesh, batch) for batch in first]
    # No other array is larger than the tokens, padding included.
    longest = max(batches, key=lambda x: max(a.size for a in jax.tree.leaves(x)))
    border = min(train.steps, trainer.config.pretrain.steps)
    spans = {"pretrain": (0, border), "train": (border, train.steps)}
    spans = {part: (begin, end) for part, (begin, end) in spans.items() if begin < end}
    costs, total = {}, 0.0
    for part, (begin, end) in spans.items():
        costs[part] = _cost(trainer, begin, batches, _SECONDS / len(spans), say)
        total += costs[part].token * (work(end) - work(begin))
    mean = total / train.steps
    cold = sum(cost.cold for cost in costs.values())
    # Only the forward pass: a third of a step's arithmetic.
    count = trainer.dataset.num_examples("valid") / train.batch_size
    length = float(trainer.dataset.lengths("valid").mean())
    evaluation = [*costs.values()][-1].token / 3 * count * length
    total += cold + math.ceil(train.steps / train.eval_every) * evaluation
    programs = sum(cost.programs for cost in costs.values())
    plural = "program" if programs == 1 else "programs"
    peak = peak_memory()
    size = peak["peak_memory_bytes"] / 2**20
    return {
        "a step": f"{_in_words(costs)}, about {mean:.3g} s on average over all",
        "arithmetic": _flops(trainer, longest),
        "compiling": f"{cold:.1f} s ({programs} {plural})",
        "total": f"about {format_seconds(total)}, evaluations included",
        "memory": f"{size:,.0f} MiB ({peak['peak_memory_kind']})",
    }


def _cost(
    trainer: Trainer,
    step: int,
    batches: Sequence[Any],
    seconds: float,
    say: Callable[[str], None],
) -> _Cost:
    """Times the part of a run that a step belongs to, on the first batches."""
    cold, warm, seen = 0.0, [], set()
    start = time.perf_counter()
    for batch in batches:
        if shapes(batch) not in seen:
            say(f"compiling for batches of {size_in_words(batch)} ...")
            cold += _timed(trainer, step, batch)
            seen.add(shapes(batch))
        warm.append(_timed(trainer, step, batch))
        say(f"timed step {len(warm)} of {len(batches)}: {warm[-1]:.3g} s")
        if time.perf_counter() - start > seconds:
            break
    token = sum(warm) / trainer.tokens_before(len(warm))
    return _Cost(cold, warm, token, len(seen))


def _timed(trainer: Trainer, step: int, batch: Any) -> float:
    start = time.perf_counter()
    trainer.advance(step, batch)
    jax.block_until_ready(trainer.state.step)
    return time.perf_counter() - start


def _in_words(costs: dict[str, _Cost]) -> str:
    """The mean time of a step of each part."""
    means = {part: sum(cost.warm) / len(cost.warm) for part, cost in costs.items()}
    words = [f"{x:.3g} s" + _OF[part] * (len(means) > 1) for part, x in means.items()]
    count = max(len(cost.warm) for cost in costs.values())
    return f"{', '.join(words)} on average over the first {count}"


def _flops(trainer: Trainer, batch: Any) -> str:
    """The arithmetic of a step as counted by XLA, which leaves out custom kernels."""
    step: Any = trainer.train_step
    lower = sharding.under_mesh(trainer.mesh, step.__wrapped__.lower)
    cost = lower(trainer.state, batch).cost_analysis() or {}
    flops = cost.get("flops", 0)
    return f"{flops / 1e9:.3g} GFLOP a step of the longest batch seen, by XLA's count"


def settings(config: Config) -> dict[str, str]:
    """Every flag and its value."""
    values = flatten(config.to_dict())
    return {f"--{n}": "" if v is None else str(v) for n, v in values.items()}
