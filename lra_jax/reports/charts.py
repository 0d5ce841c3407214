"""Pictures as data, drawn in one style: a `Chart` of `Panel`s of `Line`s.

It is readable in print, in grey and for colour-blind readers. Lines differ in colour,
marker and dashes. Earlier ones are thicker and have larger, hollow markers, so that
overlapping lines remain visible. Legends are outside the plot area; axes of lengths are
logarithmic with powers of two.

matplotlib takes half a second to import, so only code that draws imports this module.
No screen is needed.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize, SymLogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from lra_jax.files import replacing

RAMP = "Greys"
"""The colour map of matrices: light means low."""
OUTSIDE = "#cfe2f3"
"""The colour of cells without a value, unlike that of any value."""

# The palette of Okabe and Ito (https://jfly.uni-koeln.de/color/) without its yellow,
# which is barely visible on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#56b4e9", "#e69f00")
COLOURS = len(_COLOURS)
"""Number of lines with different colours."""
_MARKERS = "os^DvPX<>*"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MOST_MARKERS = 12  # per line
_MANY = 200  # points from which a line is drawn thin
_MOST_NAMES = 9  # labelled lengths on an axis

_STYLE: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.titlesize": 11,
    "font.size": 10,
    "grid.color": "gainsboro",
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "legend.handlelength": 3,
    "savefig.dpi": 150,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}


class Line(NamedTuple):
    """One line of a panel.

    Attributes:
      label: label in the legend.
      x, y: `[points]`.
      spread: `[points]`, shaded above and below.
      faint: further lines ``(x, y)`` of the same colour, for example of single seeds.
      published: values at the first of `x`, as crosses.
      style: its number, see `line_style`; by default its index in the panel.
    """

    label: str
    x: Any
    y: Any
    spread: Any = None
    faint: Sequence[tuple[Any, Any]] = ()
    published: Sequence[float] = ()
    style: int | None = None


class Panel(NamedTuple):
    """One set of axes.

    Attributes:
      lines: in the order of the legend.
      draw: draws whatever is neither a line nor a setting.
      integers: axes with ticks at integers only: "", "x", "y" or "xy".
      is_log: the y axis is logarithmic.
      lengths: ticks of a logarithmic x axis; () = a linear one.
      settings: of ``Axes.set``.
      legend: it has its own, to its right; the others then have none.
    """

    lines: Sequence[Line] = ()
    draw: Callable[[Figure, Axes], Any] | None = None
    integers: str = ""
    is_log: bool = False
    lengths: Sequence[int] = ()
    settings: Mapping[str, Any] = {}
    legend: bool = False


class Chart(NamedTuple):
    """A picture, with one legend for all panels.

    Attributes:
      name: of its files.
      panels: row by row; the last row may be shorter.
      caption: below the picture.
      data: its numbers; None = none are written.
      columns: panels in a row; None = all.
      size: of a panel, in inches.
      ylabels: of the first panel of each row; () = none beyond the settings.
      layout: further keywords of ``Figure.subplots``, such as ``sharex``.
      title: above the panels.
    """

    name: str
    panels: Sequence[Panel]
    caption: str = ""
    data: Any = None
    columns: int | None = None
    size: tuple[float, float] = (3.6, 3.4)
    ylabels: Sequence[str] = ()
    layout: Mapping[str, Any] = {}
    title: str = ""

    @matplotlib.rc_context(_STYLE)
    def draw(self) -> Figure:
        """The figure."""
        columns = self.columns or max(len(self.panels), 1)
        rows = max(-(-len(self.panels) // columns), 1)
        figure = Figure(figsize=(columns * self.size[0], rows * self.size[1]))
        axes = figure.subplots(rows, columns, squeeze=False, **self.layout)
        pairs = list(zip(axes.ravel(), self.panels, strict=False))
        for axis in axes.ravel()[len(pairs) :]:
            axis.axis("off")
        for axis, panel in pairs:
            draw_lines(axis, panel.lines)
            if panel.draw is not None:
                panel.draw(figure, axis)
        # Scales and limits follow from the lines of all panels that share an axis.
        for axis, panel in pairs:
            _finish(axis, panel)
        for axis, label in zip(axes[:, 0], self.ylabels, strict=False):
            axis.set_ylabel(label)
        if self.title:
            figure.suptitle(self.title)
        if not any(panel.legend for panel in self.panels):
            _add_legend(figure, axes)
        return figure

    @property
    def width(self) -> int:
        """In pixels, as on a page."""
        return round(100 * self.size[0] * (self.columns or len(self.panels)))

    @matplotlib.rc_context(_STYLE)
    def png(self) -> bytes:
        """The picture, without a timestamp."""
        file = io.BytesIO()
        self.draw().savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()

    def save(self, file: Path) -> bytes:
        """Writes the picture, and returns it."""
        picture = self.png()
        with replacing(file) as partial:
            partial.write_bytes(picture)
        return picture


def image(
    values: np.ndarray, label: str, settings: Mapping[str, Any], **looks: Any
) -> Panel:
    """A panel with a matrix and its colour bar; see `draw_image`."""

    def draw(figure: Figure, axis: Axes) -> None:
        draw_image(figure, axis, values, label, **looks)

    return Panel(draw=draw, integers="xy", settings=settings)


def heat_map(
    cells: Any,
    rows: Sequence[str],
    columns: Sequence[str],
    label: str = "accuracy, %",
    settings: Mapping[str, Any] = {},
) -> Panel:
    """A panel of percentages `[rows, columns]` as shades with numbers; NaN leaves a
    cell empty."""
    matrix = np.asarray(cells)

    def draw(figure: Figure, axis: Axes) -> None:
        drawn = draw_image(figure, axis, matrix, label, vmin=0.0, vmax=100.0)
        axis.set_xticks(range(len(columns)), columns, rotation=40, ha="right")
        axis.set_yticks(range(len(rows)), rows)
        known = [(x, y) for y, x in np.argwhere(np.isfinite(matrix)).tolist()]
        shades = [matrix[y, x] for x, y in known]
        letters(axis, drawn, shades, known, [f"{round(value)}" for value in shades])

    return Panel(draw=draw, settings=settings)


def draw_lines(axis: Axes, lines: Sequence[Line]) -> None:
    """Draws the lines of a panel, in legend order."""
    for place, line in enumerate(lines):
        index = place if line.style is None else line.style
        x, y = np.asarray(line.x), np.asarray(line.y)
        step = max(-(-len(x) // _MOST_MARKERS), 1)
        looks = line_style(index)
        if len(x) > _MANY:
            looks |= {"linewidth": 0.9}
        axis.plot(x, y, label=line.label, markevery=(index % step, step), **looks)
        colour = looks["color"]
        if line.spread is not None:
            low, high = y - line.spread, y + line.spread
            axis.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        for other in line.faint:
            axis.plot(*other, color=colour, alpha=0.4, linewidth=0.8)
        if len(line.published):
            crosses = line.published[: len(x)]
            marks = {"color": colour, "markersize": 6, "label": "published"}
            axis.plot(x[: len(crosses)], crosses, "x", **marks)


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the index-th line of a panel."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": _DASHES[index % len(_DASHES)],
        "linewidth": max(2.2 - 0.25 * index, 1.2),
        "marker": _MARKERS[index % len(_MARKERS)],
        "markerfacecolor": "none",
        "markersize": max(7 - 0.7 * index, 4),
    }


def _finish(axis: Axes, panel: Panel) -> None:
    """Sets the scales, and what depends on them."""
    for name in panel.integers:
        ticks = MaxNLocator(8, integer=True, min_n_ticks=1)
        getattr(axis, f"{name}axis").set_major_locator(ticks)
    if panel.lengths:
        _log_lengths(axis, panel.lengths)
    if panel.is_log:
        _log_scale(axis)
    axis.set(**panel.settings)
    if panel.legend:
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02))


def _add_legend(figure: Figure, axes: Any) -> None:
    """One legend below all panels, each label once."""
    pairs = [axis.get_legend_handles_labels() for axis in axes.ravel()]
    handles = {
        label: handle for pair in pairs for handle, label in zip(*pair, strict=True)
    }
    labels = list(handles)
    for columns in range(len(labels), 0, -1):
        drawn = figure.legend(
            list(handles.values()), labels, loc="outside lower center", ncols=columns
        )
        if columns == 1 or drawn.get_window_extent().width <= figure.bbox.width:
            return
        drawn.remove()


def draw_image(
    figure: Figure, axis: Axes, values: Any, label: str, **looks: Any
) -> Any:
    """Draws a matrix `[rows, columns]` with its colour bar, and returns the drawn
    image; ``looks`` are keywords of ``imshow``."""
    axis.grid(False)
    looks = {"aspect": "auto", "cmap": RAMP, "interpolation": "nearest"} | looks
    drawn = axis.imshow(values, **looks)
    colour_bar(figure, axis, drawn, label, fraction=0.05, pad=0.02)
    return drawn


def colour_bar(
    figure: Figure, axis: Axes, drawn: Any, label: str, **keywords: Any
) -> None:
    """The colour bar of an image or a scatter plot, in plain numbers."""
    if isinstance(drawn.norm, LogNorm | SymLogNorm):
        keywords["format"] = FuncFormatter(lambda value, _: f"{value:g}")
    if isinstance(drawn.norm, LogNorm):
        keywords["ticks"] = _log_ticks(*drawn.get_clim())
    bar = figure.colorbar(drawn, ax=axis, label=label, **keywords)
    bar.ax.minorticks_off()


def colour_scale(values: Any) -> Normalize:
    """A colour scale from the least to the greatest of the values.

    It is logarithmic over at least one and at most four powers of ten; smaller values
    get the lightest colour. For values within a factor of 3 it is linear, which shows
    how they differ, and for values of either sign it is linear around 0.
    """
    least, most = float(np.min(values)), float(np.abs(values).max()) or 1.0
    if least < 0:
        return SymLogNorm(most / 100, vmin=-most, vmax=most)
    if most / 3 < least < most:
        return Normalize(least, most)
    return LogNorm(min(max(least, most / 1e4), most / 10), most, clip=True)


def letters(
    axis: Axes, drawn: Any, values: Any, places: Any, words: Sequence[str]
) -> None:
    """Writes a word on each of the places `[words, 2]`, which are shaded by their
    values in a drawn image or scatter plot: in black or, on dark shades, in white."""
    for value, place, word in zip(values, places, words, strict=True):
        colour = "white" if drawn.norm(value) > 0.6 else "black"
        settings = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
        axis.annotate(word.replace("$", r"\$"), place, **settings)


def _log_lengths(axis: Axes, lengths: Sequence[int]) -> None:
    """A logarithmic x axis with a tick at each length: 512, 1K, 2K.

    If there are many lengths, only every other one is labelled, including the last.
    """
    ticks = sorted(set(lengths))
    names = [f"{x // 1024}K" if x % 1024 == 0 else str(x) for x in ticks]
    if len(names) > _MOST_NAMES:
        names = [
            name if (len(names) - index) % 2 else "" for index, name in enumerate(names)
        ]
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, names)
    axis.xaxis.set_minor_locator(NullLocator())


def _log_scale(axis: Axes) -> None:
    """A logarithmic y axis with plain numbers."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(_log_ticks(*axis.get_ylim()))
    axis.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g}".replace("e-0", "e-"))
    )
    axis.yaxis.set_minor_locator(NullLocator())


def _log_ticks(low: float, high: float) -> LogLocator:
    """Powers of ten; if these are few, also twice and five times each."""
    few = math.log10(high / low) < 2.5
    return LogLocator(subs=(1, 2, 5) if few else (1,))
