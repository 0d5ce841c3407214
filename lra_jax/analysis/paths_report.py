"""The pictures of ``analyze paths``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lra_jax import plotting
from lra_jax.analysis.circle import (
    TRAINED_CIRCLE,
    CircleRun,
    CircleSettings,
    run_circle,
)
from lra_jax.analysis.path_experiments import PUBLISHED, Experiment, PathResult
from lra_jax.analysis.paths import path_length_distribution
from lra_jax.analysis.report import Report
from lra_jax.attention import registry
from lra_jax.errors import known

__all__ = ["add_circles", "add_lengths", "add_results", "check"]

_MODELS = {
    "DistilBERT": (6, 12),
    "BERT-base": (12, 12),
    "BERT-large": (24, 16),
    "DeiT-T": (12, 3),
    "GPT-3": (96, 96),
}


def check(names: Sequence[str], mechanism: str, repeats: int) -> None:
    """Raises ``ValueError`` for what no experiment can run with."""
    if not names or repeats < 1:
        raise ValueError(
            "--experiment, --repeats: expected at least one of each, got "
            f"{len(names)} and {repeats}"
        )
    for name in names:
        known("--experiment", name, (*PUBLISHED, "circle"))
    found = registry.resolve(mechanism)
    if found.parameters or len(found.projections) < 4:
        raise ValueError(
            "--attention: expected a mechanism of queries, keys and values without "
            f"arrays of its own, got {mechanism!r}"
        )


def add_lengths(report: Report) -> None:
    """How many paths of each length published models have, by the closed form."""
    figure, axes = plotting.figure(1, 1, size=(5.0, 2.8))
    axis, data = axes[0, 0], {}
    for index, (name, sizes) in enumerate(_MODELS.items()):
        shares = path_length_distribution(*sizes)
        parts = np.arange(len(shares)) / (len(shares) - 1)
        label = f"{name}, {sizes[0]} layers of {sizes[1]} heads"
        axis.plot(parts, shares, label=label, **plotting.line_style(index))
        data[name] = {"layers": sizes[0], "heads": sizes[1], "shares": shares}
    axis.set_xlabel("length of a path, part of the layers")
    axis.set_ylabel("share of the paths")
    axis.set_xlim(0.5, 1.01)
    axis.legend()
    caption = (
        "Paths by their length, C(L, k) H^k of (1 + H)^L: nearly all of them are "
        "nearly as long as the network is deep."
    )
    report.heading("Most paths are long")
    report.figure("path-lengths", figure, caption, data)


def add_results(
    report: Report,
    results: Mapping[str, PathResult],
    experiments: Mapping[str, Experiment],
    quick: bool,
) -> None:
    """Accuracy against path length, a panel for each experiment."""
    figure, axes = plotting.figure(1, len(results), size=(3.2, 3.0))
    for axis, (name, result) in zip(axes[0], results.items(), strict=True):
        for index, (count, rows) in enumerate(result.by_length.items()):
            axis.errorbar(
                np.arange(len(rows)) + 0.08 * (index - 0.5),
                rows.mean(1),
                rows.std(1),
                label=f"{count} paths",
                capsize=2,
                **plotting.line_style(index),
            )
        axis.axhline(result.whole, color="black", linewidth=0.9, label="whole network")
        axis.axhline(
            result.majority,
            color="#6b6b6b",
            linestyle=":",
            label="most frequent label",
        )
        axis.set_title(name)
        axis.set_xlabel("length of the paths, layers")
        axis.set_ylim(0, 1.03)
    axes[0, 0].set_ylabel("tokens labelled rightly, part")
    plotting.shared_legend(figure, axes[0, 0])
    caption = (
        "Accuracy of the sum of random paths by their length; bars are one standard "
        "deviation over draws of the paths. "
        + ("Quick settings: fewer steps, larger rate." if quick else "")
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
    report.heading("Short paths do the work")
    report.figure("paths", figure, caption, data)
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
    head = ("", "whole", "printed", "majority")
    report.table((*head, *(f"length {k}" for k in ("0", "1", "3", "L"))), rows)


def add_circles(report: Report, mechanism: str, seed: int) -> None:
    """The three variants, with the published learning rate and with a larger one."""
    report.heading("The circle: tokens of pure attention run together")
    variants = {
        "attention": {"skip": False, "mlp": False},
        "attention + skip": {"skip": True, "mlp": False},
        "attention + MLP": {"skip": False, "mlp": True},
    }
    for name, settings in (("circle", CircleSettings()), ("trained", TRAINED_CIRCLE)):
        runs = {
            variant: run_circle(settings, **parts, mechanism=mechanism, seed=seed)
            for variant, parts in variants.items()
        }
        about = f"Trained for {settings.epochs} epochs at {settings.learning_rate:g}."
        name = "circle" if name == "circle" else f"circle-{name}"
        _add_circle(report, name, runs, about)


def _add_circle(
    report: Report, name: str, runs: Mapping[str, CircleRun], about: str
) -> None:
    """Roll-outs in the plane, and how far apart their two points are."""
    count = len(runs)
    figure, axes = plotting.figure(1, count + 1, size=(2.9, 2.9))
    for axis, (variant, run) in zip(axes[0], runs.items(), strict=False):
        angles = np.linspace(0, 2 * np.pi, 200)
        axis.plot(
            0.3 * np.cos(angles), 0.3 * np.sin(angles), color="#bbbbbb", linewidth=0.8
        )
        for point in range(2):
            style = plotting.line_style(2 * point) | {"linestyle": "", "markersize": 2}
            axis.plot(*run.trajectory[:, point].T, label=f"point {point + 1}", **style)
            axis.plot(*run.trajectory[-1, point], "*", color="black", markersize=9)
        axis.set_title(variant)
        axis.set_aspect("equal")
        limit = max(0.36, 1.1 * float(np.abs(run.trajectory).max()))
        axis.set_xlim(-limit, limit)
        axis.set_ylim(-limit, limit)
        axis.set_xlabel("x")
    axes[0, 0].set_ylabel("y")
    plotting.shared_legend(figure, axes[0, 0])
    last = axes[0, -1]
    for index, (variant, run) in enumerate(runs.items()):
        style = plotting.line_style(index) | {"markevery": 40}
        last.plot(np.maximum(run.spread, 1e-8), label=variant, **style)
    last.set_yscale("log")
    last.set_xlabel("step of the roll-out")
    last.set_title("distance of the two points")
    last.legend()
    caption = (
        f"One recurrent layer that learned to step along a circle, run on its own "
        f"output. Stars: where the points end. {about}"
    )
    data = {
        variant: {
            "trajectory": run.trajectory,
            "distance": run.spread,
            "losses": run.losses,
        }
        for variant, run in runs.items()
    }
    report.figure(name, figure, caption, data)
    rows = [
        (
            name,
            f"{run.losses[-1]:.2g}",
            *(f"{run.spread[step]:.3g}" for step in _steps(run)),
        )
        for name, run in runs.items()
    ]
    steps = _steps(next(iter(runs.values())))
    head = ("", "training loss", *(f"distance, step {step}" for step in steps))
    report.table(head, rows)


def _steps(run: Any) -> list[int]:
    last = len(run.trajectory) - 1
    return sorted({0, min(10, last), min(100, last), last})
