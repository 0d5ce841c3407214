"""Compares steps per second with packed rows and with buckets, in turns in one run.

    python benchmarks/packing.py --out=results/packing.json
    python benchmarks/packing.py --task=text --data.path=aclImdb_v1.tar.gz --out=...

Two trainers of the same preset, data and seed, one with --data.packing=true, do --steps
training steps each, --turns times in turns. Both see the same examples in the same
batches, and have the same losses. A step includes the reading of its batch; one whose
shape is new to its trainer compiles, and is not counted. A ratio is the packed
trainer's steps per second divided by the other's, in one turn.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
from common import origin, write

from lra_jax import tasks
from lra_jax.configs import get_preset
from lra_jax.training import Trainer, sharding


class Run:
    """A trainer, the shapes that it has compiled, and its counts."""

    def __init__(self, options: argparse.Namespace, packing: bool, workdir: Path):
        config = get_preset(options.task, options.preset, options.attention)
        data: dict[str, Any] = {"packing": packing, "dir": options.data_dir}
        if options.data_path is not None:
            data["path"] = options.data_path
        if options.task == "listops" and options.num_train:
            sizes = ("num_train", "num_valid", "num_test")
            data |= dict.fromkeys(sizes, options.num_train)
        # More than all turns and the steps that compile, so that the data do not end.
        train: dict[str, Any] = {"steps": 1_000_000, "batch_size": options.batch_size}
        train |= {"length_warmup": "", "curriculum": ""}  # Whole examples.
        config = config.replace(train=train, data=data)
        task = tasks.get_task(options.task)
        task.check(config)
        self.trainer = Trainer(config, task, task.prepare(config.data), workdir)
        self.seen: set[Any] = set()
        self.real = self.computed = 0

    def turn(self, steps: int) -> float:
        """Steps per second over this many steps that do not compile."""
        seconds, done = 0.0, 0
        while done < steps:
            start = time.perf_counter()
            batch = next(self.trainer.data)
            shape = tuple(sorted((name, x.shape) for name, x in batch.items()))
            placed = sharding.shard_batch(self.trainer.mesh, batch)
            self.trainer.state = self.trainer.train_step(self.trainer.state, placed)
            jax.block_until_ready(self.trainer.state.step)
            if shape in self.seen:
                seconds += time.perf_counter() - start
                done += 1
                self.computed += batch["tokens"].size
                packed = batch.get("segment_ids")
                self.real += int(
                    batch["lengths"].sum() if packed is None else (packed > 0).sum()
                )
            self.seen.add(shape)
        return steps / seconds

    def summary(self, speeds: list[float]) -> dict[str, Any]:
        """The figures of all turns."""
        return {
            "steps_per_second": round(statistics.median(speeds), 3),
            "turns": [round(speed, 3) for speed in speeds],
            "real_tokens": round(self.real / self.computed, 4),
            "shapes": len(self.seen),
        }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--task", default="listops", choices=("listops", "text"))
    parser.add_argument("--preset", default="compact")
    parser.add_argument("--attention", default="cosformer")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--num_train", type=int, default=4000, help="a ListOps split")
    parser.add_argument("--data.dir", dest="data_dir")
    parser.add_argument("--data.path", dest="data_path")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "buckets": Run(options, False, Path(folder)),
            "packed": Run(options, True, Path(folder)),
        }
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(options.turns):
            for name, run in runs.items():
                speeds[name].append(run.turn(options.steps))
            print(turn, {name: round(found[-1], 2) for name, found in speeds.items()})
    pairs = zip(speeds["packed"], speeds["buckets"], strict=True)
    ratios = [packed / padded for packed, padded in pairs]
    report = {
        **origin(),
        "task": options.task,
        "attention": options.attention,
        "preset": options.preset,
        "batch_size": options.batch_size,
        "packed_over_buckets": round(statistics.median(ratios), 3),
        **{name: run.summary(speeds[name]) for name, run in runs.items()},
    }
    write(options.out, report)


if __name__ == "__main__":
    main()
