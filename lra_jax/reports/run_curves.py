"""The curves of one run as a picture in its own directory."""

import contextlib
from pathlib import Path
from typing import Any

from lra_jax.files import replacing
from lra_jax.reports import charts
from lra_jax.training.metrics import read_metrics


def draw(workdir: Path, title: str) -> Path | None:
    """Writes ``curves.png``: loss and accuracy, in training and validation.

    Returns:
      Its path; None without metrics, or if it cannot be written, since a missing
      picture must not fail the run.
    """
    metrics = read_metrics(workdir)
    if not metrics:
        return None
    with charts.style():
        figure, axes = charts.figure(1, 2, size=(4.6, 3.2))
        _panel(axes[0, 0], metrics, "loss", 1, "cross-entropy, nats")
        _panel(axes[0, 1], metrics, "accuracy", 100, "accuracy, %")
        figure.suptitle(title, fontsize=11)
        charts.legend(figure, axes)
        file = workdir / "curves.png"
        with contextlib.suppress(OSError):
            with replacing(file) as partial:
                partial.write_bytes(charts.to_png(figure))
            return file
    return None


def _panel(axis: Any, metrics: Any, name: str, unit: float, label: str) -> None:
    lines = []
    for split, words in (("train", "training"), ("valid", "validation")):
        points = [
            (m["step"], unit * m[name])
            for m in metrics
            if m["split"] == split and name in m
        ]
        if points:
            steps, values = zip(*points, strict=True)
            lines.append(charts.Line(words, steps, values))
    charts.draw(axis, lines, xlabel="training step", ylabel=label)
    charts.whole_numbers(axis)
