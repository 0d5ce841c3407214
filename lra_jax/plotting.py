"""One style for every picture of the project: print sizes, readable in grey.

Lines differ by marker and dashes as well as by colour, and the colours differ in
lightness; maps use one ramp from white to black. matplotlib is an optional extra
(``pip install 'lra-jax[plot]'``) and is imported when the first picture is made.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "RAMP",
    "check_available",
    "figure",
    "image",
    "line_style",
    "save",
    "shared_legend",
    "style",
    "whole_numbers",
]

RAMP = "Greys"
"""The colour map of matrices: light is little."""

_COLOURS = ("#000000", "#0072b2", "#d55e00", "#56b4e9", "#6b6b6b", "#b8860b", "#9b5f9b")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))

_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "gainsboro",
    "grid.linewidth": 0.5,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "savefig.dpi": 150,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}


def check_available() -> None:
    """Raises ``ValueError`` with the remedy where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "matplotlib is not installed, and draws the pictures: "
            "pip install 'lra-jax[plot]'"
        ) from error


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Context in which pictures have the project's style and need no screen."""
    check_available()
    import matplotlib

    backend = matplotlib.get_backend()
    matplotlib.use("Agg")
    with matplotlib.rc_context(_STYLE):
        yield
    matplotlib.use(backend)


def figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (3.4, 2.6), **axes: Any
) -> tuple[Any, Any]:
    """A figure and an array of its axes `[rows, columns]`; call it in `style`.

    Args:
      rows, columns: of panels.
      size: of one panel, in inches.
      **axes: further keywords of ``pyplot.subplots``.
    """
    check_available()
    from matplotlib import pyplot

    return pyplot.subplots(
        rows,
        columns,
        figsize=(columns * size[0], rows * size[1]),
        squeeze=False,
        **axes,
    )


def line_style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the index-th line of a panel."""
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[index % len(_DASHES)],
    }


def image(figure: Any, axis: Any, values: Any, label: str, **keywords: Any) -> None:
    """Draws a matrix with its scale beside it.

    Args:
      figure, axis: where.
      values: `[rows, columns]`.
      label: of the scale, with its unit.
      **keywords: further ones of ``imshow``.
    """
    axis.grid(False)
    keywords = {"aspect": "auto", "cmap": RAMP, "interpolation": "nearest"} | keywords
    drawn = axis.imshow(values, **keywords)
    figure.colorbar(drawn, ax=axis, label=label, fraction=0.05, pad=0.02)


def whole_numbers(axis: Any, which: str = "x") -> None:
    """Ticks at integers only."""
    getattr(axis, f"{which}axis").get_major_locator().set_params(integer=True)


def shared_legend(figure: Any, axis: Any, columns: int = 4) -> None:
    """One legend below all panels, with the lines of one of them."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(columns, len(labels))
    )


def save(figure: Any, file: Path) -> None:
    """Writes a picture, without the time of day, and forgets the figure."""
    from matplotlib import pyplot

    figure.savefig(file, metadata={"Software": None})
    pyplot.close(figure)
