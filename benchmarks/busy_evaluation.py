"""Language models that are evaluated, several at a time on a machine of few cores.

    python benchmarks/busy_evaluation.py --rounds=2 --out=results/busy_evaluation.json

Starts ``--at-once`` short trainings of ``--task=lm`` together, each of which is scored
on two splits, and does so ``--rounds`` times for each number of CPU devices. Counts
those that end with exit code 0. XLA ends a process whose programs wait for each other
after 40 seconds (exit code 134).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import origin, write

FLAGS = ("--task=lm", "--train.steps=5", "--train.warmup=1", "--train.batch_size=8")
DEVICES = (2, 4, 8)


def trainings(devices: int, at_once: int) -> list[dict[str, float]]:
    """Exit codes and seconds of trainings started together."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "LRA_JAX_CPU_DEVICES": str(devices),
    }
    command = [sys.executable, "-m", "lra_jax.train", *FLAGS]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        processes = [
            subprocess.Popen(
                [*command, f"--workdir={folder}/{number}"],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for number in range(at_once)
        ]
        rows = []
        for process in processes:
            code = process.wait()
            seconds = round(time.monotonic() - begin, 1)
            rows.append({"devices": devices, "exit_code": code, "seconds": seconds})
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for _ in range(options.rounds):
        for devices in DEVICES:
            rows += trainings(devices, options.at_once)
            print(rows[-options.at_once :], flush=True)
    good = sum(row["exit_code"] == 0 for row in rows)
    report = {"runs": len(rows), "ended_well": good, "at_once": options.at_once}
    if options.out is not None:
        write(options.out, report | origin() | {"rows": rows})
    print(report)


if __name__ == "__main__":
    main()
