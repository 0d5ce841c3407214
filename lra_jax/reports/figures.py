"""Pictures as data: a `Chart` of `Panel`s, drawn in one way."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lra_jax.reports import charts
from lra_jax.reports.charts import Line


class Panel(NamedTuple):
    """One set of axes.

    Attributes:
      lines: in the order of the legend.
      draw: draws whatever is neither a line nor a setting.
      integers: axes with ticks at integers only: "", "x", "y" or "xy".
      is_log: the y axis is logarithmic.
      lengths: ticks of a logarithmic x axis; () = a linear one.
      settings: of ``Axes.set``.
      ends: a text to the right of each line's end; () = none.
    """

    lines: Sequence[Line] = ()
    draw: Callable[[Figure, Axes], None] | None = None
    integers: str = ""
    is_log: bool = False
    lengths: Sequence[int] = ()
    settings: Mapping[str, Any] = {}
    ends: Sequence[str] = ()


def image(
    values: np.ndarray, label: str, settings: Mapping[str, Any], **looks: Any
) -> Panel:
    """A panel with a matrix and its colour bar.

    Args:
      values: `[rows, columns]`.
      label: of the colour bar, with the unit.
      settings: see `Panel`.
      **looks: see `lra_jax.reports.charts.image`.
    """

    def draw(figure: Figure, axis: Axes) -> None:
        charts.image(figure, axis, values, label, **looks)

    return Panel((), draw, integers="xy", settings=settings)


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
      shared: the keywords ``sharex`` and ``sharey`` of ``Figure.subplots``.
    """

    name: str
    panels: Sequence[Panel]
    caption: str
    data: Any = None
    columns: int | None = None
    size: tuple[float, float] = (3.6, 3.4)
    ylabels: Sequence[str] = ()
    shared: Mapping[str, Any] = {}

    def draw(self) -> Figure:
        """The figure, to be made within ``charts.style()``."""
        columns = self.columns or len(self.panels)
        rows = -(-len(self.panels) // columns)
        figure, axes = charts.figure(rows, columns, self.size, **self.shared)
        pairs = list(zip(axes.ravel(), self.panels, strict=False))
        for axis in axes.ravel()[len(pairs) :]:
            axis.axis("off")
        for axis, panel in pairs:
            charts.draw(axis, panel.lines)
            if panel.draw is not None:
                panel.draw(figure, axis)
        # Scales and limits follow from the lines of all panels that share an axis.
        for axis, panel in pairs:
            charts.whole_numbers(axis, panel.integers)
            if panel.lengths:
                charts.log_lengths(axis, panel.lengths)
            if panel.is_log:
                charts.log_scale(axis)
            axis.set(**panel.settings)
            if panel.ends:
                charts.end_labels(axis, panel.lines, panel.ends)
        for axis, label in zip(axes[:, 0], self.ylabels, strict=False):
            axis.set_ylabel(label)
        charts.legend(figure, axes)
        return figure
