"""The pictures of ``analyze maps``: matrices, and tokens shaded by what they receive.

A nested expression is drawn as its tree, an image as an image, anything else as its
tokens: characters, words or ids.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lra_jax.analysis.maps import Maps
from lra_jax.reports import charts
from lra_jax.reports.page import Page

_CELLS = 200  # per side of a drawn matrix
_COLUMNS = 64  # characters per line
_MOST_LINES = 40
_LEAST_COLUMNS = 8  # words per line; longer ones are cut
_DOT = "\N{MIDDLE DOT}"  # for what cannot be shown
_RECEIVED = "weight that each token receives (mean over the heads; 1 is an even share)"


def add_maps(page: Page, maps: Maps, saved: Any, title: str) -> None:
    """All pictures for one layer on one example."""
    page.heading(title)
    _add_matrices(page, maps)
    scores = [_Score("received", "share", maps.received.mean(0), _RECEIVED)]
    if maps.competition is not None and maps.allocation is not None:
        _add_flow(page, maps)
        what = "competition of the sources (mean over the heads; 1 is an even share)"
        found = maps.competition.mean(0)
        scores.append(_Score("competition", "share", found, what))
        what = "allocation of the sinks (mean over the heads; 0.73 is an even share)"
        found = maps.allocation.mean(0)
        scores.append(_Score("allocation", "part allocated", found, what))
    for score in scores:
        _add_tokens(page, score, maps, saved)


class _Score(NamedTuple):
    """A number for each token.

    Attributes:
      name: of the picture.
      unit: label of its colours.
      values: `[T]`.
      what: what they are, in words.
    """

    name: str
    unit: str
    values: np.ndarray
    what: str


def _add_matrices(page: Page, maps: Maps) -> None:
    weights = np.stack([_coarse(matrix) for matrix in maps.weights])
    heads = len(weights)
    columns = min(heads, 4)
    rows = -(-heads // columns)
    figure, axes = charts.figure(rows, columns, size=(3.3, 2.9))
    length = maps.weights.shape[-1]
    signed = bool((maps.weights < 0).any())
    scale = charts.colour_scale(weights * length)
    for head, axis in enumerate(axes.ravel()):
        if head >= heads:
            axis.axis("off")
            continue
        charts.image(
            figure,
            axis,
            weights[head] * length,
            "weight times tokens" if head % columns == columns - 1 else "",
            aspect="equal",
            extent=(0.5, length + 0.5, length + 0.5, 0.5),
            norm=scale,
            **({"cmap": "RdGy"} if signed else {}),
        )
        axis.set_title(f"head {head + 1}")
        axis.set_xlabel("from position")
        charts.whole_numbers(axis, "xy")
    for axis in axes[:, 0]:
        axis.set_ylabel("to position")
    caption = (
        f"Attention matrices of layer {maps.layer}, times the number of tokens, so "
        "that 1 is an even share."
    )
    if length > _CELLS:
        caption += f" Means over squares: {len(weights[0])} cells a side are drawn."
    page.figure("map-matrices", figure, caption, {"weights": weights})


def _add_flow(page: Page, maps: Maps) -> None:
    figure, axes = charts.figure(2, 1, size=(8.5, 2.4), sharex=True)
    pairs = {"competition": maps.competition, "allocation": maps.allocation}
    for axis, (name, values) in zip(axes[:, 0], pairs.items(), strict=True):
        lines = [
            charts.Line(f"head {head}", np.arange(1, len(row) + 1), row)
            for head, row in enumerate(values if values is not None else (), 1)
        ]
        charts.draw(axis, lines, ylabel=name)
    axes[1, 0].set_xlabel("position")
    charts.legend(figure, axes)
    caption = (
        "Flow-Attention's conserved flows: how much each source has after the "
        "competition (1 is an even share), and what share of its incoming flow each "
        "sink is allocated (sigmoid(1) = 0.73 where flows are even)."
    )
    page.figure("map-flow", figure, caption, pairs)


def _add_tokens(page: Page, score: _Score, maps: Maps, saved: Any) -> None:
    """The example itself, shaded."""
    shape = saved.dataset.image_shape
    names = saved.dataset.classes or range(saved.dataset.num_classes)
    guess = "" if maps.prediction is None else f", predicted {names[maps.prediction]}"
    about = "" if maps.label is None else f" (label {names[maps.label]}{guess})"
    caption = f"The example{about}, shaded by the {score.what}."
    data = {"values": score.values, "tokens": maps.tokens}
    if shape is not None:
        figure = _image(maps.tokens, score, shape)
    elif saved.task.tree is not None:
        tree = saved.task.tree(maps.tokens)
        figure = _tree(tree, score)
        page.shaded(_greys([f"{word} " for word in tree.text], _seen(score.values)))
    else:
        words = _words(maps.tokens, saved.dataset.decode or saved.task.decode)
        figure = _text(words, score)
        page.shaded(_greys(words, _seen(score.values)))
    page.figure(f"map-{score.name}", figure, caption, data)


def _image(pixels: np.ndarray, score: _Score, shape: tuple[int, int]) -> Any:
    figure, axes = charts.figure(1, 2, size=(3.9, 3.1))
    # A position may be a patch of pixels, as many in a row as in a column.
    patch = math.isqrt(pixels.size // score.values.size)
    values = score.values.reshape(shape[0] // patch, shape[1] // patch)
    values = np.repeat(np.repeat(values, patch, 0), patch, 1)
    panels = (
        ("input", pixels.reshape(shape), "pixel, 0 to 255", "gray"),
        (score.name, values, score.unit, charts.RAMP),
    )
    for axis, (title, shown, label, ramp) in zip(axes[0], panels, strict=True):
        looks: dict[str, Any] = {"aspect": "equal", "cmap": ramp}
        if ramp == "gray":
            looks |= {"vmin": 0, "vmax": 255}
        charts.image(figure, axis, shown, label, **looks)
        axis.set(title=title, xlabel="column")
        charts.whole_numbers(axis, "xy")
    axes[0, 0].set_ylabel("row")
    return figure


def _tree(tree: Any, score: _Score) -> Any:
    """An expression as a tree: operators above their arguments, leaves in order."""
    places, parents, values = tree.places, tree.parents, score.values
    figure, axes = charts.figure(1, 1, size=(9.5, 4.2))
    axis = axes[0, 0]
    for child, parent in parents.items():
        ends = np.array([places[child], places[parent]]).T
        axis.plot(*ends, color="#bbbbbb", linewidth=0.6, zorder=1)
    nodes = sorted(places)
    spots = np.array([places[node] for node in nodes])
    few = len(nodes) <= 120
    edges = {"edgecolors": "#444444", "linewidths": 0.5}
    drawn = axis.scatter(
        *spots.T,
        c=values[nodes],
        cmap=charts.RAMP,
        norm=charts.colour_scale(values),
        s=280 if few else 12,
        zorder=2,
        **edges,
    )
    named = nodes if few else _top(tree)
    if not few:
        spots = np.array([places[node] for node in named])
        colours = {"c": values[named], "norm": drawn.norm, "cmap": drawn.cmap}
        axis.scatter(*spots.T, s=230, zorder=3, **colours, **edges)
    words = [tree.words[node] for node in named]
    charts.letters(axis, drawn, values[named], spots, words)
    axis.set(xlabel="leaf", ylabel="depth")
    charts.whole_numbers(axis, "xy")
    axis.invert_yaxis()
    charts.colour_bar(figure, axis, drawn, score.unit, fraction=0.03, pad=0.01)
    return figure


def _top(tree: Any) -> list[int]:
    """The operators nearest the root: as many whole levels as hold at most 30."""
    inner = sorted({*tree.parents.values()}, key=lambda node: tree.places[node][1])
    depths = [tree.places[node][1] for node in inner]
    last = max((d for n, d in enumerate(depths, 1) if n <= 30), default=0)
    if len(inner) > 30 and depths[30] == last:
        last -= 1
    return [node for node, depth in zip(inner, depths, strict=True) if depth <= last]


def _text(words: Sequence[str], score: _Score) -> Any:
    """Text in lines, each token on a shaded cell."""
    words = [word.strip() or word for word in words]
    longest = max(map(len, words))
    # A cell of a single character has room for two.
    columns = max(2 * _COLUMNS // (longest + 1), _LEAST_COLUMNS)
    shown = min(len(words), columns * _MOST_LINES)
    lines = -(-shown // columns)
    cells = np.full(lines * columns, np.nan)
    cells[:shown] = score.values[:shown]
    figure, axes = charts.figure(1, 1, size=(9.5, 1.4 + 0.24 * lines))
    axis = axes[0, 0]
    looks = {"norm": charts.colour_scale(score.values)}
    matrix = cells.reshape(lines, columns)
    drawn = charts.image(figure, axis, matrix, score.unit, **looks)
    axis.set_facecolor(charts.OUTSIDE)  # After the end of a text.
    places = [(index % columns, index // columns) for index in range(shown)]
    room = 2 * _COLUMNS // columns - 1
    cut = [w if len(w) <= room else f"{w[: room - 3]}..." for w in words[:shown]]
    charts.letters(axis, drawn, score.values[:shown], places, cut)
    kind = "character" if longest == 1 else "token"
    axis.set(xlabel=f"{kind} of a line", ylabel="line")
    charts.whole_numbers(axis, "xy")
    return figure


def _words(tokens: np.ndarray, decode: Callable[[np.ndarray], str]) -> list[str]:
    """The text of each token: a character, a word or an id."""
    found = [decode(tokens[n : n + 1]) for n in range(len(tokens))]
    # Where only the text of them all has the blanks between them.
    blank = " " if decode(tokens) == " ".join(found) else ""
    return [("".join(map(_character, word)) or _DOT) + blank for word in found]


def _greys(words: Sequence[str], values: np.ndarray) -> list[tuple[str, int]]:
    """Every word with its shade of grey: the least is white, the greatest black."""
    span = max(values.max() - values.min(), np.finfo(float).tiny)
    greys = np.rint(255 * (1 - (values - values.min()) / span)).astype(int).tolist()
    return list(zip(words, greys, strict=True))


def _seen(values: np.ndarray) -> np.ndarray:
    """Values on the colour scale of the pictures, from 0 to 1."""
    scale = charts.colour_scale(values)
    return np.asarray(scale(values))


def _character(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isascii() and character.isprintable() else _DOT


def _coarse(matrix: np.ndarray) -> np.ndarray:
    """A matrix of at most 200 cells per side, by means over squares."""
    length = len(matrix)
    if length <= _CELLS:
        return matrix
    edges = np.linspace(0, length, _CELLS + 1).astype(int)
    starts, sizes = edges[:-1], np.diff(edges)
    sums = np.add.reduceat(np.add.reduceat(matrix, starts, 0), starts, 1)
    return sums / np.outer(sizes, sizes)
