"""Times how fast a decision transformer acts: by a stream, and by reading its context.

    python benchmarks/acting.py --out=results/acting.json

An untrained model of the preset ``official`` (3 blocks, 256 wide) acts in 10 episodes
of 1,000 steps at once, in an environment that does nothing. A stream reads the three
tokens of each step; otherwise the last ``--context`` steps are read anew. Each episode
gives the median time of a step, over all of it and over its first and last 100 steps
without the first two, which compile; the fastest of ``--rounds`` episodes counts. The
modes of a mechanism take turns, so a slow spell of the machine affects both.
"""

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from common import flags, origin, rotate, write

from lra_jax import runtime

STATE, ACTION, HORIZON, EPISODES = 11, 3, 1_000, 10  # Of Hopper.


def main() -> None:
    """The command line."""
    runtime.tune_allocator()
    mechanisms = ("softmax", "linear", "cosformer", "flow")
    parser = flags(__doc__, attention=mechanisms, context=20, rounds=3, steps=HORIZON)
    options = parser.parse_args()
    runtime.configure_jax(cpu_devices=1)
    report: dict[str, Any] = {"context": options.context, "steps": options.steps}
    report["mechanisms"] = {}
    for name in options.attention:
        row = measure(name, options.context, options.rounds, options.steps)
        report["mechanisms"][name] = row
        print(name, row, flush=True)
    write(options.out, report | origin())


def measure(name: str, context: int, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds of a step of 10 episodes, and how much faster a stream is."""
    modes = [(mode, make_policy(name, mode, context)) for mode in ("stream", "context")]
    times: dict[str, list[list[float]]] = {mode: [] for mode, _ in modes}
    for number in range(rounds):
        for mode, make in rotate(modes, number):
            times[mode].append(time_steps(make(), steps))
    row: dict[str, Any] = {}
    for mode, episodes in times.items():
        spans = {"ms": slice(2, None), "first_ms": slice(2, 100)}
        spans["last_ms"] = slice(-100, None)
        for span, part in spans.items():
            fastest = min(statistics.median(seconds[part]) for seconds in episodes)
            row[f"{mode}_{span}"] = round(1e3 * fastest, 3)
    row["speed_up"] = round(row["context_ms"] / row["stream_ms"], 2)
    return row


def make_policy(name: str, mode: str, context: int) -> Any:
    """Returns a function that begins an episode and returns how the model acts."""
    from flax import nnx

    from lra_jax.configs import get_preset
    from lra_jax.tasks import acting

    sizes = {"state_dim": STATE, "action_dim": ACTION, "horizon": HORIZON}
    dataset: Any = SimpleNamespace(
        environment=SimpleNamespace(**sizes),
        context=context,
        acting=mode,
        target=3_600.0,
        standardise=lambda states: states,
        show_returns=lambda returns: returns / 1_000,
    )
    config = get_preset("control", "official", name)
    model = acting.make_model(config, dataset, nnx.Rngs(0))
    return lambda: acting.make_act(dataset, model, EPISODES)


def time_steps(act: Any, steps: int) -> list[float]:
    """Seconds of each step of an episode."""
    states = np.random.default_rng(0).normal(size=(steps, EPISODES, STATE))
    rewards, seconds = np.ones(EPISODES), []
    for step, state in enumerate(states.astype(np.float32)):
        start = time.perf_counter()
        act(step, state, rewards)
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
