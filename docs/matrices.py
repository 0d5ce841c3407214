"""Draws the matrices of some mechanisms: what each query takes from each key.

    python docs/matrices.py --out=docs/matrices.png

Two random tensors, a query and a key of 64 positions and 16 columns with one head, are
the same for every mechanism; nothing is trained. So all that is seen comes from the
mechanism itself: its feature map, its window, its decay. Each row is divided by its
largest entry. Grey is above zero; where a mechanism has entries below zero, orange is
above and blue below.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from lra_jax import attention
from lra_jax.attention import MECHANISMS

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import LinearSegmentedColormap

LENGTH, HEAD_DIM, SEED = 64, 16, 0
COLUMNS = 6
SIGNED = LinearSegmentedColormap.from_list("signed", ["#0072b2", "white", "#d55e00"])


def options() -> dict[str, dict]:
    """The mechanisms that are drawn, with what their functions need."""
    projections = jax.random.split(jax.random.key(SEED + 1), 2)
    linformer = jax.random.normal(projections[0], (8, LENGTH)) / np.sqrt(8)
    beta = jnp.full((1, LENGTH, 1), 0.5)
    log_decay = jnp.full((1, LENGTH, 1, HEAD_DIM), np.log(0.9))
    return {
        "softmax": {},
        "local": {"window": 6},
        "linear": {},
        "cosformer": {"max_length": LENGTH},
        "performer": {
            "projection": attention.performer_projection(projections[1], 64, HEAD_DIM)
        },
        "flow": {},
        "linformer": {"key_projection": linformer, "value_projection": linformer},
        "nystrom": {"num_landmarks": 8},
        "retention": {},
        "lightning": {},
        "gla": {"log_decay": log_decay},
        "delta": {"beta": beta},
    }


def matrices(is_causal: bool) -> dict[str, np.ndarray]:
    """The matrix `[64, 64]` of each mechanism, where it has that form."""
    shape = (2, 1, LENGTH, 1, HEAD_DIM)
    query, key = jax.random.normal(jax.random.key(SEED), shape)
    found = {}
    for name, own in options().items():
        if is_causal and not MECHANISMS[name].causal:
            continue
        weights: Callable = getattr(attention, f"{name}_weights")
        # One program for each, not one for each operation.
        program = jax.jit(functools.partial(weights, is_causal=is_causal, **own))
        found[name] = np.asarray(program(query, key))[0, 0]
    return found


def draw(axis, name: str, matrix: np.ndarray) -> None:
    """One panel; white is zero."""
    scaled = matrix / np.abs(matrix).max(1, keepdims=True)
    if scaled.min() < -1e-6:
        axis.imshow(scaled, cmap=SIGNED, vmin=-1, vmax=1)
    else:
        axis.imshow(scaled, cmap="Greys", vmin=0, vmax=1)
    axis.set_title(name, fontsize=9)
    axis.set(xticks=[], yticks=[])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/matrices.png"))
    settings = parser.parse_args()
    figure = plt.figure(figsize=(8.2, 6.6), layout="constrained")
    parts = figure.subfigures(2, 1)
    for part, is_causal in zip(parts, (False, True), strict=True):
        found = matrices(is_causal)
        axes = part.subplots(2, COLUMNS).ravel()
        for axis, (name, matrix) in zip(axes, found.items(), strict=False):
            draw(axis, name, matrix)
        for axis in axes[len(found) :]:
            axis.set_axis_off()
        kind = "causal" if is_causal else "bidirectional"
        title = f"{kind}: queries from top to bottom, keys from left to right"
        part.suptitle(title, fontsize=10)
    figure.savefig(settings.out, dpi=150)


if __name__ == "__main__":
    main()
