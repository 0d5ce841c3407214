"""The picture of the bound in ``analyze rank-collapse``."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from lra_jax import progress
from lra_jax.analysis.bounded_collapse import (
    BoundedCollapse,
    bounded_collapse,
    bounded_model,
)
from lra_jax.reports import charts
from lra_jax.reports.page import Page

NETWORK = "bert"
"""The network in the picture; the others have more than attention by content."""
_LAYERS = 4
_SMALL = 1e-4
_LARGEST = 1e40
_ENDS = (
    "Lines end where rounding may be a hundredth of the residual, and bounds beyond "
    f"{_LARGEST:g} or below its inverse."
)


def add_bound(page: Page, *, length: int, num_layers: int | None, seed: int) -> None:
    """Pure attention in float64, measured and bounded, for two scales of the tokens."""
    layers = _LAYERS if num_layers is None else min(_LAYERS, num_layers)
    run = functools.partial(
        bounded_collapse, NETWORK, length=length, num_layers=layers, seed=seed
    )
    progress.say(f"the bound for {NETWORK}, in float64 ...")
    normal = run(norm=True)
    panels = {
        "tokens as they are": run(),
        "tokens a ten-thousandth as large": run(scale=_SMALL),
    }
    figure, axes = charts.figure(1, len(panels), size=(4.6, 3.6))
    for axis, (title, found) in zip(axes[0], panels.items(), strict=True):
        _draw(axis, title, found, normal if axis is axes[0, 0] else None)
    axes[0, 0].set_ylabel("residual")
    charts.legend(figure, axes)
    beta = panels["tokens as they are"].beta
    caption = (
        "Attention alone, without layer normalisation, of a network of BERT's shape at "
        "initialisation on one sequence of random tokens, computed in float64: "
        "||res(X)|| in the composite norm, and Theorem 2.2 with gamma = 1 and the "
        f"weights' own beta = {beta:.2f}. {_ENDS}"
    )
    page.heading("The bound")
    data = {name: found._asdict() for name, found in panels.items()}
    data["with layer normalisation"] = normal._asdict()
    page.figure("rank-collapse-bound", figure, caption, data)
    rows = [
        (
            layer,
            *(x[layer] for found in panels.values() for x in _columns(found)),
        )
        for layer in range(layers + 1)
    ]
    head = ("measured", "bound", "bound of one layer")
    page.table(("layer", *(f"{x}, {t}" for t in panels for x in head)), rows)


def add_model_bound(page: Page, model: Any, run: Callable[[], Any]) -> None:
    """The same for a model trained here and its first example, where it applies."""
    page.heading("The bound")
    progress.say("the bound for this model, in float64 ...")
    try:
        found = bounded_model(model, run)
    except ValueError as error:
        reason = str(error).removeprefix("model: ")
        page.text(f"Theorem 2.2 does not apply to this model: {reason}.")
        return
    normal = bounded_model(model, run, norm=True)
    figure, axes = charts.figure(1, 1, size=(6, 4))
    _draw(axes[0, 0], "attention alone", found, normal)
    axes[0, 0].set_ylabel("residual")
    charts.legend(figure, axes)
    caption = (
        "The trained model's attention alone on the longest document of the first "
        "example, computed in float64: ||res(X)|| in the composite norm, and Theorem "
        f"2.2 with gamma = 1 and the weights' own beta = {found.beta:.3g}. {_ENDS}"
    )
    data = {
        "without the norm": found._asdict(),
        "with the norm": normal._asdict(),
    }
    page.figure("rank-collapse-bound", figure, caption, data)
    rows = [
        (layer, *(x[layer] for x in (*_columns(found), _measured(normal))))
        for layer in range(len(found.residuals))
    ]
    head = ("measured", "bound", "bound of one layer", "measured, with the norm")
    page.table(("layer", *head), rows)


def _draw(
    axis: Any, title: str, found: BoundedCollapse, normal: BoundedCollapse | None
) -> None:
    """A panel: measured residuals, bounds, and residuals with the norm."""
    count = _above_rounding(found)
    lines = [
        charts.Line("measured", range(count), found.residuals[:count]),
        _bound("bound from the input on", found.bounds),
        # The bound from a residual that is lost in rounding means nothing.
        _bound("bound of one layer, from the measured", found.next_bounds[: count + 1]),
    ]
    if normal is not None:
        count = _above_rounding(normal)
        values = normal.residuals[:count]
        name = "measured, with the norm"
        lines.append(charts.Line(name, range(count), values))
    charts.draw(axis, lines, title=title, xlabel="layer")
    charts.whole_numbers(axis)
    charts.log_scale(axis)


def _columns(found: BoundedCollapse) -> tuple[list[str], ...]:
    """Cells of a table by layer: the measured residual, and the two bounds."""
    count = _above_rounding(found) + 1
    # The bound from a residual that is lost in rounding means nothing.
    one_layer = [
        f"{x:.2g}" if layer < count else "-"
        for layer, x in enumerate(found.next_bounds)
    ]
    return _measured(found), [f"{x:.2g}" for x in found.bounds], one_layer


def _measured(found: BoundedCollapse) -> list[str]:
    count = _above_rounding(found)
    return [
        f"{x:.2g}" if layer < count else "rounding"
        for layer, x in enumerate(found.residuals)
    ]


def _above_rounding(found: BoundedCollapse) -> int:
    """The number of residuals before the first that is lost in rounding."""
    hidden = found.residuals < 100 * found.rounding
    return int(hidden.argmax()) if hidden.any() else len(hidden)


def _bound(name: str, values: np.ndarray) -> charts.Line:
    """A bound up to the first value that is too large or too small to draw."""
    drawn = (values > 1 / _LARGEST) & (values < _LARGEST)
    count = len(values) if drawn.all() else int(drawn.argmin())
    return charts.Line(name, range(count), values[:count])
