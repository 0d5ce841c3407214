"""Draws where cosFormer looks in an image, in one dimension and in two.

    python benchmarks/grid_map.py --out=docs/grid.png

The image is synthetic, two discs on a dark background, and queries and keys are those
of an untrained layer: ``ReLU(W (p, 1))`` of each pixel's value p, with a random W. So a
pixel looks at others by brightness, and every other effect is the re-weighting.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from lra_jax import attention

matplotlib.use("Agg")
from matplotlib import pyplot as plt

SIZE = 32
QUERY = (10, 10)


def image() -> np.ndarray:
    """Two bright discs, `[32, 32]` in [0, 1]."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    discs = ((rows - a) ** 2 + (columns - b) ** 2 < 36 for a, b in ((10, 10), (22, 23)))
    return 0.2 + 0.8 * np.any(list(discs), 0)


def maps(pixels: np.ndarray) -> dict[str, np.ndarray]:
    """The weights of the query pixel over the image, by the form's name."""
    matrices = jax.random.normal(jax.random.key(2), (2, 2, 16))
    inputs = jnp.stack([jnp.asarray(pixels).reshape(-1), jnp.ones(SIZE**2)], -1)
    query, key = ((inputs @ matrix)[None, :, None] for matrix in matrices)
    place = QUERY[0] * SIZE + QUERY[1]
    weights: Any = attention.cosformer_weights
    return {
        name: np.asarray(weights(query, key, grid=grid)[0, 0, place]).reshape(
            SIZE, SIZE
        )
        for name, grid in {"one dimension": None, "grid=(32, 32)": (SIZE, SIZE)}.items()
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/grid.png"))
    settings = parser.parse_args()
    pixels = image()
    panels = {"image": pixels, **maps(pixels)}
    figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.7), layout="constrained")
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        axis.imshow(panel, cmap="gray" if name == "image" else "viridis", vmin=0)
        axis.plot(*QUERY[::-1], "+", color="red")
        axis.set(title=name, xticks=[], yticks=[])
    figure.savefig(settings.out, dpi=110)


if __name__ == "__main__":
    main()
