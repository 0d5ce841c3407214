"""Contact sheets: many small images in one PNG, each with its label above it."""

import math
import os
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from lra_jax.files import replacing

_PAPER, _INK = "#404040", "#ffffff"
_CAPTION = 12
_GAP = 4
# Images are enlarged to at least this many pixels.
_LEAST_SIDE = 64


def write_png(file: str | os.PathLike, pixels: np.ndarray) -> None:
    """Writes an image; never leaves a partial file.

    Args:
      file: the file to write; its folder must exist.
      pixels: uint8 `[rows, columns]`, 0 black, or `[rows, columns, 3]` in colour.

    Raises:
      OSError: it cannot be written.
    """
    with replacing(pathlib.Path(file)) as partial:
        Image.fromarray(pixels).save(partial, "PNG", optimize=True)


def contact_sheet(images: np.ndarray, labels: Sequence[object]) -> np.ndarray:
    """Arranges images on grey, each under its label, in about as many rows as columns.

    Args:
      images: uint8 `[n, height, width]`, or `[n, height, width, 3]`, n > 0.
      labels: `[n]`, words or numbers.

    Returns:
      uint8 `[rows, columns]`, or `[rows, columns, 3]`, for `write_png`.
    """
    count, *sides = images.shape[:3]
    mode = "RGB" if images.ndim == 4 else "L"
    scale = math.ceil(_LEAST_SIDE / max(sides))
    height, width = (side * scale for side in sides)
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    high, wide = height + _CAPTION + _GAP, width + _GAP
    sheet = Image.new(mode, (columns * wide + _GAP, rows * high + _GAP), _PAPER)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        row, column = divmod(index, columns)
        left, top = _GAP + column * wide, _GAP + row * high
        caption = Image.new(mode, (width, _CAPTION), _PAPER)
        ImageDraw.Draw(caption).text((0, 0), str(label), fill=_INK)
        sheet.paste(caption, (left, top))
        large = Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST)
        sheet.paste(large, (left, top + _CAPTION))
    return np.asarray(sheet)
