"""Memory and speed of a training run with the C library's memory settings.

    python benchmarks/allocator.py --out=results/allocator.json

Trains the default ListOps model for --steps steps on examples of all lengths, each time
in a process of its own on one core, with the settings in turns:

system: glibc as it is (``LRA_JAX_ALLOCATOR=system``).
cached: the settings of `lra_jax.runtime`, but with the threads' caches.
tuned: the settings of `lra_jax.runtime`.

The peak is the resident memory of the whole process, compiler and data included; steps
per second are the median of those after the compilations.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import flags, origin, write

from lra_jax import runtime

NAMES = ("system", "cached", "tuned")
CACHE = "tcache_count"
FLAGS = (
    *("--task=listops", "--train.curriculum=", "--train.warmup=5"),
    *("--data.num_train=2000", "--data.num_valid=64", "--data.num_test=64"),
    "--train.log_every=5",
)


def environment(name: str) -> dict[str, str]:
    """The environment of a run, by the name of its setting."""
    variables = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    if name == "system":
        return variables | {"LRA_JAX_ALLOCATOR": "system"}
    kept = [
        f"glibc.malloc.{key}={value}"
        for key, value in runtime.tunables().items()
        if name == "tuned" or key != CACHE
    ]
    return variables | {"GLIBC_TUNABLES": ":".join(kept)}


def measure(name: str, steps: int, folder: Path, run: str) -> dict[str, Any]:
    """Trains once; returns the peak memory and the speed."""
    workdir = folder / run
    sizes = [f"--train.steps={steps}", f"--train.eval_every={steps}"]
    places = [f"--data.dir={folder}", f"--workdir={workdir}"]
    core = min(os.sched_getaffinity(0))
    subprocess.run(
        [sys.executable, "-m", "lra_jax.train", *FLAGS, *sizes, *places],
        env=environment(name),
        check=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )
    result = json.loads((workdir / "result.json").read_text())
    row = {
        "peak_gb": round(result["peak_memory_bytes"] / 1e9, 2),
        "steps_per_second": round(result["steps_per_second"], 3),
    }
    print(name, row, flush=True)
    return row


def main() -> None:
    """The command line."""
    args = flags(__doc__, steps=60, rounds=3).parse_args()
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        # Not counted: makes the data, and keeps the compiled programs.
        measure("tuned", args.steps, Path(folder), "first")
        for turn in range(args.rounds):
            for name in NAMES:
                run = f"{name}-{turn}"
                rows[name].append(measure(name, args.steps, Path(folder), run))
    median = {
        name: {key: statistics.median(row[key] for row in runs) for key in runs[0]}
        for name, runs in rows.items()
    }
    write(args.out, origin() | {"steps": args.steps, "median": median, "runs": rows})


if __name__ == "__main__":
    main()
