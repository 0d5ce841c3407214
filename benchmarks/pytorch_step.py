"""Times our training step and the same model in PyTorch, in turns, on the CPU.

    python benchmarks/pytorch_step.py --torch-python=/venv/bin/python
    python benchmarks/pytorch_step.py --task=lm --compile --torch-python=...

The models are those of `pytorch_models.py`: ListOps' preset `compact` on a random batch
of 32 with padding, and the language models' preset `tiny` on one of 16 rows. A step is
forward, backward, gradients clipped, AdamW. PyTorch runs in its own process, under any
Python that has torch (no other package), with as many threads as there are cores.
``--compile`` runs it through ``torch.compile``, which needs a C++ compiler. The
processes take turns, so a slow spell of the machine affects both.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from common import origin, write

NAMES = ("softmax", "linear", "cosformer")
# For each task, the preset, and the tokens of a sample.
TASKS = {"listops": ("compact", 1216), "lm": ("tiny", 512)}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="listops")
    parser.add_argument("--attention", default=",".join(NAMES))
    parser.add_argument("--length", type=int, help="tokens")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.attention.split(",")
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"--attention: expected some of {','.join(NAMES)}, got {unknown}")
    options.length = options.length or TASKS[options.task][1]
    if options.worker:
        work(options.task, names, options.length, options.compile)
    else:
        compare(options, names)


def compare(options: Any, names: list[str]) -> None:
    """Times both and prints the figures; writes them with ``--out``."""
    from lra_jax import runtime

    runtime.tune_allocator()
    runtime.configure_jax()
    from train_step import Step

    with Worker(options) as worker:
        preset = TASKS[options.task][0]
        steps = {
            name: Step(options.task, preset, name, options.length) for name in names
        }
        times: dict[str, dict[str, list[float]]] = {
            name: {"ours": [], "pytorch": []} for name in names
        }
        for turn in range(options.repeats + 1):
            for name in names:
                both = {"ours": steps[name].time(), "pytorch": worker.time(name)}
                for side, seconds in both.items():
                    if turn:  # The first one warms up.
                        times[name][side].append(seconds)
        torch_version = worker.version
    rows = len(steps[names[0]].batch["tokens"])
    report: dict[str, Any] = {"task": options.task, "preset": preset}
    report |= {"length": options.length, "batch_size": rows}
    report["torch_compile"] = options.compile
    report["cores"] = len(os.sched_getaffinity(0))
    report["mechanisms"] = {name: _row(times[name]) for name in names}
    for name, row in report["mechanisms"].items():
        print(name, row)
    if options.out:
        # Without paths of this machine.
        sys.argv = [x for x in sys.argv if not x.startswith("--torch-python")]
        report |= origin()
        report["versions"]["torch"] = torch_version
        write(options.out, report)


def _row(times: dict[str, list[float]]) -> dict[str, float]:
    medians = {side: statistics.median(runs) for side, runs in times.items()}
    ratios = [b / a for a, b in zip(times["ours"], times["pytorch"], strict=True)]
    return {
        "ours_median_ms": round(1e3 * medians["ours"], 1),
        "ours_fastest_ms": round(1e3 * min(times["ours"]), 1),
        "pytorch_median_ms": round(1e3 * medians["pytorch"], 1),
        "pytorch_fastest_ms": round(1e3 * min(times["pytorch"]), 1),
        "pytorch_by_ours": round(statistics.median(ratios), 2),
    }


class Worker:
    """The process with torch: takes a mechanism's name, returns seconds."""

    def __init__(self, options: Any):
        flags = [f"--task={options.task}", f"--length={options.length}"]
        flags += [f"--attention={options.attention}"]
        flags += ["--compile"] if options.compile else []
        self._process = subprocess.Popen(
            [options.torch_python, __file__, "--worker", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version: str = self._read()

    def time(self, name: str) -> float:
        """Seconds of one step."""
        print(name, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        stdout = self._process.stdout
        line = "" if stdout is None else stdout.readline()
        if not line:
            raise SystemExit(f"PyTorch's process ended with {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def work(task: str, names: list[str], length: int, compiled: bool) -> None:
    """The worker's side, which needs torch."""
    import pytorch_models
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(json.dumps(torch.__version__), flush=True)
    make = {"listops": pytorch_models.listops_step, "lm": pytorch_models.lm_step}[task]
    steps = {name: make(name, length, compiled) for name in names}
    for line in sys.stdin:
        begun = time.perf_counter()
        steps[line.strip()]()
        print(json.dumps(time.perf_counter() - begun), flush=True)


if __name__ == "__main__":
    main()
