"""Learning curves as inline SVG: no script, no network, readable in dark and light."""

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#e69f00", "#56b4e9", "#8c564b", "#7f7f7f"),
)
"""Told apart by most eyes; the ninth curve begins again, dashed."""

WIDTH, HEIGHT = 720, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 12, 40


class Curve(NamedTuple):
    """Attributes: its name, and for each seed its points ``(step, percent)``."""

    name: str
    seeds: list[list[tuple[float, float]]]


def style(index: int) -> tuple[str, str]:
    """The colour and the dash pattern of a curve."""
    dashes = ("", "6 3", "2 3", "8 3 2 3")[index // len(COLOURS) % 4]
    return COLOURS[index % len(COLOURS)], dashes


def chart(title: str, curves: Sequence[Curve]) -> str:
    """Validation accuracy against steps: seeds thin, their mean thick.

    Returns:
      An ``<svg>``, which scales with its container.
    """
    points = [p for curve in curves for seed in curve.seeds for p in seed]
    last = max((x for x, _ in points), default=1.0)
    low = math.floor(min((y for _, y in points), default=0.0) / 5) * 5
    high = max(math.ceil(max((y for _, y in points), default=100.0) / 5) * 5, low + 5)

    def place(x: float, y: float) -> str:
        across = _LEFT + x / last * (WIDTH - _LEFT - _RIGHT)
        down = _TOP + (high - y) / (high - low) * (HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [_axes(last, low, high, place)]
    for index, curve in enumerate(curves):
        colour, dashes = style(index)
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        for seed in curve.seeds if len(curve.seeds) > 1 else ():
            line = " ".join(place(x, y) for x, y in seed)
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" '
                f'stroke-opacity="0.35" stroke-width="1"{dash}/>'
            )
        line = " ".join(place(x, y) for x, y in mean_curve(curve.seeds))
        name = html.escape(curve.name)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" '
            f'stroke-width="2.2"{dash}><title>{name}</title></polyline>'
        )
    label = html.escape(title, quote=True)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def mean_curve(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple]:
    """The mean over seeds at the steps that all of them have."""
    tables = [dict(seed) for seed in seeds]
    steps = sorted(set.intersection(*(set(table) for table in tables)))
    return [(x, sum(table[x] for table in tables) / len(tables)) for x in steps]


def _axes(last, low, high, place) -> str:
    parts = []
    for i in range(6):
        value = low + i * (high - low) / 5
        start, end = place(0, value), place(last, value)
        x1, y = start.split(",")
        parts.append(
            f'<line x1="{x1}" y1="{y}" x2="{end.split(",")[0]}" y2="{y}" class="grid"/>'
            f'<text x="{_LEFT - 6}" y="{float(y) + 4:.1f}" text-anchor="end">'
            f"{value:g}</text>"
        )
        step = last * i / 5
        x = place(step, low).split(",")[0]
        anchor = "end" if i == 5 else "middle"
        parts.append(
            f'<text x="{x}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">'
            f"{_short(step)}</text>"
        )
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">training step; '
        "upwards: validation accuracy, %</text>"
    )
    return "".join(parts)


def _short(step: float) -> str:
    """``12500`` to ``12.5k``."""
    return f"{step / 1000:g}k" if step >= 10_000 else f"{step:g}"
