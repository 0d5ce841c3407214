"""Times the generation of Pathfinder images of each size.

    python benchmarks/pathfinder_generation.py --out=results/pathfinder_generation.json

Whole chunks are grown in this process, one after another, on the hard level, from
tables made beforehand. `cpu_ms` is this process's own time; other work on the machine
lengthens it less than `wall_ms`. `hours_for_200000` is `wall_ms` times 200,000: a data
set of LRA's size, with one process.
"""

import argparse
import json
import os
import time
from typing import Any

import numpy as np
from common import origin, write

from lra_jax.data import pathfinder_images
from lra_jax.data.pathfinder_shapes import GEOMETRIES, Settings, make_tables

IMAGES = {32: 10_240, 64: 256, 128: 512, 256: 128}


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(IMAGES))
    arguments = parser.parse_args()
    result = {
        "processes": 1,
        # Load of the last minute: other work on the cores.
        "load_average_before": round(os.getloadavg()[0], 2),
        "level": "hard",
        "by_size": {size: measure(size) for size in arguments.sizes},
        **origin("pillow"),
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        write(arguments.out, result)


def measure(size: int) -> dict[str, Any]:
    """Milliseconds per image, and statistics of the images."""
    settings = Settings(size)
    for margin in GEOMETRIES[size].margins:
        make_tables(GEOMETRIES[size], margin)
    count = IMAGES[size]
    start, cpu = time.perf_counter(), time.process_time()
    batches = list(pathfinder_images.iterate(settings, 0, count, processes=1))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    pixels = np.concatenate([batch.pixels for batch in batches])
    return {
        "images": count,
        "wall_ms": round(1000 * wall / count, 2),
        "cpu_ms": round(1000 * cpu / count, 2),
        "hours_for_200000": round(wall / count * 200_000 / 3600, 2),
        "mean_pixel": round(float(pixels.mean()), 2),
        "black_percent": round(100 * float((pixels == 0).mean()), 1),
        "label_mean": float(np.concatenate([x.labels for x in batches]).mean()),
    }


if __name__ == "__main__":
    main()
