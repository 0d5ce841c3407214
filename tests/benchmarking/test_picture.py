"""The picture of a benchmark."""

import pytest

from lra_jax.benchmarking.picture import draw


@pytest.mark.parametrize("works", [1, 2])
def test_the_title_of_a_picture_is_not_cut(works) -> None:
    case = {"attention": "linear", "dtype": "float32", "status": "measured"}
    case |= {"batch_size": 16, "heads": 16, "head_dim": 128, "causal": True}
    case |= {"length": 1024, "median_ms": 1.0, "peak_bytes": 10**9}
    names = ["forward", "forward+backward"][:works]
    device = "64 CPU cores (Intel(R) Xeon(R) CPU @ 2.20GHz)"
    report = {
        "rows": [case | {"work": name} for name in names],
        "device": device,
        "versions": {"jax": "0.10.2"},
    }
    figure = draw(report).draw()
    figure.draw_without_rendering()
    title = figure.get_suptitle()
    assert device in title and "causal" in title
    (text,) = [text for text in figure.texts if text.get_text() == title]
    box = text.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
