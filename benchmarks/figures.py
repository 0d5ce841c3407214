"""Draws the figures of docs/ that show results/: python benchmarks/figures.py [NAME...]

learning, pathfinder: validation curves of the runs in the folder of that name.
suites: mechanisms by tests, and accuracy against the length of the sequence.
recall_state: recall against the pairs to recall, and against the size of the state.
  A layer of a given width has the same number of parameters however many heads it has,
  but a linear mechanism with N heads of H columns keeps N H^2 numbers.
grid: where cosFormer looks in an image, in one dimension and in two. The image is
  synthetic, and queries and keys are those of an untrained layer, ``ReLU(W (p, 1))`` of
  each pixel's value p: a pixel looks at others by brightness, and every other effect is
  the re-weighting.
language_PART: validation curves of a part of `papers_in_small.py`, and its loss against
  the position where it was measured.
"""

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from papers_in_small import PARTS
from results_tables import (
    Result,
    best_of_tests,
    by_pairs,
    flag,
    mixers,
    most_pairs,
    pretraining,
    read,
    score,
    title,
)

from lra_jax import attention
from lra_jax.reports import charts
from lra_jax.tasks import get_task, suites

ROOT = Path(__file__).parents[1]
PUBLISHED = {"cosFormer, published": 37.9, "Flowformer, published": 38.7}
"""ListOps, for models trained on the task's own labels."""
LEAST = 10
"""Tests that a row of the heat map has at least."""
BY_LENGTH = {
    "needle": ("softmax", "cosformer", "linear", "retention", "gla", "delta", "hgrn"),
    "parity": ("softmax", "delta", "delta, beta_range=2", "hgrn, rotates=true"),
}
BESIDE = ("flow", "flow, feature_map=relu", "performer", "retention", "softmax")
"""Mechanisms of results/suites/ that `recall_state` shows as well."""
SHARED_STATE = 4_096
"""About as many numbers as linear mechanisms keep in its left panel."""
SIZE, QUERY = 32, (10, 10)


def draw_learning() -> Any:
    """ListOps."""
    return _curves("learning", "ListOps", PUBLISHED)


def draw_pathfinder() -> Any:
    """Pathfinder."""
    return _curves("pathfinder", "Pathfinder, 32 x 32 pixels", {"chance": 50.0})


def _curves(name: str, heading: str, levels: dict[str, float]) -> Any:
    """Accuracy over the steps of each run in a folder, and constant lines."""
    folder, lines = ROOT / "results" / name, []
    for file in sorted(folder.glob("*.metrics.jsonl")):
        result = json.loads((folder / f"{file.name.split('.')[0]}.json").read_text())
        points = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [point["step"] for point in points]
        accuracy = [100 * point["accuracy"] for point in points]
        lines.append(charts.Line(_label(result), steps, accuracy))
    last = max(max(line.x) for line in lines)
    lines += [charts.Line(label, [0, last], [y, y]) for label, y in levels.items()]
    figure, axes = charts.figure(1, 1, size=(10, 4))
    labels = {"xlabel": "training step", "ylabel": "validation accuracy, %"}
    charts.draw(axes[0, 0], lines, title=heading, **labels)
    charts.whole_numbers(axes[0, 0])
    charts.legend(figure, axes)
    return figure


def _label(result: Result) -> str:
    """The label of a run's curve."""
    first, size = pretraining(result), flag(result, "train.batch_size")
    pixels = result["task"] == "pathfinder" and not flag(result, "model.patch")
    parts = (
        mixers(result),
        flag(result, "data.level"),
        f"{result['steps']:,} steps",
        f"{first} first" if first else "",
        "no patches" if pixels else "",
        f"batches of {size}" if size not in ("", "32") else "",
        f"seed {result['seed']}" if result["seed"] else "",
    )
    return ", ".join(filter(None, parts))


def draw_suites() -> Any:
    """Left a heat map, right lines against the length."""
    best = best_of_tests(read("suites"))
    ratios = {"width_ratios": [2, 1, 1]}
    figure, axes = charts.figure(1, 3, size=(6.0, 4.4), gridspec_kw=ratios)
    tests = [
        task.name for suite in ("recall", "mad", "state") for task in suites()[suite]
    ]
    rows = {
        name: [score(row[test]) if test in row else np.nan for test in tests]
        for name, row in best.items()
        if len(row) >= LEAST
    }
    names = sorted(rows, key=lambda name: -np.nanmean(rows[name]))
    heads = [f"{t} (scaled)" if get_task(t).is_scaled else t for t in tests]
    charts.heat_map(figure, axes[0, 0], [rows[name] for name in names], names, heads)
    for axis, (test, mechanisms) in zip(axes[0, 1:], BY_LENGTH.items(), strict=True):
        lines = []
        for name in mechanisms:
            parts = best[name][test]["test_accuracy_by_length"]
            lines.append(charts.Line(name, [*map(int, parts)], [*parts.values()]))
        charts.draw(axis, lines, title=test, xlabel="tokens", ylabel="accuracy, %")
        charts.log_lengths(axis, [int(x) for x in lines[0].x])
        charts.own_legend(axis)
    return figure


def draw_recall_state() -> Any:
    """Left against the pairs, right against the state."""
    runs: dict[str, list[Result]] = {}
    for result in sorted(read("recall_state"), key=lambda one: one["state_size"]):
        runs.setdefault(title(result), []).append(result)

    def distance(result: Result) -> float:
        return abs(math.log(result["state_size"] / SHARED_STATE))

    alike = {name: min(results, key=distance) for name, results in runs.items()}
    for result in read("suites"):
        rate = flag(result, "train.learning_rate")
        if result["task"] == "mqar" and float(rate) == 0.01 and title(result) in BESIDE:
            alike[title(result)] = result
    pairs = [
        charts.Line(name, list(by_pairs(run)), list(by_pairs(run).values()))
        for name, run in alike.items()
    ]
    states = [
        charts.Line(
            name, [x["state_size"] for x in results], [*map(most_pairs, results)]
        )
        for name, results in runs.items()
    ]
    figure, axes = charts.figure(1, 2, size=(6.0, 4.2))
    label = "accuracy, %"
    charts.draw(axes[0, 0], pairs, xlabel="pairs to recall", ylabel=label)
    charts.log_lengths(axes[0, 0], sorted({int(x) for line in pairs for x in line.x}))
    numbers = "numbers in the state, most pairs"
    charts.draw(axes[0, 1], states, xlabel=numbers, ylabel=label)
    charts.log_lengths(axes[0, 1], [1024, 2048, 4096, 8192, 16384])
    charts.legend(figure, axes)
    return figure


def draw_grid() -> Any:
    """The image, and the weights of one pixel over it."""
    rows, columns = np.mgrid[:SIZE, :SIZE]
    discs = [(rows - a) ** 2 + (columns - b) ** 2 < 36 for a, b in ((10, 10), (22, 23))]
    pixels = 0.2 + 0.8 * np.any(discs, 0)
    matrices = jax.random.normal(jax.random.key(2), (2, 2, 16))
    inputs = jnp.stack([jnp.asarray(pixels).reshape(-1), jnp.ones(SIZE**2)], -1)
    query, key = ((inputs @ matrix)[None, :, None] for matrix in matrices)
    panels, matrix_of = {"image": pixels}, cast(Any, attention.cosformer_weights)
    for name, grid in {"one dimension": None, "grid=(32, 32)": (SIZE, SIZE)}.items():
        row = matrix_of(query, key, grid=grid)[0, 0, QUERY[0] * SIZE + QUERY[1]]
        panels[name] = np.asarray(row).reshape(SIZE, SIZE)
    figure, axes = charts.figure(1, 3, size=(2.5, 2.7))
    for axis, (name, panel) in zip(axes[0], panels.items(), strict=True):
        axis.imshow(panel, cmap="gray" if name == "image" else "viridis", vmin=0)
        axis.plot(*QUERY[::-1], "+", color="red")
        axis.set(title=name, xticks=[], yticks=[])
    return figure


def draw_language(name: str) -> Any:
    """Left against the steps, right against the position."""
    report = json.loads((ROOT / "results" / "language" / f"{name}.json").read_text())
    part, rows = PARTS[name], report["rows"]
    figure, axes = charts.figure(1, 1 + part.positions, size=(6.0, 4.2))
    curves = [
        charts.Line(model, [x for x, _ in row["curve"]], [y for _, y in row["curve"]])
        for model, row in rows.items()
    ]
    labels = {"xlabel": "steps", "ylabel": "validation loss, nats"}
    charts.draw(axes[0, 0], curves, **labels)
    if part.positions:
        lines = []
        for model, row in rows.items():
            bins = [int(x.partition("-")[2]) for x in row["by_position"]]
            lines.append(charts.Line(model, bins, [*row["by_position"].values()]))
        labels = {"xlabel": "positions up to", "ylabel": "bits per token"}
        charts.draw(axes[0, 1], lines, **labels)
        charts.log_lengths(axes[0, 1], [int(x) for line in lines for x in line.x])
    charts.legend(figure, axes)
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "learning": draw_learning,
    "pathfinder": draw_pathfinder,
    "suites": draw_suites,
    "recall_state": draw_recall_state,
    "grid": draw_grid,
    **{f"language_{name}": functools.partial(draw_language, name) for name in PARTS},
}


def main() -> None:
    """The command line."""
    for name in sys.argv[1:] or FIGURES:
        with charts.style():
            picture = charts.to_png(FIGURES[name]())
        (ROOT / "docs" / f"{name}.png").write_bytes(picture)


if __name__ == "__main__":
    main()
