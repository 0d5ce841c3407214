"""Contact sheets: many small grey images in one PNG, each with its label above it."""

import math
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from lra_jax.errors import expected
from lra_jax.files import replacing

# Digits of 3 x 5 pixels, row by row, one bit per pixel.
_DIGITS = (
    *(0b111101101101111, 0b010110010010111, 0b111001111100111, 0b111001111001111),
    *(0b101101111001001, 0b111100111001111, 0b111100111101111, 0b111001001001001),
    *(0b111101111101111, 0b111101111001111),
)
_PAPER, _INK = 64, 255
_CAPTION = 7
_GAP = 4


def write_png(file: str | os.PathLike, pixels: np.ndarray) -> None:
    """Writes a grey image; never leaves a partial file.

    Args:
      file: the file to write; its folder must exist.
      pixels: uint8 `[rows, columns]`, 0 black.

    Raises:
      ValueError: another shape or dtype.
      OSError: it cannot be written.
    """
    pixels = np.asarray(pixels)
    if pixels.ndim != 2 or pixels.dtype != np.uint8 or not pixels.size:
        got = f"{pixels.dtype} {list(pixels.shape)}"
        raise expected("pixels", "uint8 [rows, columns]", got)
    with replacing(pathlib.Path(file)) as partial:
        Image.fromarray(pixels).save(partial, "PNG", optimize=True)


def contact_sheet(
    images: np.ndarray,
    labels: Sequence[int] | np.ndarray,
    columns: int | None = None,
    scale: int | None = None,
) -> np.ndarray:
    """Arranges images in rows, on grey, each under its label.

    Args:
      images: uint8 `[n, height, width]`.
      labels: `[n]`, not negative.
      columns: images per row; by default about as many as there are rows.
      scale: side in pixels of each image pixel; by default images are enlarged to at
        least 64 pixels.

    Returns:
      uint8 `[rows, columns]`, for `write_png`.

    Raises:
      ValueError: there is no image, or the number of labels differs.
    """
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim != 3 or not images.size or labels.shape != images.shape[:1]:
        raise expected(
            "images, labels",
            "[n, height, width] and [n] with n > 0",
            f"{list(images.shape)} and {list(labels.shape)}",
        )
    count, height, width = images.shape
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    scale = scale or max(1, math.ceil(64 / max(height, width)))
    cell = (height * scale + _CAPTION + _GAP, width * scale + _GAP)
    rows = math.ceil(count / columns)
    sheet = np.full((rows * cell[0] + _GAP, columns * cell[1] + _GAP), _PAPER, np.uint8)
    for index, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        row, column = divmod(index, columns)
        top, left = _GAP + row * cell[0], _GAP + column * cell[1]
        _write_number(sheet[top : top + 5, left : left + width * scale], label)
        top += _CAPTION
        large = image.repeat(scale, 0).repeat(scale, 1)
        sheet[top : top + height * scale, left : left + width * scale] = large
    return sheet


def _write_number(strip: np.ndarray, number: int) -> None:
    """Writes digits into a strip five pixels high, as far as there is room."""
    for place, digit in enumerate(str(number)):
        bits = f"{_DIGITS[int(digit)]:015b}"
        glyph = np.array([bit == "1" for bit in bits]).reshape(5, 3)
        target = strip[:, 4 * place : 4 * place + 3]
        target[glyph[:, : target.shape[1]]] = _INK
