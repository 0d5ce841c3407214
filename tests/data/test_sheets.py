"""Contact sheets: the pixels in the file are those of the images."""

import struct
import zlib

import numpy as np
import pytest

from lra_jax.data import sheets


def read_png(file) -> np.ndarray:
    """A reader of what the standard says, apart from the writer."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        body = data[at + 4 : at + 8 + size]
        (checksum,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert zlib.crc32(body) == checksum
        chunks[body[:4]], at = body[4:], at + 12 + size
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, colour) == (8, 0)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    lines = lines.reshape(height, width + 1)
    assert not lines[:, 0].any()
    return lines[:, 1:]


def test_png(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 9), np.uint8)
    sheets.write_png(tmp_path / "x.png", pixels)
    np.testing.assert_array_equal(read_png(tmp_path / "x.png"), pixels)
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
        (lambda: sheets.contact_sheet(np.zeros((2, 4, 4), np.uint8), [1]), r"\(1,\)"),
        (lambda: sheets.write_png("x.png", np.zeros((4, 4))), "uint8 .*float64"),
        (lambda: sheets.write_png("x.png", np.zeros(4, np.uint8)), r"shape \(4,\)"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
