"""Times ListOps' 100,000 trees: to generate, to prepare and to open them.

    python benchmarks/listops_generation.py --out=results/listops_generation.json

Generation leaves the trees in memory; preparation also writes them to disk, and opening
reads their lengths and labels back. Each is timed once, from the call to its return,
including the start of the worker processes.
"""

import argparse
import json
import os
import pathlib
import tempfile
import time
from typing import Any

from common import origin, write

from lra_jax.data import listops, listops_trees, pipeline
from lra_jax.data.listops_language import Grammar

SIZES: dict[str, Any] = {"num_train": 96_000, "num_valid": 2_000, "num_test": 2_000}
PACKAGES = ("tensorflow-datasets", "array_record")


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    result = {
        # Load of the last minute: other work on the cores.
        "load_average_before": round(os.getloadavg()[0], 2),
        "settings": {"seed": 0, **SIZES},
        "by_processes": {
            count: {"generate_seconds": generate_seconds(count), **preparation(count)}
            for count in arguments.processes
        },
        **origin(*PACKAGES),
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        write(arguments.out, result)


def generate_seconds(processes: int) -> float:
    """Seconds to hold all trees in memory."""
    start = time.perf_counter()
    list(listops_trees.iterate(0, sum(SIZES.values()), Grammar(), processes))
    return round(time.perf_counter() - start, 2)


def preparation(processes: int) -> dict[str, Any]:
    """Seconds to prepare and to open again, and the properties of the data."""
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


if __name__ == "__main__":
    main()
