"""Everything about a run except running it: config, data, model, step cost, time."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

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
    train, border = trainer.config.train, trainer.config.pretrain.steps
    first = itertools.islice(trainer.data, min(_STEPS, train.steps))
    batches = [sharding.shard_batch(trainer.mesh, batch) for batch in first]
    parts = {"pretraining": (0, border), "training": (border, train.steps)}
    parts = {x: span for x, span in parts.items() if span[0] < span[1]}
    work, words, compiling = trainer.tokens_before, [], []
    steps, token, timed = 0.0, 0.0, 0
    for part, (begin, end) in parts.items():
        cold, warm = _time_steps(trainer, begin, batches, _SECONDS / len(parts), say)
        token = sum(warm) / work(len(warm))  # Seconds per token.
        steps += token * (work(end) - work(begin))
        of = f" of {part}" if len(parts) > 1 else ""
        words.append(f"{sum(warm) / len(warm):.3g} s{of}")
        compiling += cold
        timed = max(timed, len(warm))
    # Only the forward pass: a third of a step's arithmetic.
    count = trainer.dataset.num_examples("valid") / train.batch_size
    length = float(trainer.dataset.lengths("valid").mean())
    evaluation = math.ceil(train.steps / train.eval_every) * token / 3 * count * length
    total = sum(compiling) + steps + evaluation
    # No other array is larger than the tokens, padding included.
    longest = max(batches, key=lambda x: max(a.size for a in jax.tree.leaves(x)))
    peak = peak_memory()
    size = peak["peak_memory_bytes"] / 2**20
    programs = f"{len(compiling)} program{'s' * (len(compiling) > 1)}"
    return {
        "a step": (
            f"{', '.join(words)} on average over the first {timed}, "
            f"about {steps / train.steps:.3g} s on average over all"
        ),
        "arithmetic": _flops(trainer, longest),
        "compiling": f"{sum(compiling):.1f} s ({programs})",
        "total": f"about {format_seconds(total)}, evaluations included",
        "memory": f"{size:,.0f} MiB ({peak['peak_memory_kind']})",
    }


def _time_steps(
    trainer: Trainer,
    step: int,
    batches: list[Any],
    seconds: float,
    say: Callable[[str], None],
) -> tuple[list[float], list[float]]:
    """Seconds of the steps that compile, and of the others, in the part of a run that a
    step belongs to."""
    cold, warm = {}, []
    start = time.perf_counter()
    for batch in batches:
        if shapes(batch) not in cold:
            say(f"compiling for batches of {size_in_words(batch)} ...")
            cold[shapes(batch)] = _time_step(trainer, step, batch)
        warm.append(_time_step(trainer, step, batch))
        say(f"timed step {len(warm)} of {len(batches)}: {warm[-1]:.3g} s")
        if time.perf_counter() - start > seconds:
            break
    return [*cold.values()], warm


def _time_step(trainer: Trainer, step: int, batch: Any) -> float:
    start = time.perf_counter()
    trainer.advance(step, batch)
    jax.block_until_ready(trainer.state.step)
    return time.perf_counter() - start


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
