"""Where a trained model looks: attention matrices of one example, and what each token
receives; for Flow-Attention also competition and allocation.

A nested expression is drawn as its tree, an image as an image, anything else as its
tokens: characters, words, ids, or the steps of a series or an episode.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lra_jax.analysis.capture import call_of, capture_attention
from lra_jax.attention.flow.flow import flow_terms
from lra_jax.errors import expected
from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Panel, image
from lra_jax.reports.page import Section

_CELLS = 200  # per side of a drawn matrix
_COLUMNS = 64  # characters per line
_NAMES = 28  # of a tree side by side
_MOST_LINES = 40
_LEAST_COLUMNS = 8  # words per line; longer ones are cut
_MOST_KINDS = 24
_DOT = "\N{MIDDLE DOT}"  # for what cannot be shown

_EVEN = "mean over the heads; 1 is an even share"
# By their names in `Maps`: the unit, and the meaning in words.
_SCORES = {
    "received": ("share", f"weight that each token receives ({_EVEN})"),
    "competition": ("share", f"competition of the sources ({_EVEN})"),
    "allocation": (
        "part allocated",
        "allocation of the sinks (mean over the heads; 0.73 is an even share)",
    ),
}


class Maps(NamedTuple):
    """The attention of one layer on one example, without padding.

    Attributes:
      layer: counted from 1.
      weights: `[N, T, T]`, with the class vector first if the model has one.
      scores: `[N, T]` by name. "received": how much each token is attended to, in units
        of an even share: the row of the class vector, or the mean over all rows, in
        absolute values, divided by its mean. In a causal model a token is also divided
        by what it would receive if every token attended evenly to all that it sees, of
        which the first tokens get most. The class vector itself is left out.
        "competition" and "allocation": of Flow-Attention alone.
      tokens: `[T]`, ids, bytes or pixels.
      label, prediction: classes; None if there is one per position.
    """

    layer: int
    weights: np.ndarray
    scores: dict[str, np.ndarray]
    tokens: np.ndarray
    label: int | None = None
    prediction: int | None = None


def shortest(lengths: np.ndarray) -> int:
    """The shortest example of a split, by its lengths `[n]`, or `[n, 2]` of pairs, of
    which the maps show the first document."""
    return int(lengths.reshape(len(lengths), -1)[:, 0].argmin())


def example_maps(saved: Any, batch: Any, layer: int) -> Maps:
    """The maps of the first example of a batch of a
    `lra_jax.training.restore.SavedRun`.

    Raises:
      ValueError: there is no such layer, or its mechanism has no matrix.
    """
    calls = capture_attention(saved.model, lambda: saved.run(batch))
    call = call_of(calls, layer)
    matrix = call.weights()[0].astype(np.float64)
    name, parts = saved.dataset.sequences[0], saved.dataset.step_parts
    length = _length(batch, name) * max(len(parts), 1)
    tokens = batch.get(name, np.arange(length)[None])[0, :length]
    config = saved.model.encoder.config
    per_block = len(calls) // config.num_layers  # Two where a second one is the MLP.
    config = config.at((layer - 1) // per_block)
    # A class vector comes before the tokens, and each position may be a patch of them.
    front, end = int(config.cls_token), config.num_positions(length)
    weights = matrix[:, :end, :end]
    size = np.abs(weights[:, 0] if front else weights.mean(1))[:, front:]
    mean = size.mean(-1, keepdims=True)
    received = size / np.where(mean == 0, 1, mean)
    if config.is_causal:
        documents = batch.get("segment_ids", np.ones((1, length), int))
        received = received / even_shares(np.asarray(documents)[0, :length])
    scores = {"received": received}
    if call.mechanism.name == "flow":
        terms = flow_terms(call.query, call.key, **call.keywords)
        for name in ("competition", "allocation"):
            scores[name] = np.asarray(getattr(terms, name))[0, front:end].T
    classes: dict[str, Any] = {}
    labels = batch.get("labels", np.zeros((1, 0)))
    if labels.ndim == 1 and labels.dtype.kind != "f":
        arrays = (jnp.asarray(batch[name]) for name in saved.model.INPUTS)
        classes["label"] = int(labels[0])
        classes["prediction"] = int(saved.model(*arrays)[0].argmax())
    return Maps(layer, weights, scores, tokens, **classes)


def even_shares(documents: np.ndarray) -> np.ndarray:
    """The shares `[T]`, on average 1, that the tokens of a causal model would receive
    if each attended evenly to those of its document that it sees."""
    mask = np.tril(documents[:, None] == documents[None])
    received = (mask / mask.sum(1, keepdims=True)).mean(0)
    return received / received.mean()


def _length(batch: Any, name: str) -> int:
    """The number of real tokens of the first example, or of all texts in its row."""
    if "segment_ids" in batch:
        return int((batch["segment_ids"][0] > 0).sum())
    return int(batch[name.replace("tokens", "lengths", 1)][0])


def maps_section(maps: Maps, saved: Any, title: str) -> Section:
    """The matrices of one layer, and the example shaded by what its tokens receive."""
    parts = [_matrices(maps)]
    flows = {name: x for name, x in maps.scores.items() if name != "received"}
    if flows:
        parts.append(draw_flows(flows, _kinds(maps, saved)))
    for name, values in maps.scores.items():
        parts.append(_example(name, values.mean(0), maps, saved))
    return Section(title, parts)


def _kinds(maps: Maps, saved: Any) -> list[str]:
    """The kind of each position; those of an image or of a series are its thirds."""
    size, parts = maps.scores["received"].shape[-1], saved.dataset.step_parts
    if len(parts) > 1:
        return list(itertools.islice(itertools.cycle(parts), size))
    if saved.dataset.image_shape is None and not parts:
        return token_kinds(_words(maps, saved))
    ends = ("first", "last") if parts else ("upper", "lower")
    thirds = f"{ends[0]} third", "middle", f"{ends[1]} third"
    return [thirds[number * 3 // size] for number in range(size)]


def _words(maps: Maps, saved: Any) -> list[str]:
    parts = saved.dataset.step_parts
    if not parts:
        return split_words(maps.tokens, saved.dataset.decode or saved.task.decode)
    steps = range(maps.scores["received"].shape[-1])
    return [f"{parts[n % len(parts)]} {n // len(parts)}" for n in steps]


def _matrices(maps: Maps) -> Chart:
    length = maps.weights.shape[-1]
    weights = np.stack([_shrink(matrix) for matrix in maps.weights])
    heads, columns = len(weights), min(len(weights), 4)
    ramp = "RdGy" if (maps.weights < 0).any() else charts.RAMP
    looks = {
        "aspect": "equal",
        "cmap": ramp,
        "extent": (0.5, length + 0.5, length + 0.5, 0.5),
        "norm": charts.colour_scale(weights * length),
    }

    def panel(head: int) -> Panel:
        """The matrix of a head; the last in a row has the label of the colours."""
        label = "weight times tokens" if head % columns == columns - 1 else ""
        settings = {"title": f"head {head + 1}", "xlabel": "from position"}
        return image(weights[head] * length, label, settings, **looks)

    caption = (
        f"Attention matrices of layer {maps.layer}, times the number of tokens, so "
        "that 1 is an even share."
    )
    if length > _CELLS:
        caption += f" Means over squares: {len(weights[0])} cells a side are drawn."
    return Chart(
        "map-matrices",
        [panel(head) for head in range(heads)],
        caption,
        data={"weights": weights},
        columns=columns,
        size=(3.3, 2.9),
        ylabels=["to position"] * -(-heads // columns),
    )


def draw_flows(flows: Mapping[str, np.ndarray], kinds: Sequence[str]) -> Chart:
    """Flow-Attention's flows `[N, T]` of the tokens, grouped by their kinds `[T]`."""
    groups = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in {*kinds}}
    first = next(iter(flows.values())).mean(0)
    names = sorted(groups, key=lambda kind: first[groups[kind]].mean())
    order = np.array([names.index(kind) for kind in kinds])

    def panel(values: np.ndarray) -> Panel:
        def draw(_: Figure, axis: Axes) -> None:
            """A dot for each token, and the mean of its kind."""
            for head, row in enumerate(values):
                looks: Any = charts.line_style(head) | {"linestyle": ""}
                places = 0.6 * (head - (len(values) - 1) / 2) / len(values)
                colour = looks["color"]
                axis.plot(order + places, row, ".", alpha=0.25, color=colour)
                means = [row[groups[kind]].mean() for kind in names]
                x = np.arange(len(names)) + places
                axis.plot(x, means, label=f"mean of head {head + 1}", **looks)
            axis.set_xticks(range(len(names)), names)

        return Panel((), draw)

    caption = (
        "Flow-Attention's conserved flows by kind of token: how much each source has "
        "after the competition (1 is an even share), and what share of its incoming "
        "flow each sink is allocated (sigmoid(1) = 0.73 where flows are even)."
    )
    return Chart(
        "map-flow",
        [panel(values) for values in flows.values()],
        caption,
        data={**flows, "kinds": list(kinds)},
        columns=1,
        size=(8.5, 2.4),
        ylabels=[*flows],
        layout={"sharex": True},
    )


def token_kinds(words: Sequence[str]) -> list[str]:
    """The words themselves if they are few, otherwise what they are made of."""
    if len({*words}) <= _MOST_KINDS:
        return list(words)
    tests = {"letters": str.isalpha, "numbers": str.isdigit, "blanks": str.isspace}
    return [
        next((kind for kind, holds in tests.items() if holds(word)), "others")
        for word in words
    ]


def _example(name: str, values: np.ndarray, maps: Maps, saved: Any) -> Chart:
    """The example itself, shaded by the values `[T]` of a score."""
    shape = saved.dataset.image_shape
    names = saved.dataset.classes or range(saved.dataset.num_classes)
    guess = "" if maps.prediction is None else f", predicted {names[maps.prediction]}"
    about = "" if maps.label is None else f" (label {names[maps.label]}{guess})"
    if shape is not None:
        chart = draw_image(maps.tokens, shape, name, values)
    elif saved.task.tree is not None:
        chart = draw_tree(saved.task.tree(maps.tokens), name, values)
    else:
        chart = draw_text(_words(maps, saved), name, values)
    caption = f"The example{about}, shaded by the {_SCORES[name][1]}."
    data = {"values": values, "tokens": maps.tokens}
    return chart._replace(caption=caption, data=data)


def draw_image(
    pixels: np.ndarray, shape: tuple[int, int], name: str, values: np.ndarray
) -> Chart:
    """The image, and beside it a score of its positions."""
    panels = [_input(pixels, shape), _scores(name, values, shape, _SCORES[name][0])]
    return Chart(f"map-{name}", panels, "", size=(3.9, 3.1), ylabels=["row"])


def _input(pixels: np.ndarray, shape: tuple[int, int]) -> Panel:
    """An image `[T]`, or `[T, 3]` in colour."""
    pixels = pixels.reshape(*shape, *pixels.shape[1:])
    settings = {"title": "input", "xlabel": "column"}
    if pixels.ndim == 2:
        return image(
            pixels,
            "pixel, 0 to 255",
            settings,
            aspect="equal",
            cmap="gray",
            vmin=0,
            vmax=255,
        )

    def draw(figure: Figure, axis: Axes) -> None:
        axis.grid(False)
        axis.imshow(pixels)

    return Panel(draw=draw, integers="xy", settings=settings)


def _scores(title: str, values: np.ndarray, shape: tuple[int, int], unit: str) -> Panel:
    """A number for each position, over the rows and columns of the image."""
    # A position may be a patch of pixels, as many in a row as in a column.
    patch = math.isqrt(shape[0] * shape[1] // values.size)
    values = values.reshape(shape[0] // patch, shape[1] // patch)
    values = np.repeat(np.repeat(values, patch, 0), patch, 1)
    settings = {"title": title, "xlabel": "column"}
    return image(values, unit, settings, aspect="equal")


def side_by_side(runs: Sequence[tuple[Maps, Any]], title: str) -> Section:
    """One image, and what its positions receive in each of several runs: the maps of
    the example, and its `lra_jax.training.restore.SavedRun`."""
    datasets = [saved.dataset for _, saved in runs]
    if len({dataset.fingerprint for dataset in datasets}) > 1:
        raise expected("--workdir", "runs on the same data", "others")
    if datasets[0].image_shape is None:
        raise expected("--workdir", "one run, or several on images", len(runs))
    shape, names = datasets[0].image_shape, []
    for _, saved in runs:
        options = saved.config.model.attention_options
        names.append(" ".join(filter(None, (saved.config.mixers, options))))
    unit, meaning = _SCORES["received"]
    shares = [maps.scores["received"].mean(0) for maps, _ in runs]
    panels = [_input(runs[0][0].tokens, shape)]
    panels += [_scores(*pair, shape, unit) for pair in zip(names, shares, strict=True)]
    caption = f"The same image in {len(runs)} runs, shaded by the {meaning}."
    data = {"names": names, "values": shares, "tokens": runs[0][0].tokens}
    rows = {"columns": 3, "ylabels": ["row"] * -(-len(panels) // 3)}
    chart = Chart("map-runs", panels, caption, data=data, size=(3.2, 2.6), **rows)
    return Section(title, [chart])


def draw_tree(tree: Any, name: str, values: np.ndarray) -> Chart:
    """An expression as a tree: operators above their arguments, leaves in order."""
    places, unit = tree.places, _SCORES[name][0]
    nodes = sorted(places)
    named = _apart(nodes if len(nodes) <= 120 else _top(tree), places)
    looks: dict[str, Any] = {
        "cmap": charts.RAMP,
        "norm": charts.colour_scale(values),
        "edgecolors": "#444444",
        "linewidths": 0.5,
    }

    def scatter(axis: Axes, nodes: Sequence[int], size: int, zorder: int) -> Any:
        """Dots of one size at some nodes."""
        spots = np.array([places[node] for node in nodes]).T
        shades = {"c": values[nodes], "s": size, "zorder": zorder}
        return axis.scatter(*spots, **shades, **looks)

    def draw(figure: Figure, axis: Axes) -> None:
        """Edges, nodes, and the words of those that are named."""
        for child, parent in tree.parents.items():
            ends = np.array([places[child], places[parent]]).T
            axis.plot(*ends, color="#bbbbbb", linewidth=0.6, zorder=1)
        drawn = scatter(axis, nodes, 12, 2)
        scatter(axis, named, 230, 3)
        spots = [places[node] for node in named]
        words = [tree.words[node] for node in named]
        charts.letters(axis, drawn, values[named], spots, words)
        axis.invert_yaxis()
        charts.colour_bar(figure, axis, drawn, unit, fraction=0.03, pad=0.01)

    panel = Panel((), draw, integers="xy", settings={"xlabel": "leaf"})
    return Chart(f"map-{name}", [panel], "", size=(9.5, 4.2), ylabels=["depth"])


def _apart(nodes: Sequence[int], places: Mapping[int, Any]) -> list[int]:
    """Those of the nodes whose names do not collide, the first ones."""
    room = max(x for x, _ in places.values()) / _NAMES
    apart: list[int] = []
    for node in nodes:
        x, depth = places[node]
        if all(places[n][1] != depth or abs(places[n][0] - x) > room for n in apart):
            apart.append(node)
    return apart


def _top(tree: Any) -> list[int]:
    """The operators nearest the root: as many whole levels as hold at most 30."""
    inner = sorted({*tree.parents.values()}, key=lambda node: tree.places[node][1])
    depths = [tree.places[node][1] for node in inner]
    last = max((d for n, d in enumerate(depths, 1) if n <= 30), default=0)
    if len(inner) > 30 and depths[30] == last:
        last -= 1
    return [node for node, depth in zip(inner, depths, strict=True) if depth <= last]


def draw_text(words: Sequence[str], name: str, values: np.ndarray) -> Chart:
    """Text in lines, each token on a shaded cell."""
    longest = max(map(len, words))
    # A cell of a single character has room for two.
    columns = max(2 * _COLUMNS // (longest + 1), _LEAST_COLUMNS)
    count = min(len(words), columns * _MOST_LINES)
    lines = -(-count // columns)
    cells = np.full(lines * columns, np.nan)
    cells[:count] = values[:count]
    room = 2 * _COLUMNS // columns - 1
    cut = [w if len(w) <= room else f"{w[: room - 3]}..." for w in words[:count]]

    matrix, unit = cells.reshape(lines, columns), _SCORES[name][0]
    scale = charts.colour_scale(values)

    def draw(figure: Figure, axis: Axes) -> None:
        """Shades, and the words on them."""
        drawn = charts.draw_image(figure, axis, matrix, unit, norm=scale)
        axis.set_facecolor(charts.OUTSIDE)  # After the end of a text.
        places = [(index % columns, index // columns) for index in range(count)]
        charts.letters(axis, drawn, values[:count], places, cut)

    kind = "character" if longest == 1 else "token"
    panel = Panel((), draw, integers="xy", settings={"xlabel": f"{kind} of a line"})
    size = (9.5, 1.4 + 0.24 * lines)
    return Chart(f"map-{name}", [panel], "", size=size, ylabels=["line"])


def split_words(tokens: np.ndarray, decode: Callable[[np.ndarray], str]) -> list[str]:
    """The text of each token: a character, a word or an id."""
    texts = (decode(tokens[n : n + 1]) for n in range(len(tokens)))
    words = ["".join(map(_character, text)) for text in texts]
    return [word.strip() or word or _DOT for word in words]


def _character(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isascii() and character.isprintable() else _DOT


def _shrink(matrix: np.ndarray) -> np.ndarray:
    """A matrix of at most 200 cells per side, by means over squares."""
    length = len(matrix)
    if length <= _CELLS:
        return matrix
    edges = np.linspace(0, length, _CELLS + 1).astype(int)
    starts, sizes = edges[:-1], np.diff(edges)
    sums = np.add.reduceat(np.add.reduceat(matrix, starts, 0), starts, 1)
    return sums / np.outer(sizes, sizes)
