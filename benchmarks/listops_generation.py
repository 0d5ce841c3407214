"""How long the 100,000 trees of ListOps take: to generate, to prepare, to open.

    python benchmarks/listops_generation.py --out=results/listops_generation.json

Generation leaves the trees in memory; preparation also writes them to disk, and opening
reads their lengths and labels back. Each is timed once, from the call to its return,
start of the worker processes included.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from typing import Any

from lra_jax.data import listops, listops_trees, pipeline

SIZES: dict[str, Any] = {"num_train": 96_000, "num_valid": 2_000, "num_test": 2_000}
PACKAGES = ("numpy", "tensorflow-datasets", "array_record", "grain")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        # Of the minute before: what else may have kept the cores busy.
        "load_average_before": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "versions": versions(),
        "settings": {"seed": 0, **SIZES},
        "by_processes": {
            count: {"generate_seconds": generate_seconds(count), **preparation(count)}
            for count in arguments.processes
        },
    }
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


def generate_seconds(processes: int) -> float:
    """Seconds to hold all trees in memory."""
    start = time.perf_counter()
    listops_trees.generate(0, sum(SIZES.values()), processes=processes)
    return round(time.perf_counter() - start, 2)


def preparation(processes: int) -> dict[str, Any]:
    """Seconds to prepare and to open again, and what came of it."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        listops.prepare(folder, seed=0, **SIZES, processes=processes)
        prepared = time.perf_counter()
        dataset = listops.prepare(folder, seed=0, **SIZES)
        opened = time.perf_counter()
        files = [file for file in pathlib.Path(folder).rglob("*") if file.is_file()]
        return {
            "prepare_seconds": round(prepared - start, 2),
            "open_seconds": round(opened - prepared, 3),
            "megabytes_on_disk": round(sum(f.stat().st_size for f in files) / 1e6, 1),
            "fingerprint": dataset.fingerprint,
            "buckets": pipeline.bucket_lengths(dataset, "auto"),
            "batches_of_32_per_second": batches_per_second(dataset),
        }


def batches_per_second(dataset, steps: int = 1500) -> int:
    """Training batches of 32 that one process delivers, padded."""
    iterator = pipeline.train_iterator(
        dataset, batch_size=32, seed=0, num_steps=steps + 1
    )
    next(iterator)
    start = time.perf_counter()
    for _ in iterator:
        pass
    return round(steps / (time.perf_counter() - start))


def machine() -> str:
    """Cores and processor, as `2 CPU cores (AMD EPYC)`."""
    cores = len(os.sched_getaffinity(0))
    model = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if "model name" in x]
        model = names[0].split(":")[1].strip() if names else model
    return f"{cores} CPU cores ({model})"


def commit() -> str | None:
    """The commit of this repository, if there is one."""
    git = ["git", "rev-parse", "HEAD"]
    folder = pathlib.Path(__file__).parent
    done = subprocess.run(git, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that take part."""
    packages = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), **packages}


if __name__ == "__main__":
    main()
