"""The circle: a recurrent layer learns to step along it, and is then rolled out
(Dong, Cordonnier and Loukas 2021, Figure 6).

A sequence is two points half a circle apart; the target is the next two points. After
training the layer runs on its own output. If the two points converge to one place, the
rank has collapsed; with some seeds they do without a skip connection around the layer,
with none of ten with it (results/analysis/paths/).

As in the published code, the layer has its own skip connection around attention in
every variant; the variants differ in one around the whole layer. In training that
connection adds the *previous batch*, not the output of the previous step; the roll-out
adds the correct one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lra_jax import progress
from lra_jax.analysis.path_network import PathNetwork, PathSettings, fit_epochs
from lra_jax.analysis.path_tasks import circle
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel
from lra_jax.reports.page import Section
from lra_jax.reports.table import Table

# As in the published command; batches are in circle order.
_WIDTH, _HEADS, _DROPOUT = 32, 2, 0.1
_POINTS, _EPOCHS, _BATCH_SIZE = 1000, 70, 30
_STEPS = 300  # of the roll-out
_MERGED = 1e-3  # two points nearer than this, on a circle of radius 0.3, are one
# The published learning rate, and one at which the layer learns more.
_LEARNING_RATES = {"circle": 1e-5, "circle-trained": 1e-3}
_VARIANTS = {
    "attention": {"skip": False, "mlp": False},
    "attention + skip": {"skip": True, "mlp": False},
    "attention + MLP": {"skip": False, "mlp": True},
}


class CircleRun(NamedTuple):
    """Attributes: `trajectory`, `[steps, 2, 2]`: step, point, coordinate; `losses`, the
    mean squared error of a step, summed over a sequence, by epoch."""

    trajectory: np.ndarray
    losses: np.ndarray

    @property
    def spread(self) -> np.ndarray:
        """Distance between the two points at each step."""
        return np.linalg.norm(self.trajectory[:, 0] - self.trajectory[:, 1], axis=-1)


def run_circle(
    *,
    skip: bool,
    mlp: bool,
    learning_rate: float = 1e-5,
    mechanism: str = "softmax",
    seed: int = 0,
) -> CircleRun:
    """Trains one layer with Adam and rolls it out.

    Args:
      skip: add a skip connection around the layer.
      mlp: add an MLP.
      learning_rate: the published one by default.
      mechanism: attention of the layer.
      seed: of weights and dropout.
    """
    shape = PathSettings(
        _WIDTH, num_layers=1, num_heads=_HEADS, num_outputs=2, mlp=mlp, dropout=_DROPOUT
    )
    model = PathNetwork(shape, mechanism, rngs=nnx.Rngs(seed))
    points, half = circle(_POINTS), _POINTS // 2
    here = np.stack([points[: half - 1], points[half - 1 : -2]], 1)
    there = np.stack([points[1:half], points[half:-1]], 1)
    # The published code adds the previous batch to each batch.
    before = np.concatenate([np.zeros_like(here[:_BATCH_SIZE]), here])[: len(here)]

    def loss(model: Any, inputs: Any, targets: Any, rngs: nnx.Rngs) -> jax.Array:
        """The squared error, summed over a batch."""
        return jnp.sum((model(inputs, None, rngs) - targets) ** 2)

    data = (here + before if skip else here, there)
    optimizer = optax.adam(learning_rate)
    losses = fit_epochs(model, loss, data, _BATCH_SIZE, optimizer, _EPOCHS, seed)
    graph, params = nnx.split(model)

    def step(x: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        """The next input, and the output for this one."""
        out = nnx.merge(graph, params)(x)
        return (x + out if skip else out), out

    start = jnp.asarray(here[:1])
    _, outs = jax.lax.scan(step, start, None, length=_STEPS - 1)
    trajectory = np.concatenate([start, outs[:, 0]])
    return CircleRun(trajectory, losses / _BATCH_SIZE)


def circles_section(mechanism: str, seeds: Sequence[int]) -> Section:
    """The three variants, with the published learning rate and with a larger one."""
    parts: list[Any] = []
    clock = progress.Clock(
        "roll-outs", len(_LEARNING_RATES) * len(_VARIANTS) * len(seeds)
    )
    for name, rate in _LEARNING_RATES.items():
        runs: dict[str, list[CircleRun]] = {variant: [] for variant in _VARIANTS}
        for variant, switches in _VARIANTS.items():
            for seed in seeds:
                settings: Any = {"mechanism": mechanism, "seed": seed}
                run = run_circle(**switches, learning_rate=rate, **settings)
                runs[variant].append(run)
                clock.tick()
        about = f"Trained for {_EPOCHS} epochs at {rate:g}."
        parts += [_chart(name, runs, about), _table(runs)]
    return Section("The circle: do two tokens run together?", parts)


def _chart(name: str, runs: Mapping[str, Sequence[CircleRun]], about: str) -> Chart:
    """Roll-outs of the first seed in the plane, and the distance of their points."""
    spreads = {
        variant: np.stack([x.spread for x in xs]) for variant, xs in runs.items()
    }
    steps, lines = range(_STEPS), []
    for variant, spread in spreads.items():
        shown = np.maximum(spread, 1e-8)
        faint = [(steps, y) for y in shown] if len(shown) > 1 else []
        lines.append(charts.Line(variant, steps, np.median(shown, 0), faint=faint))
    settings = {"title": "distance of the two points", "xlabel": "step of the roll-out"}
    distances = Panel(lines, is_log=True, settings=settings)
    data = {
        variant: {
            "trajectory": xs[0].trajectory,
            "losses": np.stack([x.losses for x in xs]),
            "distance": spreads[variant],
        }
        for variant, xs in runs.items()
    }
    return Chart(
        name,
        [*(_plane(variant, xs[0]) for variant, xs in runs.items()), distances],
        "One recurrent layer that learned to step along a circle, run on its own "
        "output. Stars: where the points of the first seed end. Right: the median of "
        "all seeds, which are faint, cut off at 1e-8. "
        f"{about}",
        data=data,
        size=(3.3, 3.3),
        ylabels=["y"],
    )


def _table(runs: Mapping[str, Sequence[CircleRun]]) -> Table:
    """Median, least and largest of the seeds."""
    steps = (0, 10, 100, _STEPS - 1)

    def cell(values: Sequence[float], form: str = ".3g") -> str:
        low, middle, high = np.quantile(values, (0, 0.5, 1))
        text = f"{middle:{form}}"
        return text if low == high else f"{text} ({low:{form}} to {high:{form}})"

    rows = []
    for variant, xs in runs.items():
        far = [cell([x.spread[step] for x in xs]) for step in steps]
        merged = sum(x.spread[-1] < _MERGED for x in xs)
        loss = cell([x.losses[-1] for x in xs], ".2g")
        rows.append((variant, loss, *far, f"{merged} of {len(xs)}"))
    heads = (f"distance, step {step}" for step in steps)
    return Table(("parts", "training loss", *heads, "seeds that merge"), rows)


def _plane(title: str, run: CircleRun) -> Panel:
    """The two points of a roll-out, and the circle."""

    def draw(_: Figure, axis: Axes) -> None:
        """Dots, and stars where they end."""
        angles = np.linspace(0, 2 * np.pi, 200)
        x, y = 0.3 * np.cos(angles), 0.3 * np.sin(angles)
        axis.plot(x, y, color="#bbbbbb", linewidth=1)
        for point, marker in enumerate("os"):
            looks = charts.line_style(point) | {"linestyle": "", "markersize": 2.5}
            looks |= {"marker": marker, "label": f"point {point + 1}"}
            looks["markerfacecolor"] = looks["color"]
            axis.plot(*run.trajectory[:, point].T, **looks)
            axis.plot(*run.trajectory[-1, point], "*", color="black", markersize=9)

    limit = max(0.36, 1.1 * float(np.abs(run.trajectory).max()))
    ends = (-limit, limit)
    settings = {"title": title, "aspect": "equal", "xlabel": "x"}
    return Panel((), draw, settings=settings | {"xlim": ends, "ylim": ends})
