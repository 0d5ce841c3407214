"""Contact sheets: the pixels in the file are those of the images."""

import numpy as np
import pytest
from PIL import Image

from lra_jax.data import sheets


def test_png(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9), np.uint8)
    sheets.write_png(tmp_path / "x.png", pixels)
    with Image.open(tmp_path / "x.png", formats=["PNG"]) as image:
        assert image.mode == "L"
        np.testing.assert_array_equal(np.asarray(image), pixels)
    assert [file.name for file in tmp_path.iterdir()] == ["x.png"]


def test_every_image_is_on_the_sheet():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 6), np.uint8)
    sheet = sheets.contact_sheet(images, [0, 1, 2, 31, 4], columns=3, scale=2)
    assert sheet.shape == (2 * (8 + 7 + 4) + 4, 3 * (12 + 4) + 4)
    for index, image in enumerate(images):
        row, column = divmod(index, 3)
        top, left = 4 + row * 19 + 7, 4 + column * 16
        shown = sheet[top : top + 8 : 2, left : left + 12 : 2]
        np.testing.assert_array_equal(shown, image)
    # Above the second one stands a 1: its middle column, and a foot.
    caption = sheet[4:9, 20:23] == 255
    assert caption[:, 1].all() and caption[4].all() and not caption[1:4, 2].any()


def test_small_images_are_enlarged_and_few_are_no_problem():
    sheet = sheets.contact_sheet(np.zeros((1, 8, 8), np.uint8), [9])
    assert sheet.shape == (64 + 15, 64 + 8)
    assert sheets.contact_sheet(np.zeros((1, 1, 1), np.uint8), [123456], scale=1).size


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sheets.contact_sheet(np.zeros((0, 4, 4), np.uint8), []), r"n > 0"),
        (
            lambda: sheets.contact_sheet(np.zeros((2, 4, 4), np.uint8), [1]),
            r"d \[1\]",
        ),
        (lambda: sheets.write_png("x.png", np.zeros((4, 4))), "uint8 .*float64"),
        (lambda: sheets.write_png("x.png", np.zeros(4, np.uint8)), r"uint8 \[4\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
