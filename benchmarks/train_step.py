"""Times one training step as the trainer compiles it, for several mechanisms.

    python benchmarks/train_step.py --attention=cosformer,linear --length=1216
    python benchmarks/train_step.py --task=lm --preset=tiny --length=512

The mechanisms' steps are interleaved, so a slow spell of the machine affects them all.
The script prints the fastest and the median. It needs no data: lengths and labels are
random, since they do not change the cost.
"""

import time
from types import SimpleNamespace
from typing import Any

from common import flags, milliseconds, origin, write

from lra_jax import runtime


def main() -> None:
    """The command line."""
    runtime.tune_allocator()
    options = flags(
        __doc__,
        task=["listops", "lm"],
        attention=("cosformer", "linear", "flow", "linformer"),
        length=1216,
        preset="compact",
        repeats=12,
    ).parse_args()
    runtime.configure_jax()
    steps = {
        name: Step(options.task, options.preset, name, options.length)
        for name in options.attention
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.repeats):
        for name, step in steps.items():
            seconds[name].append(step.time())
    report = {"length": options.length, "preset": options.preset, "mechanisms": {}}
    for name, times in seconds.items():
        report["mechanisms"][name] = milliseconds(times) | {
            "compile_s": round(steps[name].compile_seconds, 1),
            "temporary_mb": round(steps[name].temporary_bytes / 1e6),
        }
        print(name, report["mechanisms"][name])
    write(options.out, report | origin())


class Step:
    """A compiled training step with its state and one batch."""

    def __init__(self, task_name: str, preset: str, attention: str, length: int):
        import numpy as np
        from flax import nnx

        from lra_jax.configs import get_preset
        from lra_jax.tasks import get_task
        from lra_jax.training import sharding, step
        from lra_jax.training.optimizer import make_optimizer

        config = get_preset(task_name, preset, attention)
        task, rows = get_task(task_name), config.train.batch_size
        language = task_name == "lm"
        # The properties of a dataset that the model needs.
        data: Any = SimpleNamespace(
            vocab_size=257 if language else 16, num_classes=10, image_shape=None
        )
        model = task.make_model(config, data, nnx.Rngs(params=0))
        graphdef, params = nnx.split(model)
        optimizer = make_optimizer(config.train)
        mesh = sharding.make_mesh((rows,))
        self.state = sharding.replicate(mesh, step.init_state(params, optimizer))
        rng = np.random.default_rng(0)
        if language:
            tokens, labels = rng.integers(0, 257, (2, rows, length), np.int32)
            batch = {"tokens": tokens, "labels": labels}
            batch["segment_ids"] = np.ones_like(tokens)
        else:
            batch = {
                "tokens": rng.integers(1, 16, (rows, length)).astype(np.uint8),
                "lengths": rng.integers(length // 2, length, rows).astype(np.int32),
                "labels": rng.integers(0, 10, rows).astype(np.int32),
            }
        self.batch = sharding.shard_batch(mesh, batch)
        function = step.step_function(task.loss, graphdef, optimizer, seed=0)
        train_step: Any = step.compiled_step(function)
        start = time.perf_counter()
        self._step = train_step.lower(self.state, self.batch).compile()
        self.compile_seconds = time.perf_counter() - start
        self.temporary_bytes = self._step.memory_analysis().temp_size_in_bytes

    def time(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.state = self._step(self.state, self.batch)
        self.state.step.block_until_ready()
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
