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

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from common import flags, milliseconds, origin, write

NAMES = ("softmax", "linear", "cosformer")
# For each task, the preset, and the tokens of a sample.
TASKS = {"listops": ("compact", 1216), "lm": ("tiny", 512)}


def main() -> None:
    """The command line."""
    parser = flags(
        __doc__,
        task=list(TASKS),
        attention=NAMES,
        length=0,
        repeats=8,
        compile=False,
        torch_python=sys.executable,
        worker=False,
    )
    options = parser.parse_args()
    unknown = sorted(set(options.attention) - set(NAMES))
    if unknown:
        parser.error(f"--attention: expected some of {','.join(NAMES)}, got {unknown}")
    options.length = options.length or TASKS[options.task][1]
    (work if options.worker else compare)(options)


def compare(options: Any) -> None:
    """Times both and prints the figures; writes them with ``--out``."""
    from lra_jax import runtime

    runtime.tune_allocator()
    runtime.configure_jax()
    from train_step import Step

    names, preset = options.attention, TASKS[options.task][0]
    with Worker(options) as worker:
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
    report = {
        "task": options.task,
        "preset": preset,
        "length": options.length,
        "batch_size": rows,
        "torch_compile": options.compile,
        "cores": len(os.sched_getaffinity(0)),
        "mechanisms": {name: _row(times[name]) for name in names},
    }
    for name, row in report["mechanisms"].items():
        print(name, row)
    # Without paths of this machine.
    sys.argv = [x for x in sys.argv if not x.startswith("--torch-python")]
    report |= origin()
    report["versions"]["torch"] = torch_version
    write(options.out, report)


def _row(times: dict[str, list[float]]) -> dict[str, float]:
    row = {
        f"{side}_{name}": figure
        for side, seconds in times.items()
        for name, figure in milliseconds(seconds).items()
    }
    ratios = [b / a for a, b in zip(times["ours"], times["pytorch"], strict=True)]
    return row | {"pytorch_by_ours": round(statistics.median(ratios), 2)}


class Worker:
    """The process with torch: takes a mechanism's name, returns seconds."""

    def __init__(self, options: Any):
        names = ",".join(options.attention)
        settings = [f"--task={options.task}", f"--length={options.length}"]
        settings += [f"--attention={names}", *["--compile"] * options.compile]
        self._process = subprocess.Popen(
            [options.torch_python, __file__, "--worker", *settings],
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


def work(options: Any) -> None:
    """The worker's side, which needs torch."""
    import pytorch_models
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(json.dumps(torch.__version__), flush=True)
    make = getattr(pytorch_models, f"{options.task}_step")
    steps = {
        name: make(name, options.length, options.compile) for name in options.attention
    }
    for line in sys.stdin:
        start = time.perf_counter()
        steps[line.strip()]()
        print(json.dumps(time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    main()
