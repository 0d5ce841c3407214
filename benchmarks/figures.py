"""Draws the figures of docs/ that show results/: python benchmarks/figures.py [NAME...]

learning, pathfinder: validation curves of the runs in the folder of that name.
suites: mechanisms by tests, and accuracy against the length of the sequence.
recall_state: recall against the pairs to recall, and against the size of the state.
  A layer of a given width has the same number of parameters however many heads it has,
  but a linear mechanism with N heads of H columns keeps N H^2 numbers.
cost: time and memory of attention against the length, the README's first picture.
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
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, read
from papers_in_small import PARTS
from results_tables import (
    Result,
    best_of_tests,
    by_pairs,
    flag,
    mixers,
    most_pairs,
    pretraining,
    read_all,
    score,
    title,
)

from lra_jax import attention
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Line, Panel
from lra_jax.tasks import get_task, suites

PUBLISHED = {"cosFormer, published": 37.9, "Flowformer, published": 38.7}
"""ListOps, for models trained on the task's own labels."""
LEAST = 9
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


def draw_curves(name: str, heading: str, levels: dict[str, float]) -> Chart:
    """Accuracy over the steps of each run in a folder, and constant lines."""
    folder, lines = ROOT / "results" / name, []
    for file in sorted(folder.glob("*.metrics.jsonl")):
        result = read(f"{name}/{file.name.split('.')[0]}.json")
        points = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [point["step"] for point in points]
        accuracy = [100 * point["accuracy"] for point in points]
        lines.append(Line(_label(result), steps, accuracy))
    last = max(max(line.x) for line in lines)
    lines += [Line(label, [0, last], [y, y]) for label, y in levels.items()]
    settings = {"title": heading, "xlabel": "training step"}
    settings |= {"ylabel": "validation accuracy, %"}
    return Chart(name, [Panel(lines, integers="x", settings=settings)], size=(10, 4))


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


def draw_cost() -> Chart:
    """Forward and backward; sizes and texts for a page of 830 pixels."""
    report = read("benchmark/attention.json")
    lines: dict[str, list[Result]] = {}
    for row in report["rows"]:
        if row["work"] == "forward+backward" and row["status"] == "measured":
            lines.setdefault(row["attention"].partition("[")[0], []).append(row)
    units = {"time, ms": ("median_ms", 1.0), "peak memory, GB": ("peak_bytes", 1e9)}
    panels = []
    for unit_of, (key, unit) in units.items():
        curves = [
            Line(
                name, [row["length"] for row in rows], [row[key] / unit for row in rows]
            )
            for name, rows in lines.items()
        ]
        lengths = sorted({x for line in curves for x in line.x})
        settings = {"title": unit_of, "xlabel": "tokens"}
        panels.append(Panel(curves, is_log=True, lengths=lengths, settings=settings))
    heading = f"Forward + backward, 8 heads of 64, {report['device']}"
    return Chart("cost", panels, size=(4.1, 3.3), title=heading)


def draw_suites() -> Chart:
    """A heat map, and below it lines against the length."""
    best = best_of_tests(read_all("suites"))
    members = [x for name in ("recall", "mad", "state") for x in suites()[name]]
    tests = [task.name for task in members if "quick" in task.sweeps]
    rows = {
        name: [score(row[test]) if test in row else np.nan for test in tests]
        for name, row in best.items()
        if len({*tests} & {*row}) >= LEAST
    }
    names = sorted(rows, key=lambda name: -np.nanmean(rows[name]))
    heads = [f"{t} (scaled)" if get_task(t).is_scaled else t for t in tests]
    panels = [charts.heat_map([rows[name] for name in names], names, heads)]
    for test, mechanisms in BY_LENGTH.items():
        lines = []
        for name in mechanisms:
            parts = best[name][test]["test_accuracy_by_length"]
            lines.append(Line(name, [*map(int, parts)], [*parts.values()]))
        settings = {"title": test, "xlabel": "tokens", "ylabel": "accuracy, %"}
        lengths = lines[0].x
        panels.append(Panel(lines, lengths=lengths, settings=settings, legend=True))
    layout = {"gridspec_kw": {"height_ratios": [2, 1, 1]}}
    return Chart("suites", panels, columns=1, size=(7.5, 3.4), layout=layout)


def draw_recall_state() -> Chart:
    """Left against the pairs, right against the state."""
    runs: dict[str, list[Result]] = {}
    for result in sorted(read_all("recall_state"), key=lambda one: one["state_size"]):
        runs.setdefault(title(result), []).append(result)

    def distance(result: Result) -> float:
        return abs(math.log(result["state_size"] / SHARED_STATE))

    alike = {name: min(results, key=distance) for name, results in runs.items()}
    for result in read_all("suites"):
        rate = flag(result, "train.learning_rate")
        if result["task"] == "mqar" and float(rate) == 0.01 and title(result) in BESIDE:
            alike[title(result)] = result
    pairs = [Line(n, [*by_pairs(x)], [*by_pairs(x).values()]) for n, x in alike.items()]
    states = [
        Line(name, [x["state_size"] for x in results], [*map(most_pairs, results)])
        for name, results in runs.items()
    ]
    lengths = sorted({x for line in pairs for x in line.x})
    settings = {"xlabel": "pairs to recall", "ylabel": "accuracy, %"}
    left = Panel(pairs, lengths=lengths, settings=settings)
    settings = settings | {"xlabel": "numbers in the state, most pairs"}
    right = Panel(states, lengths=[1024 << n for n in range(5)], settings=settings)
    return Chart("recall_state", [left, right], size=(6.0, 4.2))


def draw_grid() -> Chart:
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

    def panel(name: str, pixels: np.ndarray) -> Panel:
        def draw(_: Any, axis: Any) -> None:
            axis.imshow(pixels, cmap="gray" if name == "image" else "viridis", vmin=0)
            axis.plot(*QUERY[::-1], "+", color="red")

        return Panel(draw=draw, settings={"title": name, "xticks": [], "yticks": []})

    return Chart("grid", [panel(*item) for item in panels.items()], size=(2.5, 2.9))


def draw_language(name: str) -> Chart:
    """Left against the steps, right against the position."""
    rows, lines = read(f"language/{name}.json")["rows"], []
    curves = [
        Line(model, [x for x, _ in row["curve"]], [y for _, y in row["curve"]])
        for model, row in rows.items()
    ]
    settings = {"xlabel": "steps", "ylabel": "validation loss, nats"}
    panels = [Panel(curves, settings=settings)]
    if PARTS[name].positions:
        for model, row in rows.items():
            bins = [int(x.partition("-")[2]) for x in row["by_position"]]
            lines.append(Line(model, bins, [*row["by_position"].values()]))
        lengths = [x for line in lines for x in line.x]
        settings = {"xlabel": "positions up to", "ylabel": "bits per token"}
        panels.append(Panel(lines, lengths=lengths, settings=settings))
    return Chart(f"language_{name}", panels, size=(6.0, 4.2))


FIGURES: dict[str, Callable[[], Chart]] = {
    "learning": functools.partial(draw_curves, "learning", "ListOps", PUBLISHED),
    "pathfinder": functools.partial(
        draw_curves, "pathfinder", "Pathfinder, 32 x 32 pixels", {"chance": 50.0}
    ),
    "cost": draw_cost,
    "suites": draw_suites,
    "recall_state": draw_recall_state,
    "grid": draw_grid,
    **{f"language_{name}": functools.partial(draw_language, name) for name in PARTS},
}


def main() -> None:
    """The command line."""
    for name in sys.argv[1:] or FIGURES:
        FIGURES[name]().save(ROOT / "docs" / f"{name}.png")


if __name__ == "__main__":
    main()
