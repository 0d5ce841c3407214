"""Contact sheets: the pixels in the file are those of the images."""

import numpy as np
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
    sheet = sheets.contact_sheet(images, [0, 1, 2, 31, 4])
    assert sheet.shape == (2 * (44 + 12 + 4) + 4, 3 * (66 + 4) + 4)
    for index, image in enumerate(images):
        row, column = divmod(index, 3)
        top, left = 4 + row * 60 + 12, 4 + column * 70
        shown = sheet[top : top + 44, left : left + 66]
        np.testing.assert_array_equal(shown, image.repeat(11, 0).repeat(11, 1))


def test_each_image_is_under_its_own_label():
    sheet = sheets.contact_sheet(np.zeros((4, 8, 8), np.uint8), [1, 2, 2, 11])
    one, two = sheet[4:16, 4:68], sheet[4:16, 72:136]
    same, longer = sheet[84:96, 4:68], sheet[84:96, 72:136]
    np.testing.assert_array_equal(same, two)
    inks = [int((caption > 64).sum()) for caption in (one, two, longer)]
    assert 0 < inks[0] < inks[1] and inks[2] == 2 * inks[0]


def test_few_images_and_long_labels_are_no_problem():
    sheet = sheets.contact_sheet(np.zeros((1, 8, 8), np.uint8), [9])
    assert sheet.shape == (64 + 20, 64 + 8)
    images = np.zeros((1, 99, 1), np.uint8)
    assert sheets.contact_sheet(images, [123456]).shape == (99 + 20, 1 + 8)
