"""Properties that a reader of a chart relies on."""

import itertools
from typing import Any

import numpy as np

from lra_jax.reports import charts
from lra_jax.reports.charts import Chart, Line, Panel


def drawn(*lines: Line, **settings: Any) -> tuple[Any, Any]:
    """A figure of one panel with these lines, and its axes."""
    figure = Chart("a", [Panel(lines, **settings)]).draw()
    return figure, figure.axes[0]


def test_lines_that_hide_each_other_are_told_apart():
    """Later ones are thinner, and differ in colour, marker and dashes."""
    lines = [Line(str(i), np.arange(50), np.zeros(50)) for i in range(10)]
    _, axis = drawn(*lines)
    for above, below in itertools.pairwise(axis.lines):
        assert above.get_linewidth() >= below.get_linewidth()
        assert above.get_markersize() >= below.get_markersize()
    looks = [(x.get_color(), x.get_marker(), x.get_linestyle()) for x in axis.lines]
    assert len(set(looks)) == 10
    assert {x.get_markerfacecolor() for x in axis.lines} == {"none"}
    # Markers of long lines are few, and not all in the same places.
    places = {x.get_markevery() for x in axis.lines}
    assert len(places) == 5 and all(step == 5 for _, step in places)


def test_a_line_with_all_its_parts():
    faint = [([0, 1], [1, 2]), ([0, 1], [3, 4])]
    line = Line("a", [0, 1], [2, 3], spread=[1, 1], faint=faint, published=[2, 3, 4])
    figure, axis = drawn(line, Line("b", [0, 1], [0, 0], style=0))
    main, first, second, crosses, other = axis.lines
    assert list(first.get_ydata()) == [1, 2] and list(second.get_ydata()) == [3, 4]
    assert crosses.get_marker() == "x" and len(crosses.get_xdata()) == 2
    assert {x.get_color() for x in axis.lines} == {main.get_color()}
    assert other.get_linestyle() == main.get_linestyle()
    assert len(axis.collections) == 1
    (legend,) = figure.legends
    assert [x.get_text() for x in legend.texts] == ["a", "published", "b"]


def test_a_legend_is_no_wider_than_its_figure():
    names = [f"cosformer, {n},000 steps" for n in range(5)]
    panel = Panel([Line(name, [0, 1], [0, 1]) for name in names])
    figure = Chart("a", [panel], size=(10, 4)).draw()
    (legend,) = figure.legends
    assert [x.get_text() for x in legend.texts] == names
    assert 0 < legend.get_window_extent().width <= figure.bbox.width


def test_legends_are_outside_the_lines():
    line = Line("a long name of a mechanism", [0, 1], [0, 1])
    for beside in (False, True):
        figure, axis = drawn(line, legend=beside)
        figure.draw_without_rendering()
        legend = axis.get_legend() if beside else figure.legends[0]
        assert len(figure.legends) == 1 - beside
        box = legend.get_window_extent()
        assert not axis.get_window_extent().overlaps(box)
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0


def test_a_single_step_has_a_tick_of_its_own():
    _, axis = drawn(Line("a", [3], [0.5]), integers="x")
    low, high = axis.get_xlim()
    assert [x for x in axis.get_xticks() if low <= x <= high] == [3]


def test_axes_of_lengths_are_powers_of_two():
    line = Line("a", [512, 1024, 3072], [1e-7, 0.5, 1])
    _, axis = drawn(line, lengths=[3072, 512, 1024, 512], is_log=True)
    assert [x.get_text() for x in axis.get_xticklabels()] == ["512", "1K", "3K"]
    shown = axis.yaxis.get_major_formatter()
    assert [shown(x) for x in (1e-7, 0.5, 20)] == ["1e-7", "0.5", "20"]
    assert axis.get_yscale() == "log"


def test_letters_are_read_on_light_and_on_dark():
    figure, axis = drawn()
    image = charts.draw_image(figure, axis, np.array([[0.0, 1.0]]), "share")
    charts.letters(axis, image, [0.0, 1.0], [(0, 0), (1, 0)], ["$a", "b$"])
    assert [text.get_color() for text in axis.texts] == ["black", "white"]
    assert axis.texts[0].get_text() == r"\$a"


def test_a_picture_does_not_depend_on_the_day():
    chart = Chart("a", [Panel([Line("a", [0, 1], [0, 1])])])
    one = chart.png()
    assert one == chart.png() and one.startswith(b"\x89PNG")


def test_colours_show_how_values_differ():
    even = charts.colour_scale(np.array([0.9, 1.0, 1.1]))
    np.testing.assert_allclose(even([0.9, 1.0, 1.1]), [0, 0.5, 1])
    wide = charts.colour_scale(np.array([0.01, 0.1, 1.0]))
    np.testing.assert_allclose(wide([0.01, 0.1, 1.0]), [0, 0.5, 1])
    signed = charts.colour_scale(np.array([-1.0, 0.5]))
    assert signed(0.0) == 0.5 and signed(1.0) == 1
    for same in (0.0, 2.0):
        assert np.isfinite(charts.colour_scale(np.full(3, same))(same))
