"""The pictures of ``analyze maps``: matrices, and tokens shaded by what they receive.

A nested expression is drawn as its tree, an image as an image, anything else as its
characters.
"""

import html
from typing import Any

import numpy as np

from lra_jax import plotting
from lra_jax.analysis.maps import Maps
from lra_jax.analysis.report import Report

__all__ = ["add_maps"]

_CELLS = 200  # of a drawn matrix, a side
_COLUMNS = 64  # characters a line
_MOST_LINES = 40
_RECEIVED = (
    "weight that a token receives, means over the heads, in units of an even share"
)


def add_maps(report: Report, maps: Maps, saved: Any, title: str) -> None:
    """All pictures of one layer on one example."""
    report.heading(title)
    _add_matrices(report, maps)
    scores = {"received": (maps.received.mean(0), _RECEIVED)}
    if maps.competition is not None and maps.allocation is not None:
        _add_flow(report, maps)
        scores["competition"] = (
            maps.competition.mean(0),
            "competition of the sources, means over the heads; 1 is an even share",
        )
        scores["allocation"] = (
            maps.allocation.mean(0),
            "allocation of the sinks, means over the heads; 0.73 is an even share",
        )
    for name, (values, what) in scores.items():
        _add_tokens(report, f"map-{name}", values, what, maps, saved)


def _add_matrices(report: Report, maps: Maps) -> None:
    weights = np.stack([_coarse(matrix) for matrix in maps.weights])
    heads = len(weights)
    columns = min(heads, 4)
    rows = -(-heads // columns)
    figure, axes = plotting.figure(rows, columns, size=(3.3, 2.9))
    length = maps.weights.shape[-1]
    signed = bool((maps.weights < 0).any())
    limit = np.abs(weights).max() * length
    for head, axis in enumerate(axes.ravel()):
        if head >= heads:
            axis.axis("off")
            continue
        plotting.image(
            figure,
            axis,
            weights[head] * length,
            "weight times tokens" if head % columns == columns - 1 else "",
            aspect="equal",
            extent=(0.5, length + 0.5, length + 0.5, 0.5),
            vmin=-limit if signed else 0,
            vmax=limit,
            **({"cmap": "RdGy"} if signed else {}),
        )
        axis.set_title(f"head {head + 1}")
        axis.set_xlabel("from position")
    for axis in axes[:, 0]:
        axis.set_ylabel("to position")
    caption = (
        f"Attention matrices of layer {maps.layer}, times the number of tokens, so "
        "that 1 is an even share."
    )
    if length > _CELLS:
        caption += f" Means over squares: {len(weights[0])} cells a side are drawn."
    report.figure("map-matrices", figure, caption, {"weights": weights})


def _add_flow(report: Report, maps: Maps) -> None:
    figure, axes = plotting.figure(2, 1, size=(6.8, 1.9), sharex=True)
    pairs = (("competition", maps.competition), ("allocation", maps.allocation))
    for axis, (name, values) in zip(axes[:, 0], pairs, strict=True):
        for head, row in enumerate(values if values is not None else ()):
            style = plotting.line_style(head) | {"marker": "", "linewidth": 0.9}
            axis.plot(
                np.arange(1, len(row) + 1), row, label=f"head {head + 1}", **style
            )
        axis.set_ylabel(name)
    axes[1, 0].set_xlabel("position")
    plotting.shared_legend(figure, axes[0, 0], columns=8)
    caption = (
        "Flow-Attention's conserved flows: how much each source has after the "
        "competition (1 is an even share), and which part of its incoming flow each "
        "sink is allocated (sigmoid(1) = 0.73 where flows are even)."
    )
    data = {name: values for name, values in pairs}
    report.figure("map-flow", figure, caption, data)


def _add_tokens(
    report: Report, name: str, values: np.ndarray, what: str, maps: Maps, saved: Any
) -> None:
    """The example itself, shaded."""
    shape = saved.dataset.image_shape
    caption = f"The example (label {maps.label}), shaded by the {what}."
    data = {"values": values, "tokens": maps.tokens}
    if shape is not None:
        figure = _image(maps.tokens, values, shape)
    elif saved.task.tree is not None:
        figure = _tree(saved.task.tree(maps.tokens), values)
    else:
        figure = _characters(maps.tokens, values)
        report.markup(_highlighted(maps.tokens, values))
    report.figure(name, figure, caption, data)


def _image(pixels: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> Any:
    figure, axes = plotting.figure(1, 2, size=(3.1, 2.7))
    plotting.image(
        figure, axes[0, 0], pixels.reshape(shape), "pixel, 0 to 255", cmap="gray"
    )
    plotting.image(figure, axes[0, 1], values.reshape(shape), "share")
    for axis, title in zip(axes[0], ("input", "attention"), strict=True):
        axis.set_aspect("equal")
        axis.set_title(title)
        axis.set_xlabel("column")
    axes[0, 0].set_ylabel("row")
    return figure


def _tree(tree: Any, values: np.ndarray) -> Any:
    """An expression as a tree: operators above their arguments, leaves in order."""
    places, parents = tree.places, tree.parents
    figure, axes = plotting.figure(1, 1, size=(9.5, 4.2))
    axis = axes[0, 0]
    for child, parent in parents.items():
        ends = np.array([places[child], places[parent]]).T
        axis.plot(*ends, color="#bbbbbb", linewidth=0.6, zorder=1)
    nodes = sorted(places)
    x, y = np.array([places[node] for node in nodes]).T
    few = len(nodes) <= 120
    drawn = axis.scatter(
        x,
        y,
        c=values[nodes],
        cmap=plotting.RAMP,
        vmin=values.min(),
        vmax=values.max(),
        s=190 if few else 12,
        edgecolors="#444444",
        linewidths=0.5,
        zorder=2,
    )
    middle = (values.min() + values.max()) / 2
    for node in nodes if few else ():
        colour = "white" if values[node] > middle else "black"
        axis.annotate(
            tree.words[node],
            places[node],
            ha="center",
            va="center",
            fontsize=6,
            color=colour,
        )
    axis.set_ylabel("depth")
    axis.set_xlabel("leaf")
    plotting.whole_numbers(axis, "x")
    plotting.whole_numbers(axis, "y")
    axis.invert_yaxis()
    figure.colorbar(drawn, ax=axis, label="share", fraction=0.03, pad=0.01)
    return figure


def _characters(tokens: np.ndarray, values: np.ndarray) -> Any:
    """Text in lines, each character on a shaded cell."""
    shown = min(len(tokens), _COLUMNS * _MOST_LINES)
    lines = -(-shown // _COLUMNS)
    cells = np.full(lines * _COLUMNS, np.nan)
    cells[:shown] = values[:shown]
    figure, axes = plotting.figure(1, 1, size=(9.5, 0.7 + 0.24 * lines))
    axis = axes[0, 0]
    plotting.image(figure, axis, cells.reshape(lines, _COLUMNS), "share")
    middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
    for index in range(shown):
        colour = "white" if values[index] > middle else "black"
        place = (index % _COLUMNS, index // _COLUMNS)
        character = _character(int(tokens[index])).replace("$", r"\$")
        axis.annotate(
            character, place, ha="center", va="center", fontsize=6, color=colour
        )
    axis.set_xlabel("character of a line")
    axis.set_ylabel("line")
    return figure


def _highlighted(tokens: np.ndarray, values: np.ndarray) -> str:
    """The same as HTML, the whole text of it."""
    low, high = values.min(), values.max()
    parts = []
    for token, value in zip(tokens, values, strict=True):
        dark = (value - low) / (high - low) if high > low else 0.0
        grey, colour = round(255 * (1 - dark)), "#fff" if dark > 0.5 else "#000"
        parts.append(
            f'<span style="background:rgb({grey},{grey},{grey});color:{colour}">'
            f"{html.escape(_character(int(token)))}</span>"
        )
    return f'<p class="text">{"".join(parts)}</p>'


def _character(token: int) -> str:
    character = chr(token)
    if token in (9, 10, 13, 32):
        return " "
    return (
        character
        if character.isascii() and character.isprintable()
        else "\N{MIDDLE DOT}"
    )


def _coarse(matrix: np.ndarray) -> np.ndarray:
    """A matrix of at most 200 cells a side, by means over squares."""
    length = len(matrix)
    if length <= _CELLS:
        return matrix
    edges = np.linspace(0, length, _CELLS + 1).astype(int)
    starts, sizes = edges[:-1], np.diff(edges)
    sums = np.add.reduceat(np.add.reduceat(matrix, starts, 0), starts, 1)
    return sums / np.outer(sizes, sizes)
