"""The pictures and tables of ``analyze paths``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lra_jax.analysis.circle import (
    TRAINED_CIRCLE,
    CircleRun,
    CircleSettings,
    run_circle,
)
from lra_jax.analysis.path_experiments import PUBLISHED, Experiment, PathResult
from lra_jax.analysis.paths import path_length_distribution
from lra_jax.attention import registry
from lra_jax.attention.inputs import check_size
from lra_jax.errors import expected, known
from lra_jax.reports import charts
from lra_jax.reports.page import Page

_MODELS = {
    "DistilBERT": (6, 12),
    "BERT-base": (12, 12),
    "BERT-large": (24, 16),
    "DeiT-T": (12, 3),
    "GPT-3": (96, 96),
}


def check(names: Sequence[str], mechanism: str, repeats: int) -> None:
    """Raises ``ValueError`` for settings with which no experiment can run."""
    for name in names:
        known("--experiment", name, (*PUBLISHED, "circle"))
    check_size("--repeats", repeats)
    found = registry.resolve(mechanism)
    if found.parameters or len(found.projections) < 4:
        wanted = "a mechanism of queries, keys and values without its own parameters"
        raise expected("--attention", wanted, repr(mechanism))


def add_lengths(page: Page) -> None:
    """The number of paths of each length in published models, in closed form."""
    figure, axes = charts.figure(1, 1, size=(7.5, 3.4))
    lines, data = [], {}
    for name, (layers, heads) in _MODELS.items():
        shares = path_length_distribution(layers, heads)
        label = f"{name}, {layers} layers of {heads} heads"
        lines.append(charts.Line(label, np.linspace(0, 1, len(shares)), shares))
        data[name] = {"layers": layers, "heads": heads, "shares": shares}
    charts.draw(
        axes[0, 0],
        lines,
        xlabel="length of a path, share of the layers",
        ylabel="share of the paths",
        xlim=(0.5, 1.01),
    )
    charts.own_legend(axes[0, 0])
    caption = (
        "Paths by their length, C(L, k) H^k of (1 + H)^L: nearly all of them are "
        "nearly as long as the network is deep."
    )
    page.heading("Most paths are long")
    page.figure("path-lengths", figure, caption, data)


def add_results(
    page: Page,
    results: Mapping[str, PathResult],
    experiments: Mapping[str, Experiment],
    quick: bool,
) -> None:
    """Accuracy against path length, a panel for each experiment."""
    figure, axes = charts.figure(1, len(results), size=(3.6, 3.4), sharey=True)
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        lines = [
            charts.Line(
                f"{n} paths", range(len(rows)), rows.mean(1), spread=rows.std(1)
            )
            for n, rows in result.by_length.items()
        ]
        charts.draw(axis, lines, title=name, xlabel="length of the paths, layers")
        charts.whole_numbers(axis)
        axis.axhline(result.whole, color="black", linewidth=1, label="whole network")
        usual = {"color": charts.GREY, "linestyle": ":", "label": "most frequent label"}
        axis.axhline(result.majority, **usual)
    axes[0, 0].set(ylabel="share of tokens labelled correctly", ylim=(0, 1.03))
    charts.legend(figure, axes)
    caption = (
        "Accuracy of the sum of random paths by their length; one standard deviation "
        "over draws of the paths is shaded."
        + (" Quick settings: fewer steps, larger learning rate." if quick else "")
    )
    data = {
        name: {
            "whole": result.whole,
            "majority": result.majority,
            "losses": result.losses,
            **{f"{count} paths": rows for count, rows in result.by_length.items()},
        }
        for name, result in results.items()
    }
    page.heading("Short paths do the work")
    page.figure("paths", figure, caption, data)
    rows = [
        (
            name,
            f"{result.whole:.3f}",
            "-" if experiments[name].whole is None else experiments[name].whole,
            f"{result.majority:.3f}",
            *(f"{part[length].mean():.3f}" for length in (0, 1, 3, -1)),
        )
        for name, result in results.items()
        for part in [result.by_length[max(result.by_length)]]
    ]
    head = ("experiment", "whole network", "published", "most frequent label")
    page.table((*head, *(f"length {k}" for k in ("0", "1", "3", "L"))), rows)


def add_circles(page: Page, mechanism: str, seed: int) -> None:
    """The three variants, with the published learning rate and with a larger one."""
    page.heading("The circle: tokens of pure attention run together")
    variants = {
        "attention": {"skip": False, "mlp": False},
        "attention + skip": {"skip": True, "mlp": False},
        "attention + MLP": {"skip": False, "mlp": True},
    }
    named = {"circle": CircleSettings(), "circle-trained": TRAINED_CIRCLE}
    for name, settings in named.items():
        runs = {
            variant: run_circle(settings, **parts, mechanism=mechanism, seed=seed)
            for variant, parts in variants.items()
        }
        about = f"Trained for {settings.epochs} epochs at {settings.learning_rate:g}."
        _add_circle(page, name, runs, about)


def _add_circle(
    page: Page, name: str, runs: Mapping[str, CircleRun], about: str
) -> None:
    """Roll-outs in the plane, and how far apart their two points are."""
    figure, axes = charts.figure(1, len(runs) + 1, size=(3.3, 3.3))
    for axis, (variant, run) in zip(axes[0], runs.items(), strict=False):
        _draw_circle(axis, run, variant)
    axes[0, 0].set_ylabel("y")
    last = axes[0, -1]
    lines = [
        charts.Line(variant, range(len(run.spread)), np.maximum(run.spread, 1e-8))
        for variant, run in runs.items()
    ]
    title = "distance of the two points"
    charts.draw(last, lines, title=title, xlabel="step of the roll-out")
    charts.log_scale(last)
    charts.legend(figure, axes)
    caption = (
        "One recurrent layer that learned to step along a circle, run on its own "
        "output. Stars: where the points end. The picture cuts distances off at 1e-8. "
        f"{about}"
    )
    data = {
        variant: {
            "trajectory": run.trajectory,
            "distance": run.spread,
            "losses": run.losses,
        }
        for variant, run in runs.items()
    }
    page.figure(name, figure, caption, data)
    end = len(next(iter(runs.values())).trajectory) - 1
    steps = sorted({0, min(10, end), min(100, end), end})
    rows = [
        (
            variant,
            f"{run.losses[-1]:.2g}",
            *(f"{run.spread[step]:.3g}" for step in steps),
        )
        for variant, run in runs.items()
    ]
    head = ("parts", "training loss", *(f"distance, step {step}" for step in steps))
    page.table(head, rows)


def _draw_circle(axis: Any, run: CircleRun, title: str) -> None:
    angles = np.linspace(0, 2 * np.pi, 200)
    axis.plot(0.3 * np.cos(angles), 0.3 * np.sin(angles), color="#bbbbbb", linewidth=1)
    for point in range(2):
        colour, marker = charts.line_style(point)["color"], "os"[point]
        looks = {"color": colour, "marker": marker, "linestyle": "", "markersize": 2.5}
        axis.plot(*run.trajectory[:, point].T, label=f"point {point + 1}", **looks)
        axis.plot(*run.trajectory[-1, point], "*", color="black", markersize=9)
    limit = max(0.36, 1.1 * float(np.abs(run.trajectory).max()))
    axis.set(title=title, aspect="equal", xlabel="x", xlim=(-limit, limit))
    axis.set_ylim(-limit, limit)
